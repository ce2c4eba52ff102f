"""Values that nobody expects, and every public call that takes a value.

`ODD_VALUES` has factories, because some values can be used only once. `calls(folder)` yields every
parameter of the public API as a function that takes a value for it.
"""

from __future__ import annotations

import datetime
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hookline
from hookline.config.hook_names import BUILT_INS, PROBES, load_hook_class
from hookline.config.trainer_config import CheckpointConfig, MixConfig
from hookline.errors import HooklineError
from hookline.options import get_options
from hookline.runs import Run, diff_runs, open_run, read_records

MAX_MESSAGE = 2000
SOURCE = str(Path(hookline.__file__).parent)


# -- values ----------------------------------------------------------------------------------------


class OddError(Exception):
    """What the methods of odd objects raise."""


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise OddError("a method of an odd value was called")


def _object_with(*methods: str, bases: tuple[type, ...] = ()) -> Callable[[], Any]:
    name = "Odd" + "".join(method.strip("_").title() for method in methods)
    return lambda: type(name, bases, dict.fromkeys(methods, _fail))()


class OddInt(int):
    """A subclass of int whose text is not a number's."""

    def __repr__(self) -> str:
        return "\ud800\x1b[31m"


class OddStr(str):
    """A subclass of str whose text is another, as an enum's is."""

    __slots__ = ()
    __repr__ = _fail  # type: ignore[assignment]

    def __str__(self) -> str:
        return "\ud800"


class Color(Enum):
    """An enum."""

    RED = "red"


def _list_in_itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


def _dict_in_itself() -> dict[str, Any]:
    values: dict[str, Any] = {}
    values["self"] = values
    return values


def _deep_list() -> list[Any]:
    values: list[Any] = []
    for _ in range(5000):
        values = [values]
    return values


def _coroutine() -> Any:
    async def odd() -> None: ...

    made = odd()
    made.close()
    return made


_EVERYTHING = (
    *("__repr__", "__str__", "__eq__", "__hash__", "__bool__", "__len__", "__getattr__"),
    *("__iter__", "__float__", "__int__", "__index__", "__format__", "__call__", "__fspath__"),
)
_MAPPING = ("__getitem__", "__iter__", "__len__", "keys", "items", "get", "__contains__")

ODD_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "-10**5000": lambda: -(10**5000),
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e308": lambda: 1e308,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "space": lambda: " ",
    "NUL": lambda: "\0",
    "surrogate": lambda: "\ud800",
    "escape sequence": lambda: "\x1b[31m\u202e\n",
    "long text": lambda: "a" * 10**6,
    "path up": lambda: "../x",
    "pattern": lambda: "[(*?{",
    "dots": lambda: "a..b.",
    "bytes": lambda: b"x",
    "bytearray": lambda: bytearray(b"\xff"),
    "[]": list,
    "{}": dict,
    "set()": set,
    "()": tuple,
    "[None]": lambda: [None],
    "[text]": lambda: ["\ud800" * 3000],
    "[[]]": lambda: [[]],
    "{1: 2}": lambda: {1: 2},
    "{None: {}}": lambda: {None: {}},
    "{text: text}": lambda: {"\ud800": "a" * 10**5},
    "object": object,
    "lambda": lambda: lambda: 0,
    "failing function": lambda: _fail,
    "class": lambda: Color,
    "NotImplemented": lambda: NotImplemented,
    "Ellipsis": lambda: ...,
    "module": lambda: torch,
    "nn.Module": lambda: nn.Identity(),
    "tensor of 3": lambda: torch.ones(3),
    "empty tensor": lambda: torch.empty(0),
    "meta tensor": lambda: torch.empty((), device="meta"),
    "nan tensor": lambda: torch.tensor(float("nan")),
    "complex tensor": lambda: torch.tensor(1j),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "tensor with grad": lambda: torch.ones(2, requires_grad=True).sum(),
    "numpy float": lambda: np.float32(0.5),
    "numpy int": lambda: np.int64(3),
    "numpy bool": lambda: np.bool_(True),
    "numpy array": lambda: np.ones((2, 2)),
    "numpy objects": lambda: np.array([None, "x"], dtype=object),
    "numpy nat": lambda: np.datetime64("NaT"),
    "list in itself": _list_in_itself,
    "dict in itself": _dict_in_itself,
    "deep list": _deep_list,
    "huge dict": lambda: {str(i): i for i in range(10_000)},
    "generator": lambda: (i for i in range(3)),
    "failing generator": lambda: (_fail() for _ in range(3)),
    "range": lambda: range(3),
    "coroutine": _coroutine,
    "Decimal": lambda: Decimal("NaN"),
    "Fraction": lambda: Fraction(1, 3),
    "datetime": lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "timedelta": lambda: datetime.timedelta(days=-1),
    "Path": lambda: Path("../x"),
    "int subclass": lambda: OddInt(3),
    "str subclass": lambda: OddStr("abc"),
    "enum member": lambda: Color.RED,
    "exception": lambda: OddError("\ud800"),
    "failing repr": _object_with("__repr__", "__str__"),
    "failing eq": _object_with("__eq__", "__hash__"),
    "failing bool": _object_with("__bool__", "__len__"),
    "failing getattr": _object_with("__getattr__"),
    "failing everything": _object_with(*_EVERYTHING),
    "failing path": _object_with("__fspath__", "__repr__"),
}


# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A public call with one value left open."""

    name: str
    function: Callable[[Any], Any]


class Watch(hookline.Hook):
    """A hook that observes."""

    def on_step_end(self, step: int, loss: float) -> None:
        """Do nothing."""


def make_model() -> nn.Module:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def make_loader() -> list[Any]:
    """Return a loader of three batches."""
    return [(torch.ones(2, 2), torch.zeros(2, 1)) for _ in range(3)]


def make_trainer(folder: Path | None = None, **options: Any) -> hookline.Trainer:
    """Return a trainer for two steps, of which hooks may skip some."""
    model = make_model()
    config = {"max_steps": 2, "max_epochs": 2, "runs": folder, "progress": "off"}
    arguments: dict[str, Any] = {
        "config": config,
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.functional.mse_loss,
    }
    return hookline.Trainer(**{**arguments, **options})


def train(hook: Any = None, **options: Any) -> None:
    """Train two steps with a hook."""
    hooks = [] if hook is None else [hook]
    make_trainer(hooks=hooks, **options).fit(make_loader(), make_loader())


def train_bare(hooks: Sequence[Any] = (), steps: int = 2, **options: Any) -> None:
    """Train two steps in a bare loop."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"model": model, "optimizer": optimizer, "hooks": hooks, "runs": None, **options}
    with hookline.attach(**options):
        for _ in range(steps):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def parameters_of(function: Any, *without: str) -> list[str]:
    """Return the names of the parameters that can be given by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in named and p.name not in ("self", *without)]


def vary(
    name: str,
    function: Any,
    valid: Callable[[], dict[str, Any]] = dict,
    *without: str,
    of: Any = None,
) -> Iterator[Call]:
    """Yield a call for each parameter of a function; the others have valid values."""
    for parameter in parameters_of(of if of is not None else function, *without):
        yield Call(
            f"{name}({parameter}=…)",
            lambda value, p=parameter: function(**{**valid(), p: value}),
        )


REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "upload": {"destination": "/nowhere/else"},
    "time_limit": {"limit": 100},
    "mask": {"patterns": ["*"]},
    "scale": {"factor": 1.0},
    "clip_norm": {"max_norm": 1.0},
    "clip_value": {"max_value": 1.0},
    "capture": {"modules": "0"},
    "monitor": {"modules": "0"},
    "debug_probe": {"modules": "0"},
    "edit": {"modules": "0", "operation": "scale", "value": 1.0, "enable_intervention": True},
    "notification": {"webhook_url": "http://127.0.0.1:9/x"},
}
_NOT_RUN = ("notification", "heartbeat", "torch_profiler", "upload")


def hook_calls(folder: Path) -> Iterator[Call]:
    """Yield the options of all hooks, probes and updates: by class, by configuration, in use."""
    for name in (*BUILT_INS, *PROBES):
        hook_class: Any = load_hook_class(name)
        for option in get_options(hook_class):

            def options(value: Any, name: str = name, option: str = option) -> dict[str, Any]:
                return {**REQUIRED_OPTIONS.get(name, {}), option: value}

            def construct(value: Any, cls: Any = hook_class, options: Any = options) -> Any:
                return cls(**options(value))

            def configure(value: Any, name: str = name, options: Any = options) -> Any:
                return hookline.HookRegistry([{"name": name, **options(value)}])

            def use(value: Any, construct: Any = construct) -> None:
                hook = construct(value)
                hookline.HookManager([hook]).describe()
                train(hook, folder=folder / "used")

            yield Call(f"{hook_class.__name__}({option}=…)", construct)
            yield Call(f"HookRegistry([{{'name': {name}, {option}: …}}])", configure)
            if name not in _NOT_RUN and (name, option) != ("console_log", "path"):
                yield Call(f"fit with {hook_class.__name__}({option}=…)", use)


def manager_calls(folder: Path) -> Iterator[Call]:
    """Yield what managers, registries and runners take."""
    for manager_class in (hookline.HookManager, hookline.HookRegistry, hookline.HookRunner):
        name = manager_class.__name__

        def add(cls: Any = manager_class, **options: Any) -> None:
            manager = cls([Watch("other")])
            manager.add_hook(**{"hook": Watch(), **options})
            manager.describe()
            manager.summary()
            manager.fire("on_step_end", step=1, loss=1.0, step_in_progress=1, epoch=0)
            repr(manager)

        yield from vary(name, manager_class)
        yield from vary(f"{name}.add_hook", add, of=manager_class.add_hook)

        def listed(value: Any, cls: Any = manager_class) -> None:
            cls([value])

        yield Call(f"{name}([…])", listed)
        for method in ("remove_hook", "enable_hook", "disable_hook", "get_hook"):

            def toggle(value: Any, cls: Any = manager_class, method: str = method) -> None:
                getattr(cls([Watch("other")]), method)(value)

            yield Call(f"{name}.{method}(…)", toggle)
        for method in ("register_hooks", "load_state_dict", "fire", "listeners", "is_scheduled"):

            def call(value: Any, cls: Any = manager_class, method: str = method) -> None:
                getattr(cls([Watch("other"), hookline.EarlyStopping()]), method)(value)

            yield Call(f"{name}.{method}(…)", call)
        yield Call(
            f"{name}.load_state_dict({{hook: …}})",
            lambda value, cls=manager_class: cls(
                [hookline.EMAFilter(), hookline.EarlyStopping()]
            ).load_state_dict({"early_stopping": value, "ema_filter": value}),
        )
        yield Call(f"… in {name}", lambda value, cls=manager_class: value in cls([Watch("other")]))
    for method in ("enable_hook", "disable_hook", "name_at"):
        yield Call(
            f"HookRegistry.{method}('loop', …)",
            lambda value, method=method: getattr(
                hookline.HookRegistry(None, hooks=[Watch("a")]), method
            )("loop", value),
        )
        yield Call(
            f"HookRegistry.{method}(…, 0)",
            lambda value, method=method: getattr(hookline.HookRegistry(hooks=[Watch("a")]), method)(
                value, 0
            ),
        )
    for key in (
        "name",
        "as",
        "class_path",
        "enabled",
        "init_args",
        "every",
        "before",
        "after",
        "from_epoch",
        "sample_rate",
        "strict",
        "unknown",
    ):
        yield Call(
            f"HookRegistry([{{{key}: …}}])",
            lambda value, key=key: hookline.HookRegistry([{"name": "logging", key: value}]),
        )
    yield Call(
        "HookRegistry([{…: 1}])",
        lambda value: hookline.HookRegistry([{"name": "logging", **_keyed(value, 1)}]),
    )
    for section in ("hooks", "loop", "forward", "update", "probes"):
        yield Call(
            f"HookRegistry({{{section}: …}})",
            lambda value, section=section: hookline.HookRegistry({section: value}),
        )
    yield Call("HookRegistry({…: []})", lambda value: hookline.HookRegistry(_keyed(value, [])))
    yield Call(
        "HookRegistry.add_configured(…)", lambda v: hookline.HookRegistry().add_configured(v)
    )
    yield Call(
        "HookRegistry.get_active_hooks(…)", lambda v: hookline.HookRegistry().get_active_hooks(v)
    )

    def call_forward(value: Any) -> None:
        registry = hookline.HookRegistry(["activation_stats"])
        registry.add_hook(lambda activations: None, "own", kind="forward")
        registry.call_forward_hooks(value, step=100)

    def call_update(value: Any) -> None:
        registry = hookline.HookRegistry([{"name": "clip_norm", "max_norm": 1.0}])
        registry.call_update_hooks(value)

    yield Call("HookRegistry.call_forward_hooks(…)", call_forward)
    yield Call("HookRegistry.call_update_hooks(…)", call_update)
    yield Call("HookRegistry.call_update_hooks({name: …})", lambda value: call_update({"w": value}))
    yield Call(
        "HookRegistry.call_update_hooks({…: gradient})",
        lambda v: call_update(_keyed(v, torch.ones(2))),
    )
    yield Call("HookRunner.set_hooks(…)", lambda value: hookline.HookRunner().set_hooks(value))
    yield Call("HookRunner.hooks = …", lambda value: setattr(hookline.HookRunner(), "hooks", value))
    yield Call(
        "HookRunner.hooks.append(…)", lambda value: hookline.HookRunner().hooks.append(value)
    )
    for event in ("on_train_begin", "on_step_end"):
        yield Call(
            f"HookRunner.{event}(…)",
            lambda value, event=event: getattr(hookline.HookRunner([Watch()]), event)(value),
        )
    for hook_class in (
        Watch,
        type("F", (hookline.ForwardHook,), {}),
        type("U", (hookline.UpdateHook,), {}),
    ):
        yield Call(
            f"HookManager([{hook_class.__name__}(name=…)])",
            lambda value, cls=hook_class: hookline.HookManager().add_hook(cls(name=value)),
        )
    yield from vary(
        "Schedule", lambda **options: str(hookline.Schedule(**options)), of=hookline.Schedule
    )
    yield from vary(
        "HookSettings",
        lambda **options: hookline.HookManager(
            [Watch()], settings=hookline.HookSettings(**options)
        ),
        of=hookline.HookSettings,
    )

    def fail_with(settings: Any) -> None:
        class Fails(hookline.Hook):
            def on_step_end(self) -> None:
                raise ValueError("a hook's own")

        manager = hookline.HookManager([Fails()], settings=settings)
        for _ in range(4):
            try:
                manager.fire("on_step_end", step=1)
            except (ValueError, hookline.HookFailedError) as error:
                if "a hook's own" not in str(error):
                    raise

    yield from vary(
        "failing hook with HookSettings",
        lambda **options: fail_with(hookline.HookSettings(**options)),
        of=hookline.HookSettings,
    )


def _keyed(key: Any, value: Any) -> dict[Any, Any]:
    try:
        return {key: value}
    except Exception as error:  # it cannot be a key at all
        raise NotApplicableError from error


class NotApplicableError(Exception):
    """The value cannot be given here, because Python itself refuses it before the call."""


def config_calls(folder: Path) -> Iterator[Call]:
    """Yield the fields of configurations, when they are made, set, and used."""
    for config_class in (hookline.TrainerConfig, hookline.HooksConfig, MixConfig, CheckpointConfig):
        for field in config_class.model_fields:
            yield Call(
                f"{config_class.__name__}({field}=…)",
                lambda value, cls=config_class, field=field: repr(cls(**{field: value})) and None,
            )
            yield Call(
                f"{config_class.__name__}().{field} = …",
                lambda value, cls=config_class, field=field: setattr(cls(), field, value),
            )
    for field in hookline.TrainerConfig.model_fields:

        def use(value: Any, field: str = field) -> None:
            base = {"max_steps": 2, "progress": "off", "runs": None}
            trainer = make_trainer(config={**base, field: value})
            if field == "runs" and trainer.config.runs is not None:
                return  # used below
            if field in ("max_steps", "max_epochs") and not isinstance(value, bool):
                trainer.config.max_steps = 2
            trainer.fit(make_loader(), make_loader())

        yield Call(f"fit with TrainerConfig({field}=…)", use)
    for field in CheckpointConfig.model_fields:

        def use_checkpoints(value: Any, field: str = field) -> None:
            config = {"max_steps": 1, "progress": "off", "runs": folder / "checkpoints"}
            if field == "requeue":
                CheckpointConfig(**{field: value})
                return
            make_trainer(config={**config, "checkpoints": {field: value}}).fit(make_loader())

        yield Call(f"fit with CheckpointConfig({field}=…)", use_checkpoints)
    for field in MixConfig.model_fields:

        def use_mix(value: Any, field: str = field) -> None:
            order = {"pattern": "alternating", "weights": "weighted"}.get(field, "round_robin")
            config = {"max_steps": 1, "progress": "off", "runs": None}
            config["loaders"] = {"order": order, field: value}
            make_trainer(config=config).fit({"a": make_loader(), "b": make_loader()})

        yield Call(f"fit with MixConfig({field}=…)", use_mix)


def trainer_calls(folder: Path) -> Iterator[Call]:
    """Yield the arguments of trainers and their methods."""
    yield from vary("Trainer", make_trainer, of=hookline.Trainer)

    def fit_made(**options: Any) -> None:
        make_trainer(**options).fit(make_loader(), make_loader())

    yield from vary("fit of Trainer", fit_made, dict, "config", of=hookline.Trainer)
    for name in ("name", "tags", "hparams", "hooks"):
        yield Call(
            f"recorded fit of Trainer({name}=…)",
            lambda value, name=name: (
                train(folder=folder / "named", **{name: value})
                if name != "hooks"
                else make_trainer(folder / "named", hooks=value).fit(make_loader())
            ),
        )
    yield Call(
        "recorded fit of Trainer(hparams={'a': …})",
        lambda v: train(folder=folder / "named", hparams={"a": v}),
    )
    yield Call(
        "recorded fit of Trainer(tags=[…])", lambda v: train(folder=folder / "named", tags=[v])
    )

    def get(**options: Any) -> Any:
        model = make_model()
        valid = {
            "kind": "generic",
            "model": model,
            "dataloader": make_loader(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        return hookline.get_trainer(**{**valid, **options})

    yield from vary("get_trainer", get, of=hookline.get_trainer)
    for name in ("max_steps", "loss_fn", "runs", "unknown"):
        yield Call(f"get_trainer({name}=…)", lambda value, name=name: get(**{name: value}))

    def fit(**options: Any) -> None:
        make_trainer(folder / "fit").fit(**{"loaders": make_loader(), **options})

    yield from vary("Trainer.fit", fit, of=hookline.Trainer.fit)
    yield Call("Trainer.fit([batch …])", lambda value: fit(loaders=[value]))
    yield Call("Trainer.fit({'a': …})", lambda value: fit(loaders={"a": value}))
    yield Call("Trainer.fit({…: loader})", lambda value: fit(loaders=_keyed(value, make_loader())))
    yield Call("Trainer.validate(…)", lambda value: make_trainer().validate(value))
    yield Call("Trainer.set_data(…)", lambda value: make_trainer().set_data(value))
    yield Call("Trainer.training_step(…)", lambda value: make_trainer().training_step(value))
    yield Call("Trainer.dry_run(…)", lambda value: make_trainer().dry_run(value))
    yield Call(
        "Trainer.register_for_checkpoint(…)", lambda v: make_trainer().register_for_checkpoint(v)
    )
    yield Call("Trainer.load_state_dict(…)", lambda value: make_trainer().load_state_dict(value))

    def step_fn(value: Any) -> None:
        make_trainer(step_fn=lambda model, batch: value).fit(make_loader())

    def metric(value: Any) -> None:
        def step(model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"loss": model(batch[0]).sum(), "other": value}

        make_trainer(folder / "metric", step_fn=step).fit(make_loader())

    def metric_name(value: Any) -> None:
        def step(model: nn.Module, batch: Any) -> dict[Any, Any]:
            return {"loss": model(batch[0]).sum(), **_keyed(value, 1.0)}

        make_trainer(folder / "metric", step_fn=step).fit(make_loader())

    yield Call("step_fn returns …", step_fn)
    yield Call("step_fn returns a metric …", metric)
    yield Call("step_fn returns a metric named …", metric_name)
    yield Call("loss_fn returns …", lambda v: make_trainer(loss_fn=lambda *a: v).fit(make_loader()))
    yield Call(
        "tokens_fn returns …", lambda v: make_trainer(tokens_fn=lambda batch: v).fit(make_loader())
    )
    for method, valid in (
        ("save_checkpoint", {}),
        ("stop", {}),
        ("skip_optimizer_step", {}),
        ("announce", {}),
        ("add_console_logging", {}),
        ("add_json_logging", {}),
        ("add_checkpointing", {}),
        ("add_hook", {"hook": Watch()}),
        ("remove_hook", {}),
        ("enable_hook", {}),
        ("disable_hook", {}),
        ("log", {"name": "a", "value": 1.0}),
        ("log_dict", {}),
    ):
        function = getattr(hookline.Trainer, method)
        for parameter in parameters_of(function):

            def in_hook(
                value: Any, method: str = method, valid: Any = valid, parameter: str = parameter
            ) -> None:
                class Calls(hookline.Hook):
                    critical = True

                    def on_step_end(self, trainer: Any) -> None:
                        if parameter == "path" and not isinstance(value, str | None):
                            return
                        getattr(trainer, method)(**{**valid, parameter: value})

                try:
                    train(Calls(), folder=folder / "called")
                except hookline.HookFailedError as error:
                    if error.__cause__ is not None:
                        raise error.__cause__ from None
                    raise

            def directly(
                value: Any, method: str = method, valid: Any = valid, parameter: str = parameter
            ) -> None:
                getattr(make_trainer(), method)(**{**valid, parameter: value})

            yield Call(f"Trainer.{method}({parameter}=…)", directly)
            yield Call(f"Trainer.{method}({parameter}=…) in a hook", in_hook)


def session_calls(folder: Path) -> Iterator[Call]:
    """Yield the arguments of `attach` and of sessions."""

    def attached(**options: Any) -> None:
        train_bare(**{"steps": 1, **options})

    yield from vary("attach", attached, dict, "runs", of=hookline.attach)
    yield from vary(
        "attach with a run", attached, lambda: {"runs": folder / "bare"}, of=hookline.attach
    )
    yield Call("attach(tags=[…])", lambda value: attached(runs=folder / "bare", tags=[value]))
    yield Call(
        "attach(hparams={'a': …})", lambda v: attached(runs=folder / "bare", hparams={"a": v})
    )
    yield Call("attach(hooks=[…])", lambda value: attached(hooks=[value]))
    for field in CheckpointConfig.model_fields:
        yield Call(
            f"attach(checkpoints={{{field}: …}})",
            lambda value, field=field: attached(checkpoints={field: value}),
        )

    def in_session(action: Callable[[Any], Any], runs: Any = None) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hookline.attach(model, optimizer, [Watch()], runs=runs) as session:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            action(session)
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()

    valid_arguments: dict[str, Any] = {
        "log": {"name": "a", "value": 1.0},
        "clip": {"max_norm": 1.0},
        "notify_checkpoint_saved": {"path": "x"},
        "notify_checkpoint_loaded": {"path": "x", "step": 3},
        "load_checkpoint": {},
    }
    for method in (
        *("log", "log_dict", "clip", "updates", "save_checkpoint", "load_checkpoint", "stop"),
        *("notify_checkpoint_saved", "notify_checkpoint_loaded", "skip_optimizer_step"),
        *("add_hook", "remove_hook", "enable_hook", "disable_hook"),
    ):
        for parameter in parameters_of(getattr(hookline.Session, method)):
            for runs in (None, folder / "session"):

                def call(
                    value: Any, method: str = method, parameter: str = parameter, runs: Any = runs
                ) -> None:
                    valid = valid_arguments.get(method, {})
                    if method == "add_hook":
                        valid = {"hook": Watch()}
                    if method == "save_checkpoint" and parameter != "path":
                        valid = {"path": folder / "saved"}
                    in_session(lambda s: getattr(s, method)(**{**valid, parameter: value}), runs)

                suffix = "" if runs is None else " with a run"
                yield Call(f"Session.{method}({parameter}=…){suffix}", call)
    for kind in ("text", "histogram", "image"):
        yield Call(
            f"Session.log('a', …, '{kind}')",
            lambda value, kind=kind: in_session(
                lambda s: s.log("a", value, kind), folder / "session"
            ),
        )
    yield Call(
        "Session.register_for_checkpoint(…)",
        lambda v: in_session(lambda s: s.register_for_checkpoint(v)),
    )
    yield Call("Session.batches(…)", lambda v: in_session(lambda s: list(s.batches(v))))
    yield Call("Session.batches([…])", lambda v: in_session(lambda s: list(s.batches([v]))))
    yield Call(
        "Session.batches(name=…)", lambda v: in_session(lambda s: list(s.batches([1], name=v)))
    )
    yield Call(
        "Session.batches(idx=…)", lambda v: in_session(lambda s: list(s.batches([1], idx=v)))
    )
    yield Call("Session.epoch(…)", lambda v: in_session(lambda s: s.epoch(v).__enter__()))
    yield Call("Session.backward(…)", lambda v: in_session(lambda s: s.backward(v)))
    yield Call(
        "Session.backward(accumulate=…)",
        lambda v: in_session(
            lambda s: s.backward(torch.ones((), requires_grad=True), accumulate=v)
        ),
    )
    yield Call(
        "Session.log in a loop", lambda v: in_session(lambda s: s.log("a/b", v), folder / "session")
    )


def probe_calls(folder: Path) -> Iterator[Call]:
    """Yield the arguments of probes outside of training."""
    from hookline import probes

    def probe(**options: Any) -> None:
        model = make_model()
        with hookline.probe(model, **{"which": "0", **options}) as results:
            model(torch.ones(1, 2)).sum().backward()
        repr(results)
        [calls.output for calls in results.values()]

    def probe_model(value: Any) -> None:
        hookline.probe(value, "0").close()

    yield Call("probe(…)", probe_model)
    yield from vary("probe", probe, dict, "model", of=hookline.probe)
    for option in get_options(probes.Capture):
        if option != "modules":
            yield Call(f"probe({option}=…)", lambda value, option=option: probe(**{option: value}))
    yield Call("probe()[…]", lambda value: hookline.probe(make_model(), "0")[value])
    yield Call("probe().states(…)", lambda value: hookline.probe(make_model(), "0").states(value))

    def get_call(index: Any) -> None:
        model = make_model()
        results = hookline.probe(model, "0")
        model(torch.ones(1, 2))
        results["0"][index]

    yield Call("probe()['0'][…]", get_call)
    yield Call("tap(x, …)", lambda value: hookline.tap(torch.ones(1), value))

    class Tapped(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Any) -> Any:
            return hookline.tap(x, self.value)

    def tap(value: Any) -> None:
        model = Tapped(value)
        with hookline.probe(model, taps="*"):
            model(torch.ones(1))

    def tap_value(value: Any) -> None:
        model = Tapped("a")
        with hookline.probe(model, taps="*") as results:
            model(value)
        repr(results)

    yield Call("a probe sees tap(x, …)", tap)
    yield Call("a probe sees tap(…)", tap_value)
    yield from vary("Store", probes.Store)
    for name in (
        "register_capture_hook",
        "register_debug_hook",
        "register_edit_hook",
        "register_monitoring_hook",
        "register_probe",
    ):
        function = getattr(probes.Probes, name)
        extra = () if name == "register_probe" else ("every", "unknown")
        for parameter in (*parameters_of(function), *extra):

            def register(value: Any, name: str = name, parameter: str = parameter) -> None:
                model = make_model()
                valid: dict[str, Any] = {"module": model[0], "hook_id": "a"}
                if name == "register_probe":
                    valid["probe"] = probes.Capture()
                if name == "register_edit_hook":
                    valid |= {"operation": "scale", "value": 1.0}
                manager = (
                    probes.Probes(enable_intervention=True)
                    if "enable_intervention" in inspect.signature(probes.Probes).parameters
                    else probes.Probes()
                )
                getattr(manager, name)(**{**valid, parameter: value})
                model(torch.ones(1, 2)).sum().backward()
                manager.describe()
                manager.close()

            yield Call(f"Probes.{name}({parameter}=…)", register)
    yield from vary("Probes", probes.Probes)
    for name in (
        "get_captured_states",
        "clear_captured_states",
        "get_findings",
        "get_hook",
        "get_metrics",
        "enable_hook",
        "disable_hook",
        "remove_hook",
    ):

        def with_id(value: Any, name: str = name) -> None:
            model = make_model()
            manager = probes.Probes()
            manager.register_capture_hook(model[0], "a")
            getattr(manager, name)(value)

        yield Call(f"Probes.{name}(…)", with_id)
    yield from vary(
        "gradient_flow",
        probes.gradient_flow,
        lambda: {"model": make_model()},
    )
    for name in PROBES:
        probe_class: Any = load_hook_class(name)

        def attach(of: Any = (name, probe_class), **options: Any) -> None:
            made = of[1](**REQUIRED_OPTIONS.get(of[0], {}))
            made.attach(**{"model": make_model(), **options})
            made.detach()

        for option in ("model", "name", "every"):
            yield Call(
                f"{probe_class.__name__}.attach({option}=…)",
                lambda value, attach=attach, option=option: attach(**{option: value}),
            )

        def through(value: Any, cls: Any = probe_class, name: str = name) -> None:
            options = {**REQUIRED_OPTIONS.get(name, {}), "modules": "**"}
            if name == "gradient_flow":
                options.pop("modules")
            model = nn.Identity()
            made = cls(**options)
            made.attach(model)
            try:
                model(value)
            finally:
                made.detach()

        yield Call(f"{probe_class.__name__} sees an output …", through)


def run_calls(folder: Path) -> Iterator[Call]:
    """Yield what runs on disk take."""

    def create(**options: Any) -> None:
        valid: dict[str, Any] = {"root": folder / "runs", "config": {}, "seed": 0, "hooks": []}
        run = Run.create(**{**valid, **options})
        run.log(1, 0, "a", 1.0)
        run.close()
        if isinstance(options.get("root", ""), str):
            opened = open_run(run.folder if hasattr(run, "folder") else run.path)
            opened.overview()
            opened.metrics()
            opened.events()

    for name in (*parameters_of(Run.create), "name", "tags"):
        yield Call(f"Run.create({name}=…)", lambda value, name=name: create(**{name: value}))
    yield Call("Run.create(config={'a': …})", lambda value: create(config={"a": value}))
    yield Call("Run.create(config={…: 1})", lambda value: create(config=_keyed(value, 1)))
    made: list[Any] = []

    def saved() -> Path:
        if not made:
            run = Run.create(folder / "saved", config={}, seed=0, hooks=[])
            run.log(1, 0, "a", 1.0)
            run.close()
            made.append(next(path for path in (folder / "saved").iterdir()))
        return made[0]

    yield from vary("Run.open", Run.open, lambda: {"path": saved()}, "resume", "path")
    yield Call("Run.open(…)", Run.open)
    yield Call("open_run(…)", open_run)
    yield Call("open_run(runs=…)", lambda value: open_run("20260101", runs=value))
    yield Call("get_last_checkpoint(…)", hookline.get_last_checkpoint)
    yield Call("read_records(…)", lambda value: list(read_records(value)))
    yield Call("diff_runs(…, run)", lambda value: diff_runs(value, saved()))
    yield Call("diff_runs(run, …)", lambda value: diff_runs(saved(), value))

    def writing(action: Callable[[Run], Any]) -> None:
        run = Run.create(folder / "written", config={}, seed=0, hooks=[])
        try:
            action(run)
        finally:
            run.close()

    values = {"step": 1, "epoch": 0, "name": "a", "value": 1.0}
    for parameter in parameters_of(Run.log):
        yield Call(
            f"Run.log({parameter}=…)",
            lambda value, parameter=parameter: writing(
                lambda r: r.log(**{**values, parameter: value})
            ),
        )
    for kind in ("text", "histogram", "image"):
        for parameter in ("value", "name", "step"):
            yield Call(
                f"Run.log({parameter}=…, kind='{kind}')",
                lambda value, kind=kind, parameter=parameter: writing(
                    lambda r: r.log(**{**values, "kind": kind, parameter: value})
                ),
            )
    yield Call(
        "Run.log(mapping, 'histogram')",
        lambda v: writing(lambda r: r.log(1, 0, "a", {"counts": v, "edges": v}, "histogram")),
    )
    yield Call(
        "Run.log(pair, 'histogram')",
        lambda v: writing(lambda r: r.log(1, 0, "a", (v, v), "histogram")),
    )
    for parameter in ("step", "epoch", "metrics"):
        yield Call(
            f"Run.log_metrics({parameter}=…)",
            lambda value, parameter=parameter: writing(
                lambda r: r.log_metrics(
                    **{"step": 1, "epoch": 0, "metrics": {"a": 1}, parameter: value}
                )
            ),
        )
    yield Call(
        "Run.log_metrics({'a': …})", lambda v: writing(lambda r: r.log_metrics(1, 0, {"a": v}))
    )
    yield Call(
        "Run.log_metrics({…: 1})", lambda v: writing(lambda r: r.log_metrics(1, 0, _keyed(v, 1)))
    )
    yield Call("Run.event(…)", lambda v: writing(lambda r: r.event(v)))
    yield Call("Run.event(field=…)", lambda v: writing(lambda r: r.event("a", field=v)))
    yield Call("Run.update(field=…)", lambda v: writing(lambda r: r.update(field=v)))
    yield Call("Run.update(name=…)", lambda v: writing(lambda r: r.update(name=v)))
    yield Call("Run.rewind(…)", lambda v: writing(lambda r: r.rewind(v)))
    yield Call("Run.rewind({'step': …})", lambda v: writing(lambda r: r.rewind({"step": v})))
    yield Call("Run.close(…)", lambda v: writing(lambda r: r.close(v)))
    yield Call("Run.close(error=…)", lambda v: writing(lambda r: r.close("error", v)))
    for method in ("metrics", "events"):
        yield Call(
            f"OpenedRun.{method}(…)", lambda v, method=method: getattr(open_run(saved()), method)(v)
        )
    yield Call("OpenedRun.metrics(kind=…)", lambda v: open_run(saved()).metrics(kind=v))


def other_calls(folder: Path) -> Iterator[Call]:
    """Yield the rest of the public names."""
    yield Call("LazyFloat(…)", lambda value: hookline.LazyFloat(value))
    yield Call("Metrics(…)", lambda value: hookline.Metrics(value))
    yield Call("Metrics(a=…)", lambda value: repr(hookline.Metrics(a=value)) and None)
    yield Call("Metrics()[…]", lambda value: hookline.Metrics(a=1.0)[value])
    yield Call("Hook(name=…)", lambda value: hookline.Hook(name=value))
    yield from vary("verify", hookline.verify, lambda: {"make_trainer": _verified, "steps": 2})
    for option in ("per_sample_seed", "resume_from", "fork_from", "strict", "loaders", "unknown"):
        yield Call(
            f"verify({option}=…)",
            lambda value, option=option: hookline.verify(_verified, 2, **{option: value}),
        )
    yield Call("verify(lambda: …)", lambda value: hookline.verify(lambda: value, 2))
    from hookline.config_files import load_training

    path = folder / "train.yaml"
    path.write_text(
        "model: {class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}\n"
        "data: {train: {class_path: torch.utils.data.DataLoader, init_args: {dataset: [1]}}}\n"
        "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
    )
    yield Call("load_training(…)", load_training)
    yield Call("load_training(path, …)", lambda value: load_training(path, value))
    for key in ("name", "tags", "trainer.max_steps", "hooks", "model", "seed", "data.train"):
        yield Call(
            f"load_training(path, '{key}=…')",
            lambda value, key=key: load_training(path, f"{key}={_text(value)}"),
        )


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise NotApplicableError
    try:
        return str.__str__(value) if isinstance(value, str) else str(value)
    except ValueError as error:  # an int with too many digits
        raise NotApplicableError from error


def _verified() -> Any:
    return make_trainer(), make_loader()


def calls(folder: Path) -> list[Call]:
    """Return every public call that takes a value; what they write goes into `folder`."""
    parts = (hook_calls, manager_calls, config_calls, trainer_calls, session_calls, probe_calls)
    return [call for part in (*parts, run_calls, other_calls) for call in part(folder)]


# Where a value is code or data of the user's own that is run in training: what it raises is raised.
USERS_CODE = (
    *("call_forward_hooks", "HookRunner.on_step_end", "sees an output", "a probe sees", "_fn"),
    *(
        "Trainer.fit(loaders",
        "Trainer.fit([",
        "Trainer.fit({",
        "Trainer.fit(val_loaders",
        "Session.batches",
    ),
    *("Trainer.validate", "Trainer.set_data", "training_step", "dry_run", "verify(make_trainer"),
    *("get_trainer(dataloader", "Metrics(a="),  # its repr
)


# -- the rule --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """An exception that does not follow the rule."""

    problem: str
    kind: str
    place: str
    """The innermost line of Hookline."""

    call: str = ""
    value: str = ""
    text: str = ""


def check_error(error: BaseException, call: str, value: str) -> Raw | None:
    """Return what is wrong with an exception; None if it is an error of Hookline that is clear."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(SOURCE)]
    place = f"{Path(own[-1].filename).relative_to(SOURCE)}:{own[-1].name}" if own else "?"
    try:
        message = str(error)
    except Exception:
        return Raw("no message", type(error).__name__, place, call, value)

    def raw(problem: str) -> Raw:
        shown = message[:200].encode("utf-8", "backslashreplace").decode()
        return Raw(problem, type(error).__name__, place, call, value, shown)

    if isinstance(error, OddError) and any(word in call for word in USERS_CODE):
        return None
    if not isinstance(error, HooklineError):
        return raw("not a HooklineError")
    if len(message) >= MAX_MESSAGE:
        return raw("too long")
    try:
        message.encode()
    except UnicodeEncodeError:
        return raw("not UTF-8")
    return None if len(message) > 10 else raw("says nothing")


def try_value(call: Call, value_name: str) -> Raw | None:
    """Give a value to a call; return the exception if it does not follow the rule."""
    value = ODD_VALUES[value_name]()
    try:
        call.function(value)
    except NotApplicableError:
        return None
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return check_error(error, call.name, value_name)
    return None
