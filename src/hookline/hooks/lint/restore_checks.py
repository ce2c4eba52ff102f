"""Rule 10, restored state is the saved one: what a checkpoint has is loaded whole, and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hookline.hooks.lint.average_checks import search_averages
from hookline.hooks.lint.finding import Check
from hookline.tensors.sharded import is_sharded

_MAX_DEPTH = 3
_MOMENTS = ("exp_avg", "momentum_buffer", "square_avg", "sum")


class StateNotRestored(Check):
    """A part of a checkpoint was loaded, and another part of the same file was not.

    A run that is resumed continues with the weights, the optimizer's moments, the schedule and the
    averages of the checkpoint. Where one is left out, it starts anew, and the loss jumps.

    Bug:
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        # optimizer.load_state_dict(checkpoint["optimizer"]) is missing
    Fix: Load every part of the checkpoint.
    Ignore: When a new stage of training starts from old weights on purpose.
    """

    def setup(self) -> None:
        self._parts: dict[int, tuple[str, str, Any]] = {}  # by id: key, kind, the part of the file
        self._loaded: set[int] = set()
        self._is_done = False

    def on_file_loaded(self, value: Any) -> None:
        self._parts = {id(part): (key, kind, part) for key, kind, part in _find_states(value)}
        self._loaded, self._is_done = set(), False

    def on_state_loaded(self, target: Any, state: Any) -> None:
        self._loaded.add(id(state))
        if id(state) in self._parts or not isinstance(state, Mapping):
            return
        for key, (_, _, part) in self._parts.items():  # a copy, or a part without some keys
            same = set(state) & set(part)
            if same and any(state[k] is part[k] for k in same if isinstance(part[k], Tensor)):
                self._loaded.add(key)

    def on_step_after_loading(self, optimizer: Any) -> None:
        if self._is_done or not self._parts:
            return
        self._is_done = True
        kinds = {kind for key, (_, kind, _) in self._parts.items() if key in self._loaded}
        missing = {
            name: (kind, part)
            for key, (name, kind, part) in self._parts.items()
            if key not in self._loaded and kind not in kinds
        }
        is_resumed = "weights" in kinds and len(kinds) > 1
        for name, (kind, part) in missing.items():
            if kind == "optimizer":
                is_fresh = _is_empty(_moments(optimizer))
                continues = is_resumed or _is_same_optimizer(optimizer, part)
                has_moments = not _is_empty(_saved_moments(part))
                if "weights" in kinds and is_fresh and continues and has_moments:
                    self._find(type(optimizer).__name__, name, "its moments start from zero")
            elif kind == "scheduler" and "optimizer" in kinds:
                self._find("the learning rate scheduler", name, "the schedule starts anew")
            elif kind == "average" and "optimizer" in kinds:
                self._compare_average(name, part)
        self._parts = {}  # which may be large

    def _compare_average(self, key: str, saved: Any) -> None:
        """Compare the averages of the loop with the saved one: it may be loaded in any way."""
        saved = saved.get("module", saved)
        for average in search_averages(self.view):
            pairs = [(a, saved[n]) for n, a, _ in average.pairs if isinstance(saved.get(n), Tensor)]
            if pairs and pairs[0][0].shape == pairs[0][1].shape:
                one, two = self.sample(pairs[0][0]), self.sample(pairs[0][1])
                differs = one.ne(two.to(one.device, one.dtype)).any()
                self.read([differs], self._judge_average, average.name, key)

    def _judge_average(self, numbers: list[float], average: str, key: str) -> None:
        if numbers[0]:
            self._find(average, key, "the average starts anew")

    def _find(self, subject: str, key: str, effect: str) -> None:
        self.find(
            subject,
            f"The file that the weights were loaded from has '{key}', which was not loaded: "
            f"{effect}.",
            f"Load it: .load_state_dict(checkpoint['{key}']).",
        )


class OptimizerStateLostAfterLoading(Check):
    """An optimizer's state was loaded, but at its first step it is another one.

    Bug:
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer = torch.optim.AdamW(model.parameters())  # made anew after loading
    Fix: Load the optimizer's state last, after model, optimizer and schedulers are made.
    Ignore: When the state is reset on purpose.
    """

    def setup(self) -> None:
        self._loaded: dict[int, tuple[Any, Any]] = {}  # by optimizer: itself, and the saved state

    def on_state_loaded(self, target: Any, state: Any) -> None:
        if isinstance(target, torch.optim.Optimizer) and isinstance(state, Mapping):
            self._loaded[id(target)] = (target, state)

    def on_step_after_loading(self, optimizer: Any) -> None:
        if not self._loaded:
            return
        loaded, self._loaded = self._loaded, {}
        own = loaded.get(id(optimizer))
        if own is None:
            (other, state) = next(iter(loaded.values()))
            if not _is_empty(_saved_moments(state)) and _shares_parameters(other, optimizer):
                self._find(optimizer, "was loaded into an optimizer that was replaced since")
            return
        saved, present = list(_saved_moments(own[1])), list(_moments(optimizer))
        if saved and not present:
            self._find(optimizer, f"had {len(saved)} moments, and it has none now")
        elif saved and len(saved) == len(present) and saved[0].shape == present[0].shape:
            before = self.sample(saved[0]).to(present[0].device, present[0].dtype)
            self.read([before.ne(self.sample(present[0])).any()], self._judge, optimizer)

    def _judge(self, numbers: list[float], optimizer: Any) -> None:
        if numbers[0]:
            self._find(optimizer, "has other values than it has now, before its first step")

    def _find(self, optimizer: Any, problem: str) -> None:
        self.find(type(optimizer).__name__, f"The state that was loaded {problem}.")


class _RateCheck(Check):
    """Keeps the learning rates of states that are loaded into optimizers with moments."""

    severity = "warning"

    def setup(self) -> None:
        self._rates: dict[int, list[Any]] = {}

    def on_state_loaded(self, target: Any, state: Any) -> None:
        if isinstance(target, LRScheduler):
            self._rates.pop(id(target.optimizer), None)
        elif isinstance(target, torch.optim.Optimizer) and not _is_empty(_saved_moments(state)):
            self._rates[id(target)] = [group.get("lr") for group in state["param_groups"]]

    def on_step_after_loading(self, optimizer: Any) -> None:
        rates = self._rates.pop(id(optimizer), None)
        if rates and all(isinstance(rate, float) for rate in rates):
            now = [group.get("lr") for group in optimizer.param_groups]
            self.compare(optimizer, rates, now)

    def compare(self, optimizer: Any, rates: list[float], now: list[float]) -> None:
        """Compare the loaded rates with those of the first step."""


class ScheduleRestarted(_RateCheck):
    """The optimizer continues, but its learning rate schedule starts from the beginning.

    Making a scheduler sets the learning rate to that of its first step. After resuming, its own
    state has to be loaded, or it repeats the warm-up and ends too late.

    Bug:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    Fix: Save the scheduler's state with the checkpoint, and load it after the scheduler is made.
    Ignore: When a new schedule begins on purpose.
    """

    def compare(self, optimizer: Any, rates: list[float], now: list[float]) -> None:
        """Compare with the rates at the start of a schedule."""
        start = [group.get("initial_lr") for group in optimizer.param_groups]
        if start == now != rates:
            self.find(
                f"learning rate of {type(optimizer).__name__}",
                f"The state that was loaded has the learning rate {rates[0]:.3g}, but the first "
                f"step uses {now[0]:.3g}, where the schedule begins.",
            )


class LearningRateOfOldRun(_RateCheck):
    """A checkpoint has brought back a higher learning rate than the optimizer was made with.

    `load_state_dict` also loads the learning rates. Without a scheduler that sets them, the rate
    that was asked for is never used.

    Bug:
        optimizer = Adam(model.parameters(), lr=1e-5)
        optimizer.load_state_dict(checkpoint["optimizer"])  # of a run with lr=1e-3
    Fix: Set `group["lr"]` of all groups after loading.
    Ignore: When the checkpoint's learning rate is meant.
    """

    def compare(self, optimizer: Any, rates: list[float], now: list[float]) -> None:
        """Compare with the rate that the optimizer was made with."""
        asked: Any = getattr(optimizer, "defaults", {}).get("lr")
        is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        is_one = isinstance(asked, float) and len(set(rates)) == 1 and now == rates
        if is_one and not is_scheduled and rates[0] > asked > 0:
            self.find(
                f"learning rate of {type(optimizer).__name__}",
                f"The optimizer was made with the learning rate {asked:.3g}, but the state that "
                f"was loaded has {rates[0]:.3g}, which is used.",
            )


class NothingLoaded(Check):
    """`load_state_dict(strict=False)` has loaded nothing: no key of the state fits.

    Bug:
        model.load_state_dict(state, strict=False)  # all keys begin with "module."
    Fix: Remove the prefix of the keys, and look at the missing and unexpected keys it returns.
    Ignore: When the state is that of another model on purpose.
    """

    def on_weights_loaded(
        self, module: nn.Module, state: Any, result: Any, is_assigned: bool
    ) -> None:
        missing = getattr(result, "missing_keys", [])
        unexpected = getattr(result, "unexpected_keys", [])
        own, given = len(_tensors_of(module)), len(state)
        if own and given and len(missing) >= own and len(unexpected) == given:
            self.find(
                type(module).__name__,
                f"load_state_dict found none of its {own} keys (such as '{missing[0]}') among the "
                f"{given} of the state (such as '{unexpected[0]}'), and loaded nothing.",
            )


class StateIsReference(Check):
    """A state that is loaded is the module's own memory, so that loading changes nothing.

    `state_dict()` returns references. What was kept as the best weights, or as those of a target
    network, has been trained on.

    Bug:
        best = model.state_dict()
        ...
        model.load_state_dict(best)
    Fix: Keep a copy: `copy.deepcopy(model.state_dict())`.
    Ignore: When the state is loaded only to call hooks.
    """

    def on_weights_loaded(
        self, module: nn.Module, state: Any, result: Any, is_assigned: bool
    ) -> None:
        own = {} if is_assigned or self.view.steps_seen == 1 else _tensors_of(module)
        pairs = [
            (value, own[key])
            for key, value in state.items()
            if isinstance(value, Tensor) and key in own and value.numel()
        ]
        is_same = [a.data_ptr() == b.data_ptr() != 0 for a, b in pairs if a.device == b.device]
        if is_same and all(is_same) and not is_sharded(pairs[0][0]):
            self.find(
                f"load_state_dict of {type(module).__name__}",
                f"All {len(is_same)} tensors of the state are those of the module itself, as they "
                f"are after {self.view.steps_seen - 1} steps.",
            )


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name: `state_dict` would call the hooks of others."""
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


def _find_states(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield the states in a file: key, kind, state."""
    if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
        return
    if {"state", "param_groups"} <= value.keys():
        yield key, "optimizer", value
    elif {"last_epoch", "_step_count"} <= value.keys():
        yield key, "scheduler", value
    elif "n_averaged" in value:
        yield key, "average", value
    elif value and all(isinstance(each, Tensor) for each in value.values()):
        yield key, "average" if _is_average(key) else "weights", value
    else:
        for name, inner in value.items():
            yield from _find_states(inner, str(name), depth + 1)


def _is_average(key: str) -> bool:
    return any(word in key.lower() for word in ("ema", "average", "shadow", "swa"))


def _saved_moments(state: Any) -> Iterator[Tensor]:
    for entry in state.get("state", {}).values():
        if isinstance(entry, Mapping):
            yield from (entry[name] for name in _MOMENTS if isinstance(entry.get(name), Tensor))


def _moments(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = getattr(optimizer, "state", {}).get(parameter, {})
            yield from (entry[name] for name in _MOMENTS if isinstance(entry.get(name), Tensor))


def _is_empty(tensors: Iterator[Tensor]) -> bool:
    return next(tensors, None) is None


def _is_same_optimizer(optimizer: Any, saved: Any) -> bool:
    """Return whether the saved state is that of an optimizer with the same options."""
    ignored = {"params", "lr", "initial_lr"}
    groups = optimizer.param_groups
    return len(groups) == len(saved["param_groups"]) and all(
        len(group["params"]) == len(other["params"])
        and {k: v for k, v in group.items() if k not in ignored}
        == {k: v for k, v in other.items() if k not in ignored}
        for group, other in zip(groups, saved["param_groups"], strict=True)
    )


def _shares_parameters(one: Any, two: Any) -> bool:
    first, second = ({id(p) for g in o.param_groups for p in g["params"]} for o in (one, two))
    return bool(first & second)
