"""Session: what `attach` returns, with the calls that give hooks more."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hookline.arguments import (
    check_flag,
    check_instance,
    check_mapping,
    check_name,
    check_number,
    check_path,
    check_whole_number,
    describe_value,
)
from hookline.context import LazyFloat
from hookline.dispatch.compiler import DISPATCHER_FILE
from hookline.errors import ArgumentError, HooklineError, LoopError
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext, Batch
from hookline.integrations.bare_loop.loaded_checkpoint import LoadedCheckpoint
from hookline.integrations.bare_loop.loop_phases import LoopPhases
from hookline.loop.evaluation import samples_in

if TYPE_CHECKING:
    from hookline.runs.run import Kind

__all__ = ["Session"]

log = logging.getLogger("hookline")
T = TypeVar("T")


class Session(LoopPhases):
    """What `attach` returns: the handle to detach, and the calls that give hooks more.

    It is a context manager: entering it starts training (`on_train_start`), leaving it ends
    training and detaches. Without `with`, training starts with the first call that is seen, and
    `detach()` ends it. Hooks get it as `trainer`, and may set attributes of their own on it.

    Attributes:
        run: the run and its folder; None without `attach(…, runs=…)`, before training starts, and
            on ranks other than the first.
    """

    def batches(self, loader: Iterable[T], name: str | None = None, idx: int = 0) -> Iterator[T]:
        """Iterate over a loader, and fire the events of each batch.

        A batch that completes a step ends with `optimizer.step()`, others when the next is loaded.

        Args:
            loader: anything to iterate over.
            name: the loader's name; "train", or "val" within `validation()`.
            idx: its number, where a loop has several.
        """
        try:
            batches = iter(loader)
        except TypeError:
            raise ArgumentError(
                f"session.batches(loader) takes anything to iterate over, not "
                f"{describe_value(loader)}."
            ) from None
        if name is not None:
            check_instance("batches(…, name=…)", name, str, "the loader's name or None")
        self.begin()
        self._supplied.add("batches")
        trains = self._validation is None
        if self._stop.is_active and trains:
            return
        if trains:
            self._reach_boundary()
        for i, batch in enumerate(batches):
            self._begin_batch(Batch(batch, i, idx, name or ("train" if trains else "val")))
            yield batch
            self._end_batch()
            if self._stop.is_active and trains:
                break
            if trains:
                self._reach_boundary()
        self._context.known_batch = None

    @contextmanager
    def epoch(self, number: int | None = None) -> Generator[int]:
        """Mark an epoch; the value of `with … as` is its number, from 0."""
        if number is not None:
            check_whole_number("epoch(number)", number)
        self.begin()
        self._reach_boundary()
        self._supplied.add("epoch")
        before = self._context.known_epoch
        epoch = number if number is not None else 0 if before is None else before + 1
        self._begin_epoch(epoch)
        yield epoch
        self._end_epoch()

    @contextmanager
    def validation(self) -> Generator[None]:
        """Mark validation. What is logged within becomes `val/<name>`, as a mean.

        What is logged for a batch of `batches` counts as often as the batch has samples. Where
        several processes train together, the mean is that of all of them: each validates with its
        part of the batches, and these may be unequally many. If some processes do not validate,
        the others warn after a minute, and each has its own mean.

        Model mode, `no_grad` and random states are left to the loop.
        """
        self.begin()
        self._reach_boundary()
        self._supplied.add("validation")
        training_batch, self._context.known_batch = self._context.known_batch, None
        means = self._begin_validation()
        agreement = self._agreement
        together = agreement if agreement is not None and agreement.begin_validation() else None
        try:
            self._fire("on_validation_start")
            yield
            found = means.means() if together is None else together.validation_means(means)
            self._end_validation(found)
        finally:
            self._leave_validation()
            self._context.known_batch = training_batch
        if together is not None:
            self._agree()

    def backward(self, loss: torch.Tensor, *, accumulate: int = 1, **options: Any) -> None:
        """Run backward, and give hooks the loss.

        Args:
            loss: the batch's own loss; it is divided and scaled here.
            accumulate: the number of batches in a step; the loss is divided by it.
            options: further arguments of `Tensor.backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ArgumentError(f"A loss is a tensor with one element, not {describe_value(loss)}.")
        if not loss.requires_grad:
            raise ArgumentError("The loss has no gradient: it was computed from no parameter.")
        if type(accumulate) is not int or not 1 <= accumulate <= sys.maxsize:
            check_whole_number("backward(…, accumulate=…)", accumulate, 1, sys.maxsize)
        self.begin()
        self._supplied.add("backward")
        divided = loss / accumulate if accumulate != 1 else loss
        self._context.known_loss = divided
        self._fire("on_before_backward")
        scaled = self.scaler.scale(divided) if self.scaler is not None else divided
        self._step_watch.run_backward(loss, lambda: scaled.backward(**options))

    def updates(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fire `on_gradients_ready` and run updates. Call it before clipping gradients.

        Without it, both happen just before `optimizer.step()`.

        Args:
            optimizer: whose gradients are complete, where several have backwards of their own; by
                default those of all.
        """
        if optimizer is not None and not any(optimizer is own for own in self.optimizers):
            raise _unknown_optimizer("updates", optimizer)
        self.begin()
        self._step_watch.gradients_ready(optimizer)

    def clip(
        self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> torch.Tensor:
        """Clip unscaled gradients by norm and fire the event; return the norm before clipping.

        Args:
            max_norm: the largest norm, for each optimizer's gradients.
            optimizer: whose gradients, where several have backwards of their own; by default all.
            options: further arguments of `torch.nn.utils.clip_grad_norm_`.
        """
        if optimizer is not None and not any(optimizer is own for own in self.optimizers):
            raise _unknown_optimizer("clip", optimizer)
        norm: Any = max_norm  # a tensor works, too, and infinity only measures
        if isinstance(norm, torch.Tensor):
            has_data = norm.layout is torch.strided and not norm.is_meta
            if norm.numel() != 1 or norm.is_complex() or not has_data:
                raise ArgumentError(
                    f"clip(max_norm) is {describe_value(norm)}; expected a number, or a tensor "
                    "with one element that is a real number."
                )
        elif not (isinstance(norm, float) and norm == inf):
            check_number("clip(max_norm)", norm, 0)
        self.updates(optimizer)
        norms: list[torch.Tensor] = []
        for clipped in self.optimizers:
            if optimizer is None or optimizer is clipped:
                parameters = [p for group in clipped.param_groups for p in group["params"]]
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options))
        total = torch.linalg.vector_norm(torch.stack(norms), options.get("norm_type", 2.0))
        return norms[0] if len(norms) == 1 else total

    def save_checkpoint(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> Path | None:
        """Save models, optimizers, schedulers, scaler, hooks, counters and random states.

        Call it between two steps, when the schedulers have stepped. The state is copied now and
        written in the background; `on_checkpoint_save` is fired when the checkpoint is durable.
        What a hook asks for, or the loop within a step, is saved before the next step begins.

        Of several processes, rank 0 writes, and a sharded model (FSDP2) is written by all of them,
        each its part. Call this in all processes together, so that the random state of each is
        saved; a hook may call it in rank 0 only.

        Args:
            path: the checkpoint's folder; None: `checkpoints/step_…` in the run's folder.
            extra: the loop's own values, which `load_checkpoint` returns.
            wait: until the checkpoint is durable.

        Returns:
            The checkpoint's folder if it is durable already, else None.
        """
        self.begin()
        self._supplied.add("checkpoint")
        checkpoints = self._make_checkpoints()
        folder = None
        if path is not None:
            folder = Path(check_path("save_checkpoint(path)", path, "a folder")).absolute()
        extra = {} if extra is None else check_mapping("save_checkpoint(…, extra=…)", extra)
        check_flag("save_checkpoint(…, wait=…)", wait)
        if self._ended:
            return checkpoints.save(folder, extra, wait=True)
        if _is_in_event(self._context) or self._step_watch.has_new_gradients:
            checkpoints.request(folder, extra)
            return None
        return checkpoints.save(folder, extra, wait=wait)

    def load_checkpoint(
        self, path: str | os.PathLike[str] = "auto", *, strict: bool = True
    ) -> LoadedCheckpoint | None:
        """Restore what `save_checkpoint` has saved, and continue its run.

            session = hookline.attach(model, optimizer, runs="runs")
            start = session.load_checkpoint()
            with session:
                for step in range(start.step if start else 0, 1000):
                    ...

        The position in the data is the loop's: it continues from the returned step. All ranks have
        to call this.

        Args:
            path: a checkpoint or a run; or "auto" for the newest complete checkpoint of the newest
                unfinished run in the folder for runs that has the same name, configuration, model,
                optimizers and hooks. "auto" has to be loaded before training starts.
            strict: raise if something does not fit; otherwise load what fits, and list the rest.

        Returns:
            Where the loop continues; None if "auto" has found nothing to continue.
        """
        path = check_path("load_checkpoint(path)", path, "a checkpoint, a run or 'auto'")
        check_flag("load_checkpoint(…, strict=…)", strict)
        return self._make_checkpoints().load(path, strict=strict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of hooks, updates and counters, for a checkpoint of the loop's own.

            torch.save({"model": model.state_dict(), "hooks": session.state_dict()}, path)

        It has strings and tensors only, so that `torch.load(…, weights_only=True)` reads it.
        """
        from hookline.integrations.bare_loop.state_dicts import pack_state  # most loops save none

        return pack_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and continue its run; before training starts.

        `on_checkpoint_load` is fired when training starts.
        """
        from hookline.integrations.bare_loop.state_dicts import unpack_state

        path = self._find_loaded_path()
        self._restore_state(path, unpack_state(state_dict, path))
        self._supplied.add("resumed")

    def _find_loaded_path(self) -> Path:
        """Return the path of the checkpoint that the loop has read, if it can be known."""
        return Path("<state_dict>")

    def _restore_state(self, path: Path, state: Mapping[str, Any]) -> None:
        from hookline.integrations.bare_loop.session_state import restore_progress

        if self.started:
            raise LoopError(
                "session.load_state_dict() continues a training, but this one has started. Load "
                "before that: `session = attach(…)`, `session.load_state_dict(…)`, and then "
                "`with session:`."
            )
        restore_progress(self, state)
        self._restored = path, state

    def notify_checkpoint_saved(self, path: Any) -> None:
        """Fire `on_checkpoint_save`: the loop has written a complete checkpoint of its own."""
        check_path("notify_checkpoint_saved(path)", path, "the checkpoint")
        self.begin()
        self._supplied.add("checkpoint")
        self._context.checkpoint_path = path
        if self._recorder is not None:
            self._recorder.event("checkpoint", path=str(path), step=self._context.step)
        self._fire("on_checkpoint_save")

    def notify_checkpoint_loaded(
        self, path: Any, *, step: int, epoch: int | None = None, tokens_seen: int | None = None
    ) -> None:
        """Fire `on_checkpoint_load`: the loop has restored a checkpoint of its own.

        Args:
            path: the checkpoint.
            step: completed steps.
            epoch: the next epoch.
            tokens_seen: tokens trained on.
        """
        for name, number in (("step", step), ("epoch", epoch), ("tokens_seen", tokens_seen)):
            if number is not None or name == "step":
                check_whole_number(f"notify_checkpoint_loaded(…, {name}=…)", number)
        check_path("notify_checkpoint_loaded(path)", path, "the checkpoint")
        self.begin()
        self._supplied.add("resumed")
        self._context.step, self._context.step_in_progress = step, step + 1
        if epoch is not None:
            self._context.known_epoch = epoch - 1 if epoch else None
        if tokens_seen is not None:
            self._context.known_tokens = tokens_seen
            self._supplied.add("tokens")
        self._context.checkpoint_path = path
        if self._recorder is not None:
            self._recorder.rewind({"step": step})
            self._recorder.event("resumed", path=str(path), step=step)
        self._fire("on_checkpoint_load")

    def log(self, name: str, value: Any, kind: Kind = "scalar") -> None:
        """Give hooks and the run a number, or the run a value of another kind.

        A number whose name has no slash is in the batch's `metrics`, and its mean in those of the
        epoch or the validation; a run has it for each step, too. What is logged after
        `optimizer.step()` belongs to the step that has just ended, but is not in its `metrics`: a
        batch that completes a step ends there. A name with a slash, every other kind than a scalar,
        and what a hook logs is written to the run only, under its name.

        Args:
            name: its name; at the end of an epoch `train/<name>`, of validation `val/<name>`.
            value: a number, or a tensor with one element, which is not read before it is needed.
            kind: what the value is: a scalar, text, histogram or image.
        """
        context = self._context
        if type(name) is not str or type(kind) is not str:
            check_name("session.log(name)", name)
            check_instance("session.log(…, kind=…)", kind, str, "a kind of value")
        if kind != "scalar" or "/" in name or _is_in_event(context):
            self.begin()
            if self._recorder is not None:
                self._recorder.value(context.step, context.known_epoch, name, value, kind)
            elif self.run is None and not context.has_run and not self._warned_no_run:
                self._warned_no_run = True
                log.warning(
                    "'%s' and what is logged like it is not kept. %s", name, context.calls["run"]
                )
            return
        if not _is_number(value):
            raise ArgumentError(
                f"session.log('{name}', …) takes a number or a tensor with one element, "
                f"not {describe_value(value)}."
            )
        self.begin()
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()  # the loop may change it in place
        batch = context.known_batch
        has_ended = batch.ended if batch is not None else self._step_watch.is_between_steps
        is_late = has_ended and self._validation is None
        if self._validation is not None:
            weight = 1.0 if batch is None else float(samples_in(batch.batch))
            self._validation.add(f"val/{name}", value, weight)
        else:
            context.means.add(f"train/{name}", value)
            if self._agreement is not None:
                self._log_together(f"train/{name}", value, is_late=is_late)
            elif self._recorder is not None and is_late:  # its step has been written
                self._recorder.value(
                    context.step, context.known_epoch, f"train/{name}", value, "scalar"
                )
            elif self._recorder is not None:
                self._recorder.add_to_step(name, value)
        if batch is not None and not is_late:
            batch.logged[name] = LazyFloat(value) if isinstance(value, torch.Tensor) else value
        elif is_late and self.hooks.dispatchers.on_train_batch_end and not self._warned_late_log:
            self._warned_late_log = True
            log.warning(
                "session.log('%s') was called after optimizer.step(), when on_train_batch_end had "
                "been fired: the value counts for the epoch only. Log before the step.",
                name,
            )

    def _log_together(self, name: str, value: Any, *, is_late: bool) -> None:
        """Keep a number of a step, for the mean over all processes in the run."""
        assert self._agreement is not None
        if self._is_recorded and is_late:
            step, epoch = self._context.step, self._context.known_epoch
            self._agreement.records.add(step, epoch, name, value)
        elif self._is_recorded:
            self._agreement.logged.add(name, value)


def _unknown_optimizer(method: str, given: object) -> HooklineError:
    if isinstance(given, torch.optim.Optimizer):
        return LoopError(
            f"The {type(given).__name__} that was given to session.{method}() is not one of the "
            "optimizers that were attached. Attach it too, or give one of them."
        )
    return ArgumentError(
        f"session.{method}(optimizer={describe_value(given)}) takes one of the optimizers that "
        "were attached, or None for all of them."
    )


def _is_in_event(context: BareLoopEventContext) -> bool:
    """Return whether a hook of this session is being called on this thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(DISPATCHER_FILE):
            return frame.f_locals.get("context") is context
        frame = frame.f_back
    return False


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | LazyFloat) and not isinstance(value, bool)
