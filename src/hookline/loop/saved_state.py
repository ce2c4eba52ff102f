"""The form of the state in a checkpoint, checked before anything of it is loaded.

A checkpoint may be damaged or come from a stranger: every section has to be there, with its type.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, InstanceOf, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from hookline.checkpoint import Checkpoint
from hookline.errors import CheckpointError, HooklineError
from hookline.printable import message_lines

_MAX_SHOWN = 10

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(gt=0, lt=1 << 63)]
Names = list[str]
Section = dict[str, Any]
State = InstanceOf[torch.Tensor]
_Gradients = list[list[State | None] | None]


class _Classes(TypedDict, total=False):
    optimizers: Names
    schedulers: Names


class _Group(TypedDict):
    params: list[Count]
    param_names: NotRequired[Names | None]


class _Optimizer(TypedDict):
    state: dict[Any, Any]
    param_groups: list[_Group]


class _Mean(TypedDict):
    mean: float
    weight: float


class _LogPosition(TypedDict):
    metrics: Count
    rewinds: NotRequired[Count]


class _HookState(TypedDict):
    """The state of hooks, which all loops save."""

    hooks: dict[str, dict[Any, Any]]
    disabled: Names
    means: dict[str, _Mean]
    step: Count
    best_accuracy: float
    run: NotRequired[_LogPosition | None]


class _Objects(TypedDict):
    """The further state of loops whose checkpoints are ours."""

    classes: NotRequired[_Classes]
    optimizers: list[_Optimizer]
    schedulers: list[Section]
    scaler: Section | None


class _PassStart(TypedDict):
    random: Section
    generators: list[Any]


class _Indices(TypedDict):
    start: _PassStart
    first: _PassStart
    drawn: Count
    is_over: bool


class _Pass(TypedDict):
    start: _PassStart
    loader: NotRequired[Section]
    indices: NotRequired[_Indices | None]


_PassField = TypedDict("_PassField", {"pass": _Pass | None})


class _Loader(_PassField):
    ended: list[Annotated[list[Positive], Field(min_length=2, max_length=2)]]
    persistent_workers: bool
    has_workers: bool
    samples: Count | None
    batch_size: NotRequired[Count | None]


class _Position(TypedDict):
    epoch: Count
    batches: Count
    now: Section
    generators: list[Any]
    val_generators: list[Any]
    order: NotRequired[Count]
    loaders: list[_Loader]
    validated: dict[str, float]


class _RankState(TypedDict):
    position: _Position
    means: dict[str, _Mean]
    tokens_seen: Count


class _TrainerState(_HookState, _Objects):
    attributes: Section
    position: _Position
    epoch: Count
    round: Count
    pending_gradients: _Gradients
    tokens_seen: Count
    sanity_due: bool
    validation_due: bool
    epoch_started: NotRequired[bool]
    epoch_over: bool
    settings: NotRequired[Section]
    ranks: NotRequired[list[_RankState] | None]
    strategy: NotRequired[Section]


class _SessionRank(TypedDict):
    means: dict[str, _Mean]
    tokens_seen: Count | None
    random: Section


class _WatchedState(TypedDict):
    """The further state of loops that are not ours."""

    attributes: NotRequired[Section]
    epoch: Count | None
    tokens_seen: Count | None
    logged: NotRequired[dict[str, _Mean]]
    unreported: NotRequired[list[tuple[Count, Count | None, str, float]]]
    step_of: NotRequired[Count | None]


class _SessionState(_HookState, _WatchedState, _Objects):
    random: NotRequired[Section | None]
    extra: NotRequired[Section]
    pending_gradients: NotRequired[_Gradients]
    ranks: NotRequired[Annotated[list[_SessionRank], Field(min_length=1)]]


class _LibraryState(_HookState, _WatchedState):
    """The state that is saved with the checkpoint of another library."""

    batch_idx: Count
    run_id: str | None


@contextmanager
def reported_damage(checkpoint: Checkpoint) -> Generator[None]:
    """Report any failure to compare a state as damage of its checkpoint.

    Raises:
        CheckpointError: An error occurred that is not Hookline's own.
    """
    try:
        yield
    except HooklineError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The state in the checkpoint {checkpoint.path} is damaged, and nothing was changed: "
            f"{type(error).__name__}: {error}"
        ) from error


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _check(kind: type, what: str, checkpoint: Checkpoint) -> None:
    """Raise unless the state has the form of this kind.

    Raises:
        CheckpointError: The message lists what is missing or has another type.
    """
    if checkpoint.info.get("weights_only"):
        raise CheckpointError(
            f"{checkpoint.path} has only the model's weights (save_weights_only), and not what "
            "training needs to resume. Nothing was changed. To use the weights, load them with "
            "`hookline.open_run(…).checkpoints()[-1].load_into(model)`. To resume, give the run's "
            "folder, which stands for its newest checkpoint with all of the state."
        )
    try:
        _adapter(kind).validate_python(checkpoint.state, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found[:_MAX_SHOWN]]
        if len(found) > _MAX_SHOWN:
            lines.append(f"and {len(found) - _MAX_SHOWN} more")
        head = (
            f"The state in the checkpoint {checkpoint.path} is not that of {what}. Nothing was "
            "changed. The checkpoint is damaged, or was saved by another kind of loop:"
        )
        raise CheckpointError(message_lines(head, *lines)) from None


check_trainer_state = partial(_check, _TrainerState, "a trainer")
check_session_state = partial(_check, _SessionState, "a bare loop")
check_library_state = partial(_check, _LibraryState, "hooks in another library's trainer")
