"""The checkpoints of a run: their metadata, the newest one, and loading weights into a model."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hookline.arguments import check_path
from hookline.checkpoint.catalog import (
    find_checkpoint,
    is_emergency,
    is_weights_only,
    path_exists,
    read_pointers,
    scan_checkpoints,
)
from hookline.checkpoint.completion_files import find_transformers_checkpoint
from hookline.checkpoint.differences import describe_mismatches, fitting_weights
from hookline.errors import CheckpointError
from hookline.printable import message_lines
from hookline.runs.location import list_run_folders

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)

log = logging.getLogger("hookline")

_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DDP


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint on disk.

    Attributes:
        step: Completed steps.
        metrics: The metrics of the newest validation.
        created: When it was saved, in UTC.
        is_last: Whether the run's pointer `last` names it.
        is_best: Whether the run's pointer `best` names it.
        is_emergency: Whether it was saved after a crash. Such a checkpoint is never resumed from
            automatically.
        is_weights_only: Whether it has only the model's weights. No run can be resumed from it.
        size: The size of its files in bytes.
    """

    path: Path
    step: int | None
    epoch: int | None
    metrics: dict[str, Any]
    created: str
    is_last: bool = False
    is_best: bool = False
    is_emergency: bool = False
    is_weights_only: bool = False
    size: int = 0

    def load_into(self, model: Model, *, strict: bool = True) -> Model:
        """Load the weights into a model, and return it.

        All files are verified first. If they are damaged or do not match, an error names all
        differences, and the model is not changed. The prefixes that `torch.compile` and DDP add to
        names are ignored.

        Args:
            model: The model.
            strict: False loads the weights whose name and shape match, and logs a warning that
                lists the others.
        """
        from hookline.checkpoint import load_checkpoint

        weights = load_checkpoint(self.path).model
        expected = model.state_dict()
        renamed = _match_names(weights, expected)
        problems = describe_mismatches(renamed, expected)
        if problems and strict:
            head = f"The checkpoint {self.path} does not match this {type(model).__name__}"
            raise CheckpointError(message_lines(f"{head}, which was not changed:", *problems))
        fitting = fitting_weights(renamed, expected)
        model.load_state_dict(fitting, strict=strict)
        if problems:
            count = f"{len(fitting)} of {len(renamed)} weights"
            head = f"Of the checkpoint {self.path}, {count} were loaded into this "
            log.warning("%s", message_lines(f"{head}{type(model).__name__}:", *problems))
        return model


def get_last_checkpoint(folder: str | os.PathLike[str], *, verify: bool = True) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None if there is none.

        path = hookline.get_last_checkpoint("runs")
        trainer.fit(loader, resume_from=path)  # None starts a new run

    Damaged checkpoints are skipped with a warning that names the file. Checkpoints that were saved
    after a crash, or have only the weights, are skipped, too. torch is not imported.

    Args:
        folder: The folder of a run, its folder `checkpoints/`, or a folder of runs: then the
            newest run that has a checkpoint. Or the `output_dir` of a Hugging Face Trainer with
            hooks attached: then the newest `checkpoint-<step>` that was written completely.
        verify: Read the files and compare their hashes. False compares only their sizes.
    """
    folder = Path(check_path("The folder", folder, "that of a run or of checkpoints"))
    if not path_exists(folder) or not folder.is_dir():
        return None
    if (found := find_transformers_checkpoint(folder, verify=verify)) is not None:
        return found
    for place in (folder, *list_run_folders(folder)):
        try:
            return find_checkpoint(place, verify=verify)
        except CheckpointError:
            continue
    return None


def read_checkpoints(folder: Path) -> tuple[list[SavedCheckpoint], list[str]]:
    """Return the complete checkpoints in a folder, oldest first, and what is wrong with others."""
    scan, pointers = scan_checkpoints(folder), read_pointers(folder)
    checkpoints: list[SavedCheckpoint] = []
    for path, manifest in scan.complete.items():
        info = manifest["info"]
        checkpoints.append(
            SavedCheckpoint(
                path=path,
                step=info.get("step"),
                epoch=info.get("epoch"),
                metrics=decode_metrics(info),
                created=manifest["created"],
                is_last=pointers.get("last") == path.name,
                is_best=pointers.get("best") == path.name,
                is_emergency=is_emergency(manifest),
                is_weights_only=is_weights_only(manifest),
                size=sum(file["size"] for file in manifest["files"].values()),
            )
        )
    return checkpoints, [f"{folder.name}/{name}: {text}" for name, text in scan.damage.items()]


def choose_of_step(checkpoints: Sequence[SavedCheckpoint], step: str) -> Path | None:
    """Return the newest checkpoint of a step that a run can resume from, else another, or None."""
    matching = [one for one in checkpoints if str(one.step) == step]
    matching.sort(key=lambda one: (not one.is_weights_only, not one.is_emergency))
    return matching[-1].path if matching else None


def decode_metrics(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in the `info` of a checkpoint's manifest."""
    metrics = info.get("metrics") or {}
    return {name: _decode_number(value) for name, value in metrics.items()}


def _decode_number(value: Any) -> Any:
    if isinstance(value, dict) and value.get("$") == "float":  # NaN and infinities
        text = str(value.get("v"))
        return float("nan" if text.startswith("0x") else text)
    return value


def _match_names(
    weights: OrderedDict[str, Any], expected: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Return weights under the model's names where they differ only by a wrapper's prefix."""
    names = {_remove_prefixes(name): name for name in expected}
    renamed = OrderedDict(
        (names.get(_remove_prefixes(name), name), value) for name, value in weights.items()
    )
    if len(names) != len(expected) or len(renamed) != len(weights):
        return weights
    saved: Any = getattr(weights, "_metadata", None)  # the versions of modules, by their names
    if saved is not None:
        versions = {_module_name(name): version for name, version in saved.items()}
        metadata = {name: versions.get(_module_name(name), {}) for name in expected._metadata}  # type: ignore[attr-defined]
        renamed._metadata = metadata  # type: ignore[attr-defined]
    return renamed


def _module_name(name: str) -> str:
    return _remove_prefixes(f"{name}.").strip(".")


def _remove_prefixes(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
