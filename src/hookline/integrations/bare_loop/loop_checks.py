"""The needs of hooks, whether a bare loop provides them, and loops that cannot be followed.

In the first step a problem raises `LoopError`. Later it is logged once: nothing here stops a run
that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

import torch

from hookline.dispatch import HookManager
from hookline.errors import CheckpointError, HooklineError, LoopError, NotProvidedError
from hookline.events import EVENTS, FLOWS
from hookline.hook import HookGroup
from hookline.loop.event_context import Versions, gradient_versions
from hookline.printable import message_lines

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

log = logging.getLogger("hookline")

CALLS: Mapping[str, str] = {
    "epoch": "Wrap each epoch: `with session.epoch():`.",
    "batches": "Iterate over a torch DataLoader; if its batches cannot be told from others, or "
    "for anything else, load them through the session: `for batch in session.batches(loader):`.",
    "backward": "Let the session run backward: `session.backward(loss)` instead of "
    "`loss.backward()`.",
    "forward": "Attach what the loop calls: the compiled or wrapped model, not the one inside; and "
    "call it as `model(x)`, not `model.forward(x)`.",
    "validation": "Wrap validation: `with session.validation():`.",
    "checkpoint": "Save with `session.save_checkpoint()`, or say when the loop has saved by "
    "itself: `session.notify_checkpoint_saved(path)`.",
    "resumed": "Load with `session.load_checkpoint()`, or restore what `session.state_dict()` gave "
    "to the loop's own checkpoint: `session.load_state_dict(…)`.",
    "clip": "Clip with torch's functions.",
    "tokens": "They are counted in batches with `input_ids` or integer inputs of two or more "
    "dimensions, and in the input of the model's first `nn.Embedding`. Say how to count a batch: "
    "`attach(…, tokens=lambda batch: …)`.",
    "config": "Give it to attach: `attach(…, config=…)`.",
    "log": "Report it: `session.log('loss', value)` before the batch ends.",
    "run": "This loop has no run folder. Give it one: `attach(…, runs='runs')`.",
}

_EVENTS = {
    "on_epoch_start": "epoch",
    "on_epoch_end": "epoch",
    "on_train_batch_start": "batches",
    "on_train_batch_end": "batches",
    "on_before_backward": "backward",
    "on_validation_start": "validation",
    "on_validation_batch_start": "validation",
    "on_validation_batch_end": "validation",
    "on_validation_end": "validation",
    "on_checkpoint_save": "checkpoint",
    "on_checkpoint_load": "resumed",
}

_ARGUMENTS = {
    "epoch": "epoch",
    "batch": "batches",
    "batch_idx": "batches",
    "dataloader_idx": "batches",
    "dataloader_name": "batches",
    "tokens_seen": "tokens",
    "config": "config",
    "run": "run",
}

_PROBLEMS = {  # loops that hooks would see wrong
    "second scaler": "The loop steps through a second GradScaler, whose state would not be saved. "
    "Attach each optimizer with its scaler, in a session of its own.",
    "unused scaler": "attach was given a scaler, but the loop calls optimizer.step() itself, on "
    "scaled gradients. Call scaler.step(optimizer), or do not give attach the scaler.",
    "changed gradients": "{listeners} reads gradients before anything has changed them, but this "
    "loop changes them between backward and optimizer.step, other than with torch's clipping "
    "functions. Call `session.updates()` before that.",
    "scaled clip": "{function} clips gradients that are still scaled, so they are clipped to "
    "another norm than the one that is asked for. Call `scaler.unscale_(optimizer)` before it.",
    "backward after clip": "Backward runs after gradients were clipped, before optimizer.step, so "
    "hooks have seen a part of the gradients only. Clip once, after the last backward of a step.",
}
_OF_STEPS = {  # events and flows that an optimizer's step causes
    *("on_gradients_ready", "update", "on_gradient_clip", "on_before_optimizer_step"),
    *("on_after_optimizer_step", "on_step_skipped", "on_step_end"),
}
_OF_DATA = {  # arguments that come from batches
    *("batch", "batch_idx", "dataloader_idx", "dataloader_name", "tokens_seen", "ctx", "state"),
}
_MAY_COME_LATER = {"validation", "checkpoint", "resumed"}


class Requirements:
    """The needs of hooks, what a loop provides, and what to do about the rest.

    Attributes:
        provided: the keys of `CALLS` for what the loop provides.
        calls: what to do about each need, where it is not a call of the loop.
        why_no_loss: the end of the sentence that the loop has not provided the loss.
        counts_batches: whether the user's own function counts the tokens of batches.
    """

    def __init__(self) -> None:
        self.provided: set[str] = set()
        self.calls: Mapping[str, str] = CALLS
        self.why_no_loss = f". {CALLS['backward']}"
        self.counts_batches = False

    def read_absent(self, name: str) -> Any:
        """Raise for an argument that this loop has not provided."""
        if name == "loss":
            raise NotProvidedError(f"This loop has not provided 'loss'{self.why_no_loss}")
        if name not in _ARGUMENTS:
            raise AttributeError(f"The event context has no '{name}'.")
        call = self.calls[_ARGUMENTS[name]]
        raise NotProvidedError(f"This loop has not provided '{name}'. {call}")

    def unmet(self, hooks: HookManager, needs: Iterable[str] = CALLS) -> Iterator[str]:
        """Yield a line for everything that hooks need and the loop has not provided."""
        looked_at = set(needs) - self.provided
        if self.counts_batches and "batches" in looked_at:
            yield f"attach(…, tokens=…) has no effect, because no batch is seen. {CALLS['batches']}"
        yield from self._waiting(hooks, looked_at - _MAY_COME_LATER, "needs")
        for event, _ in _listening(hooks):
            if _EVENTS.get(event) in looked_at - _MAY_COME_LATER:
                continue  # its arguments come with it
            known = {"epoch", "tokens"} if event == "on_train_start" else set[str]()
            for argument, asking in hooks.required_arguments(event).items():
                need = _ARGUMENTS.get(argument)
                if need in looked_at - known:
                    yield f"{', '.join(asking)} asks for '{argument}'. {self.calls[need]}"

    def pending(self, hooks: HookManager) -> Iterator[str]:
        """Yield a line for everything that may still come: validation and checkpoints."""
        yield from self._waiting(hooks, _MAY_COME_LATER - self.provided, "waits for")

    def _waiting(self, hooks: HookManager, needs: set[str], verb: str) -> Iterator[str]:
        """Yield a line for each of these needs that hooks have events for."""
        by_need: dict[str, list[tuple[str, list[str]]]] = {}
        for event, listeners in _listening(hooks):
            if (need := _EVENTS.get(event)) is not None and need in needs:
                by_need.setdefault(need, []).append((event, listeners))
        for need, events in by_need.items():
            labels = ", ".join(label for _, listeners in events for label in listeners)
            names = " and ".join(event for event, _ in events)
            yield f"{labels} {verb} {names}. {self.calls[need]}"


def calls_for(event: str, arguments: Iterable[str]) -> set[str]:
    """Return the keys of `CALLS` that an event with these arguments needs in an unchanged loop."""
    needs = {_ARGUMENTS[argument] for argument in arguments if argument in _ARGUMENTS}
    if event == "on_train_start":
        needs -= {"epoch", "tokens"}
    return needs | ({_EVENTS[event]} if event in _EVENTS else set())


def _listening(hooks: HookManager) -> Iterator[tuple[str, list[str]]]:
    for event in (*EVENTS, *FLOWS):
        if listeners := hooks.listeners(event, needed=True):
            yield event, listeners


def saves_checkpoints(hook: Any) -> bool:
    """Return whether a hook saves checkpoints through the session."""
    return getattr(hook, "hookline_group", None) is HookGroup.CHECKPOINT


@dataclass(frozen=True)
class HookNeeds:
    """Which observations of a loop the enabled hooks need."""

    loss: bool
    grad_norm: bool
    clips: bool
    calls: bool
    backward: bool
    counts_calls: bool
    batch_metrics: bool
    batches: bool
    logs_rates: bool  # a hook logs the learning rates of named optimizers
    asks_for_loss: tuple[str, ...]  # the methods that cannot be called without it

    @classmethod
    def of(cls, hooks: HookManager, *, has_run: bool) -> HookNeeds:
        """Return what these hooks need, and a run, if there is one."""
        fire = hooks.dispatchers
        wanted = {event: hooks.required_arguments(event, optional=True) for event in EVENTS}
        ends = ("on_step_end", "on_train_batch_end", "on_epoch_end")
        loss = has_run or any({"loss", "ctx", "metrics"} & wanted[event].keys() for event in ends)
        loss |= any("state" in names for names in wanted.values())
        norm = any({"grad_norm", "ctx"} & names.keys() for names in wanted.values())
        clips = norm or bool(fire.on_gradients_ready or fire.update or fire.on_gradient_clip)
        asking = (
            label
            for event in ("on_step_end", "on_train_batch_end")
            for label in hooks.required_arguments(event).get("loss", ())
        )
        own = [hooks.get_hook(name) for name in hooks]
        saves = any(map(saves_checkpoints, own))
        return cls(
            loss=loss,
            grad_norm=norm,
            clips=clips,
            calls=bool(fire.on_before_forward or fire.on_after_forward or fire.forward),
            # A checkpoint is not saved between a backward and the step.
            backward=loss or clips or saves or fire.on_after_backward is not None,
            # What is logged after a step belongs to it, until the model is called again.
            counts_calls=has_run or saves,
            batch_metrics="metrics" in wanted["on_train_batch_end"],
            batches=has_run
            or bool(fire.on_train_batch_start or fire.on_train_batch_end)
            or any(_OF_DATA & names.keys() for names in wanted.values()),
            logs_rates=any(getattr(hook, "logs_rates", False) for hook in own),
            asks_for_loss=tuple(asking),
        )


class LoopChecks:
    """Finds what a loop does that hooks would see wrong.

    Attributes:
        is_first_step: whether no step has ended since the session was attached.
        allow_missing: whether hooks do without what the loop does not provide, and see what it does
            as well as can be.
        session: ends if the loop is refused in the first step.
    """

    def __init__(self, session: Session, requirements: Requirements) -> None:
        self.session, self._requirements = session, requirements
        self._context, self._hooks = session.loop.context, session.loop.hooks
        self._late = session.loop.state.late
        self.is_first_step = True
        self.allow_missing = False
        self._warned: set[str] = set()

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning, the first time that it has this key."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", message)

    def raise_or_warn(self, problems: list[str]) -> None:
        """Raise for what hooks need and do not get in the first step; later, warn."""
        if problems and self.is_first_step and not self.allow_missing:
            lines = (f"  - {problem}" for problem in problems)
            self._refuse(NotProvidedError("Hooks need what this loop does not provide:", *lines))
        for problem in problems:
            self.warn_once(problem, problem)

    def report(self, key: str, **fields: Any) -> None:
        """Raise one of `_PROBLEMS` in the first step; later, warn."""
        message = _PROBLEMS[key].format(**fields)
        if self.is_first_step and not self.allow_missing:
            self._refuse(LoopError(message))
        self.warn_once(key, message)

    def _refuse(self, error: HooklineError) -> Never:
        self.session.refuse(error)
        raise error

    def report_late_state(self, problems: list[str]) -> None:
        """Report why an object that has come cannot load its state; in the first step, raise."""
        if not problems:
            return
        head = "A state in the checkpoint does not fit what the loop uses, and is not restored"
        message = message_lines(f"{head}:", *problems)
        if self.is_first_step:
            self._refuse(CheckpointError(message))
        self.warn_once(message, message)

    def warn_of_waiting_states(self) -> None:
        """Warn of states in a checkpoint that were not restored when the first step has ended."""
        waiting = self._late.describe(len(self.session.loop.state.optimizers))
        if waiting:
            self.warn_once(
                "waiting states",
                f"The checkpoint has the state of {' and '.join(waiting)}, which was not seen in "
                "the first step. It is restored when it is used; if it never is, it has no effect.",
            )

    def check_hooks(self) -> None:
        """Raise if hooks cannot see what they ask for, whatever the loop does; with all reasons."""
        if not any(isinstance(each, torch.optim.LBFGS) for each in self._context.optimizers):
            return
        events = ("on_gradients_ready", "on_before_optimizer_step", "update")
        asking = [label for event in events for label in self._hooks.listeners(event, needed=True)]
        asking += self._hooks.required_arguments("on_step_end").get("grad_norm", [])
        if asking:
            raise LoopError(
                f"{', '.join(asking)} asks for the gradients that the optimizer uses, but LBFGS "
                "evaluates its closure many times in a step. Remove the hook, or use "
                "on_after_backward.",
                *self._requirements.unmet(self._hooks, ("config", "run")),  # also known by now
            )

    def check_versions(self, versions: Versions, optimizer: torch.optim.Optimizer) -> None:
        """Report gradients that the loop changed before on_gradients_ready could be fired."""
        listeners = ", ".join(self._hooks.listeners("on_gradients_ready", needed=True))
        if listeners and versions != gradient_versions(optimizer):
            self.report("changed gradients", listeners=listeners)

    def warn_of_no_optimizer(self, what: str) -> None:
        """Warn that no optimizer was seen, and which hooks are not called without one."""
        events = [e for e in (*EVENTS, *FLOWS) if e in _OF_STEPS]
        labels = self._listeners(*events)
        verb = "is" if len(labels) == 1 else "are"
        missing = f", so {', '.join(labels)} {verb} not called" if labels else ""
        self.warn_once(
            what,
            f"{what} the parameters of the attached model{missing}. Optimizers of torch are seen "
            "when they step; give any other to attach. A loop that updates parameters by itself "
            "calls its hooks: `hookline.HookRunner(hooks)`.",
        )

    def missing_clip(self) -> list[str]:
        """Return a line if hooks need on_gradient_clip, which this loop has not caused."""
        listeners = ", ".join(self._hooks.listeners("on_gradient_clip", needed=True))
        needs = f"{listeners} needs on_gradient_clip. {self._requirements.calls['clip']}"
        return [needs] if listeners else []

    def unseen_calls(
        self, *, called: bool, had_backward: bool, asks_for_loss: Sequence[str]
    ) -> list[str]:
        """Return what hooks need to have been seen before the first step, and was not."""
        problems: list[str] = []
        forward = self._listeners("on_before_forward", "on_after_forward", "forward")
        if forward and not called:
            problems.append(
                f"{', '.join(forward)} needs calls of the model, but the optimizer steps and the "
                f"attached model was not called. {self._requirements.calls['forward']}"
            )
        backward = [*self._listeners("on_after_backward"), *asks_for_loss]
        if backward and not had_backward:
            problems.append(
                f"{', '.join(backward)} needs backward, but none was seen that gives the "
                f"optimizer's parameters gradients. {self._requirements.calls['backward']}"
            )
        if self._hooks.dispatchers.update is not None and (shared := self._shared_parameter()):
            problems.append(
                f"Two of the optimizers share the parameter '{shared}', so updates would transform "
                "its gradient twice. Give each parameter to one of them."
            )
        return problems

    def _listeners(self, *events: str) -> list[str]:
        return [label for e in events for label in self._hooks.listeners(e, needed=True)]

    def _shared_parameter(self) -> str | None:
        seen: set[int] = set()
        for idx in range(len(self._context.optimizers)):
            named = self._context.named[idx]
            for name, parameter in named.items():
                if id(parameter) in seen:
                    return name
            seen.update(map(id, named.values()))
        return None
