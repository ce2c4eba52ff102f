"""Run other tools that look for silent training bugs on the corpus, and count what they find.

    python3 -m venv PEERS && PEERS/bin/pip install -r bench/silent_bugs/peers_requirements.txt
    PEERS/bin/python bench/silent_bugs/peers.py guardtower torchtest2 torch-audit
    PEERS/bin/python bench/silent_bugs/peers.py traincheck --sample 20
    PEERS/bin/python bench/silent_bugs/peers.py --table

The scripts are not edited. A tool that is called in a training loop gets what its user would have
at hand: the model that the script calls, its optimizer, the first batch, the loss as a function.

- guardtower 0.1.0: `audit(model, step, optimizer=…, inputs=…)` before the first update.
- torchtest2 0.1.0: `check_model(model, inputs, targets, loss_fn=…, optimizer=…)` at the same place.
- torch-audit 0.3.0: `autopatch(model, optimizer=…, every_n_steps=1)` there, and `auditor.backward`,
  until the script ends.
- TrainCheck 0.2.0: its four commands. The reference run is the fixed twin (for a healthy run: the
  run itself); checked are the buggy form, and the reference run once more.

A report is a finding of at least the level of a warning. A bug is caught if there is a report in
the wrong form and none in the fixed one. Reports in fixed twins and healthy runs are false alarms.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: scripts run in forks

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).parent
TIMEOUT = 60
STEPS = 30  # of torch-audit, as of `hookline lint`
COMMAND_TIMEOUT = 600  # of each of TrainCheck's commands
SEED = 30
# The reports that count: of level 1, which contain those of level 2.
TOOLS = {
    "guardtower": ("warnings too", "FAIL only"),
    "torchtest2": ("warnings too", "FAIL only"),
    "torch-audit": ("warnings too", "errors only"),
    "traincheck": ("all violations", "without order of events"),
}
LEVELS = {"WARN": 1, "FAIL": 2, "ERROR": 2, "FATAL": 2, "VIOLATED": 2}
LOSSES = [name for name in dir(F) if re.fullmatch(r"[a-z0-9_]+(_loss|entropy|_logits)", name)]
# Of event order: TrainCheck's tutorial calls their violations noise to be ignored.
ORDER_RELATIONS = ("FunctionCoverRelation", "FunctionLeadRelation")
# What the writer of a script knows, and torchtest2 has an option for: outputs compare all samples.
OPTIONS: dict[str, dict[str, Any]] = {
    "autocast_not_applied_in_threads": {"skip": ["batch_independence"]},
}

Frames = list[tuple[Any, int, dict[str, Any]]]


class Call:
    """A call of a module from outside any module, and where the script made it."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, frames: Frames) -> None:
        self.module, self.args, self.kwargs, self.frames = module, args, kwargs, frames
        self.has_gradient = torch.is_grad_enabled()
        self.output: Any = None


class Observer:
    """See the calls of modules, the losses, the first backward and the optimizers of a script.

    `ready` is called before the first update of the weights that follows a backward.
    """

    def __init__(self, script: Path, ready: Callable[[Observer, Any], None]) -> None:
        self.script, self.ready = str(script), ready
        self.calls: list[Call] = []
        self.losses: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loss: torch.Tensor | None = None
        self.reached: set[int] = set()  # the parameters that have a gradient after it
        self.backward_frames: Frames = []
        self._local = threading.local()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        call, backward = nn.Module.__call__, torch.Tensor.backward
        initialise = torch.optim.Optimizer.__init__

        def observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            depth = getattr(self._local, "depth", 0)
            if depth or self.loss is not None or not _has_parameters(module):
                return call(module, *args, **kwargs)
            record = Call(module, args, kwargs, self._frames())
            self.calls.append(record)
            self._local.depth = depth + 1
            try:
                record.output = call(module, *args, **kwargs)
            finally:
                self._local.depth = depth
            return record.output

        def observed_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            is_first = self.loss is None
            if is_first:
                self.loss, self.backward_frames = loss, self._frames()
            backward(loss, *args, **kwargs)
            if is_first:
                called = (p for c in self.calls for p in c.module.parameters())
                self.reached = {id(p) for p in called if p.grad is not None}

        def observed_init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            initialise(optimizer, *args, **kwargs)
            self.optimizers.append(optimizer)

        self._replace(nn.Module, "__call__", observed_call)
        self._replace(torch.Tensor, "backward", observed_backward)
        self._replace(torch.optim.Optimizer, "__init__", observed_init)
        for name in LOSSES:
            self._replace(F, name, self._observed_loss(name))
        handle = register_optimizer_step_pre_hook(self._before_step)
        self._undo.append(handle.remove)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def _observed_loss(self, name: str) -> Callable[..., Any]:
        function = getattr(F, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self.loss is None:
                self.losses.append((name, args, kwargs, result))
            return result

        return observed

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.loss is not None:
            self.remove()
            self.ready(self, optimizer)

    def _frames(self) -> Frames:
        frames, frame = [], inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_filename == self.script:
                frames.append((frame, frame.f_lineno, dict(frame.f_locals)))
            frame = frame.f_back
        return frames[::-1]


class Step:
    """The first training step of a script, as a function that can be called again.

    It runs the script's own statements from the model's first call to `backward`, in the names that
    the script had there. With `output`, that is used instead of calling the model; with `inputs`,
    the model gets them.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer, self.script = observer, observer.script
        tree = ast.parse(Path(self.script).read_text())
        candidates = [
            (found, index, frame, names)
            for index, call in enumerate(observer.calls)
            for frame, line, names, last in _common_frames(call.frames, observer.backward_frames)
            if (found := _statements_between(tree, line, last)) is not None
        ]
        if candidates:  # the innermost block, and its first call
            found, first, frame, self.names = max(candidates, key=lambda c: (c[0][0], -c[1]))
            self.names = {**frame.f_globals, **self.names}
            _, statements, backward = found
        else:
            first, statements, backward = self._step_of_library()
        self.calls = observer.calls[first:]
        if not self.modules:
            raise CannotLookError("no module with trained parameters is called")
        self.call = next(c for c in self.calls if any(c.module is m for m in self.modules))
        try:
            self.code = compile(ast.Module(statements, type_ignores=[]), self.script, "exec")
        except SyntaxError as error:
            raise CannotLookError(f"the step cannot be called again: {error}") from None
        assert isinstance(backward.func, ast.Attribute)
        loss = backward.func.value
        if isinstance(loss, ast.Call) and ast.unparse(loss.func).endswith("scaler.scale"):
            loss = loss.args[0]
        self.loss = compile(ast.Expression(loss), self.script, "eval")
        # As in accelerator.backward(loss).
        self.argument = None
        if backward.args:
            self.argument = compile(ast.Expression(backward.args[0]), self.script, "eval")

    def _step_of_library(self) -> tuple[int, list[ast.stmt], ast.Call]:
        """Use a model that returns its loss, where a library has the loop."""
        for index, call in enumerate(self.observer.calls):
            if isinstance(getattr(call.output, "loss", None), torch.Tensor):
                self.names = {"again": lambda c=call: c.module(*c.args, **c.kwargs)}
                backward = ast.parse("again().loss.backward()", mode="eval").body
                assert isinstance(backward, ast.Call)
                return index, [], backward
        raise CannotLookError("the script does not call the model and backward in one function")

    @property
    def modules(self) -> list[nn.Module]:
        """The outermost modules that are trained by this loss (and not by another optimizer)."""
        holders = [
            {id(p) for group in optimizer.param_groups for p in group["params"]}
            for optimizer in self.observer.optimizers
        ]
        held = {key for holder in holders for key in holder}
        reached = self.observer.reached
        own = {key for holder in holders if holder & reached for key in holder} | reached
        called = {}
        for call in self.calls:
            keys = {id(p) for p in call.module.parameters() if p.requires_grad}
            if (keys if call.has_gradient else keys & held) and (keys & own or not keys & held):
                called[id(call.module)] = call.module
        inner = {id(m) for module in called.values() for m in list(module.modules())[1:]}
        return [module for key, module in called.items() if key not in inner]

    def __call__(self, output: Any = None, inputs: Any = None) -> torch.Tensor:
        with self._intercepted(output, inputs):
            names = dict(self.names)
            exec(self.code, names)
            value = eval(self.loss, names)
            if not isinstance(value, torch.Tensor) and self.argument is not None:
                value = eval(self.argument, names)  # accelerator.backward(loss)
        return value

    def sees_same_inputs(self) -> bool:
        """Return whether the model gets the same tensors when the step is called again."""
        seen: list[Any] = []
        state = torch.random.get_rng_state()
        try:
            with torch.no_grad(), self._intercepted(None, None, seen):
                exec(self.code, dict(self.names))
        except Exception:
            return False
        finally:
            torch.random.set_rng_state(state)
        wanted = _tensors((self.call.args, self.call.kwargs))
        return bool(seen) and [id(t) for t in _tensors(seen[0])] == [id(t) for t in wanted]

    @contextlib.contextmanager
    def _intercepted(self, output: Any, inputs: Any, seen: Any = None) -> Iterator[None]:
        call, target, done = nn.Module.__call__, self.call.module, False

        def intercepted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if module is target and not done:
                done = True
                if seen is not None:
                    seen.append((args, kwargs))
                if output is not None:
                    return output
                if inputs is not None:
                    args, kwargs = inputs
            return call(module, *args, **kwargs)

        nn.Module.__call__ = intercepted
        try:
            yield
        finally:
            nn.Module.__call__ = call


class CannotLookError(Exception):
    """The tool is not made for this script, or the wrapper cannot hand over what it needs."""


def _common_frames(call: Frames, backward: Frames) -> Iterator[tuple[Any, int, Any, int]]:
    for (frame, line, names), (other, last, _) in zip(call, backward, strict=False):
        if frame is not other:
            return
        yield frame, line, names, last


def _statements_between(
    tree: ast.AST, first: int, last: int
) -> tuple[int, list[ast.stmt], ast.Call] | None:
    """Find the innermost block with the lines of a call and of `backward`: its statements from one
    to the other, and the call of `backward`."""
    best = None
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            lines = [(s.lineno, s.end_lineno or s.lineno) for s in block]
            starts = [i for i, (low, high) in enumerate(lines) if low <= first <= high]
            ends = [i for i, (low, high) in enumerate(lines) if low <= last <= high]
            if not starts or not ends or starts[0] > ends[0]:
                continue
            calls = [
                n
                for n in ast.walk(block[ends[0]])
                if isinstance(n, ast.Call)
                and isinstance(n.func, ast.Attribute)
                and n.func.attr == "backward"
            ]
            if calls and (best is None or lines[0][0] >= best[0]):
                best = (lines[0][0], block[starts[0] : ends[0]], calls[0])
    return best


def _has_parameters(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _own_optimizer(modules: list[nn.Module], optimizers: list[Any]) -> Any:
    """Return the optimizer of the modules; None if they have several."""
    own = {id(p) for module in modules for p in module.parameters()}
    holders = [
        o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])
    ]
    if len(holders) > 1:
        return None
    return next(iter(holders or optimizers[-1:]), None)


def guardtower_findings(observer: Observer) -> list[list[str]]:
    import guardtower

    step = Step(observer)
    modules = step.modules
    gradients = [(p, p.grad) for module in modules for p in module.parameters()]
    buffers = [(b, b.clone()) for module in modules for b in module.buffers()]
    inputs = [
        t
        for t in _tensors((step.call.args, step.call.kwargs))
        if t.is_floating_point() and t.is_leaf and not t.requires_grad
    ]
    report = guardtower.audit(
        modules[0] if len(modules) == 1 else nn.ModuleList(modules),
        step,
        optimizer=_own_optimizer(modules, observer.optimizers),
        inputs=inputs if inputs and step.sees_same_inputs() else None,
    )
    with torch.no_grad():
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
    findings = [[f.check, f.severity.label, f.message] for f in report]
    if failed := [m for _, _, m in findings if re.match(r"(step_fn|backward\(\)) raised", m)]:
        raise CannotLookError(failed[0])
    return findings


def torchtest2_findings(observer: Observer, name: str) -> list[list[str]]:
    import torchtest2

    step = Step(observer)
    modules, call = step.modules, step.call
    options: dict[str, Any] = {
        "optimizer": _own_optimizer(modules, observer.optimizers),
        **OPTIONS.get(name, {}),
    }
    calls = [c for c in step.calls if c.module is call.module]
    model, inputs, targets = call.module, (call.args, call.kwargs), None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # the ranks do not make the same steps in it
    if len(modules) > 1 or len(calls) > 1:
        # Not `model(inputs)`: the options for models with a special training forward pass.
        model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        options["forward_fn"] = lambda _model, given, _targets: step(inputs=given)
        options["eval_forward_fn"] = lambda _model, given: call.module(*given[0], **given[1])
        options["loss_fn"] = lambda loss: loss
    else:
        if not (call.args and call.kwargs):
            inputs = call.args or call.kwargs
        else:
            options["forward_fn"] = lambda _model, given, _targets: model(*given[0], **given[1])
            options["eval_forward_fn"] = lambda _model, given: model(*given[0], **given[1])
        if call.output is observer.loss:
            options["loss_fn"] = lambda output: output
        elif getattr(call.output, "loss", None) is not observer.loss:
            options["loss_fn"], targets = _loss_function(observer, step)
    report = torchtest2.check_model(model, inputs, targets, **options)
    findings = [[r.name, r.status.name, r.message] for r in report.results]
    if failed := [message for _, _, message in findings if message.startswith("raised ")]:
        raise CannotLookError(f"the step cannot be called again: {failed[0]}")
    return findings


def _loss_function(observer: Observer, step: Step) -> tuple[Callable[..., Any], Any]:
    """Return the loss as a function of the model's output, and the targets if it takes them."""
    for name, args, kwargs, result in observer.losses:
        if result is observer.loss and len(args) == 2 and args[0] is step.call.output:
            if name == "cross_entropy":
                known = inspect.signature(nn.CrossEntropyLoss).parameters
                kwargs = {k: v for k, v in kwargs.items() if k in known}
                return nn.CrossEntropyLoss(**kwargs), args[1]
            return functools.partial(getattr(F, name), **kwargs), args[1]
    return lambda output: step(output=output), None


def torch_audit_start(observer: Observer, optimizer: Any) -> list[Any]:
    """Audit each step from now on; the auditors have the findings."""
    from torch_audit import autopatch

    try:
        modules = Step(observer).modules
    except CannotLookError:
        modules = [call.module for call in observer.calls[:1]]
    own = _own_optimizer(modules, observer.optimizers) or optimizer
    auditors = [autopatch(module, optimizer=own, every_n_steps=1) for module in modules]
    backward, is_called, is_inside = torch.Tensor.backward, False, False

    def see_call(_module: nn.Module, _args: Any) -> None:
        nonlocal is_called
        is_called = True

    def audited(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal is_called, is_inside
        if is_inside or not is_called:  # the loss of another model
            backward(loss, *args, **kwargs)
            return
        is_called, is_inside = False, True
        try:
            auditors[0].backward(loss, *args, **kwargs)
        finally:
            is_inside = False

    modules[0].register_forward_pre_hook(see_call)
    torch.Tensor.backward = audited
    return auditors


def run_in_forks(
    tools: tuple[str, ...], folder: str, name: str, form: str, ranks: int
) -> list[dict[str, Any]]:
    """Run a script with tools in a fork of this process for each rank."""
    script = ROOT / folder / f"{name}.py"
    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        files = [Path(place) / f"{rank}.json" for rank in range(ranks)]
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                Script(tools, script, form, files, rank).run(port)
            children.append(child)
        deadline = time.monotonic() + TIMEOUT * len(tools)
        running = set(children)
        while running and time.monotonic() < deadline:
            running -= {child for child in running if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.05)
        for child in children:  # with the workers of its data loaders
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if child in running:
                os.waitpid(child, 0)
        parts = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    results = []
    for tool in tools:
        own = [part.get(tool, {"why": f"no result in {TIMEOUT} s"}) for part in parts]
        result: dict[str, Any] = {"tool": tool, "folder": folder, "name": name, "form": form}
        result["findings"] = [finding for part in own for finding in part.get("findings", ())]
        result["seconds"] = max(part.get("seconds", 0.0) for part in own)
        if reasons := [part["why"] for part in own if part.get("why")]:
            result["why"] = reasons[0]
        results.append(result)
    return results


class Script:
    """One rank of a script, run in this process, which ends with it."""

    def __init__(
        self, tools: tuple[str, ...], script: Path, form: str, files: list[Path], rank: int
    ) -> None:
        self.tools, self.script, self.form = tools, script, form
        self.files, self.rank = files, rank
        self.results: dict[str, dict[str, Any]] = {}
        self.auditors: list[Any] = []
        self.steps, self.start = 0, 0.0

    def run(self, port: int) -> None:
        os.setsid()
        os.chdir(self.files[0].parent)
        log = os.open(f"{self.rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if len(self.files) > 1:
            ranks = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": len(self.files)}
            ranks |= {"LOCAL_WORLD_SIZE": len(self.files), "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in ranks.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        sys.argv = [str(self.script), *(["--fixed"] if self.form == "fixed" else [])]
        sys.path[0] = str(self.script.parent)
        observer = Observer(self.script, self.before_first_update)
        observer.install()
        why = ""
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        except BaseException as error:
            if not isinstance(error, SystemExit):
                why = f"the script failed: {type(error).__name__}: {error}"
        if not self.results and not self.auditors and not why:
            observer.remove()
            if observer.loss is None:
                why = "no call of Tensor.backward"
            else:  # without an optimizer of torch
                self.before_first_update(observer, None)
        self.end(why)

    def before_first_update(self, observer: Observer, optimizer: Any) -> None:
        if "guardtower" in self.tools:
            self.ask("guardtower", lambda: guardtower_findings(observer))
        if "torchtest2" in self.tools:
            self.ask("torchtest2", lambda: torchtest2_findings(observer, self.script.stem))
        if "torch-audit" not in self.tools or optimizer is None:
            self.end("no optimizer of torch")
        self.start = time.monotonic()
        self.auditors = torch_audit_start(observer, optimizer)
        register_optimizer_step_pre_hook(self.count_step)

    def ask(self, tool: str, findings: Callable[[], list[list[str]]]) -> None:
        result: dict[str, Any] = {"findings": []}
        start = time.monotonic()
        try:
            result["findings"] = findings()
        except CannotLookError as error:
            result["why"] = str(error)
        except Exception as error:
            result["why"] = f"the tool failed: {type(error).__name__}: {error}"
        result["seconds"] = round(time.monotonic() - start, 2)
        self.results[tool] = result
        self.write()

    def count_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.steps += 1
        if self.steps > STEPS:
            self.end()

    def end(self, why: str = "") -> None:
        if self.auditors:
            found = [f for auditor in self.auditors for f in auditor.finish().findings]
            self.results["torch-audit"] = {
                "findings": [
                    [f.rule_id, f.severity.value, f"{f.message} ({f.module_path or f.entity})"]
                    for f in {f.get_fingerprint(): f for f in found}.values()
                ],
                "seconds": round(time.monotonic() - self.start, 2),
            }
        for tool in self.tools:
            self.results.setdefault(tool, {"why": why})
        self.write()
        self.files[self.rank].with_suffix(".done").touch()
        while not all(file.with_suffix(".done").exists() for file in self.files):
            time.sleep(0.05)  # other ranks may still need this one
        os._exit(0)

    def write(self) -> None:
        """Keep what is known, also if this process is ended."""
        part = self.files[self.rank].with_suffix(".part")
        part.write_text(json.dumps(self.results))
        part.rename(self.files[self.rank])


def run_traincheck(folder: str, name: str, ranks: int) -> list[dict[str, Any]]:
    """Learn from the right form of a script, and check both forms."""
    right = "healthy" if folder == "healthy" else "fixed"
    forms = (right,) if folder == "healthy" else ("bug", right)
    results = []
    with tempfile.TemporaryDirectory() as place:
        program = TrainCheck(Path(place), ROOT / folder / f"{name}.py", ranks)
        for form in forms:
            result: dict[str, Any] = {"tool": "traincheck", "folder": folder, "name": name}
            result |= {"form": form, "findings": []}
            try:
                if form == forms[0]:
                    program.learn(right)
                if program.why:
                    raise CannotLookError(program.why)
                result["findings"] = program.check(form)
            except CannotLookError as error:
                result["why"] = program.why = str(error)
            result["commands"] = dict(program.seconds)
            result["seconds"] = round(sum(program.seconds.values()), 1)
            result["invariants"] = program.invariants
            results.append(result)
    return results


class TrainCheck:
    """TrainCheck's commands for one script, in a folder of their own."""

    def __init__(self, place: Path, script: Path, ranks: int) -> None:
        self.place, self.why, self.invariants = place, "", 0
        self.seconds: dict[str, float] = {}
        self.script = Path(shutil.copy(script, place))
        launch = f"{sys.executable} "
        if ranks > 1:
            launch += f"-m torch.distributed.run --standalone --nproc_per_node {ranks} "
        for form, options in {"bug": "", "fixed": " --fixed", "healthy": ""}.items():
            (place / f"{form}.sh").write_text(f"{launch}{script.name}{options}\n")
        self.models = _model_names(script)

    def learn(self, form: str) -> None:
        """Trace the reference run, and infer invariants."""
        self.collect(form, "reference", "--sampling-interval", "10", "--warm-up-steps", "10")
        self.run("infer", "-f", "reference", "-o", "invariants.json")
        self.invariants = len((self.place / "invariants.json").read_text().splitlines())
        if not self.invariants:
            raise CannotLookError("no invariants were inferred")

    def check(self, form: str) -> list[list[str]]:
        """Trace a run with the invariants, and return those that it violates."""
        self.collect(form, form, "--invariants", "invariants.json")
        self.run("check", "-f", form, "-i", "invariants.json", "--output-dir", f"checked_{form}")
        failed = next((self.place / f"checked_{form}").rglob("failed.log"))
        violated = _json_objects(failed.read_text())
        return [
            [v["invariant"]["relation"], "VIOLATED", v["invariant"]["text_description"]]
            for v in violated
        ]

    def collect(self, form: str, output: str, *options: str) -> None:
        models = ["--models-to-track", *self.models] if self.models else []
        arguments = ["--pyscript", self.script.name, "--shscript", f"{form}.sh", *models]
        self.run("collect", *arguments, *options, "--output-dir", output)

    def run(self, command: str, *arguments: str) -> None:
        # An environment of its own: TrainCheck writes all variables to a file.
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.place),
            "OMP_NUM_THREADS": "1",
        }
        program = Path(sys.executable).parent / f"traincheck-{command}"
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            cwd=self.place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise CannotLookError(f"{command}: more than {COMMAND_TIMEOUT} s") from None
        finally:
            _end_group(process)
            self.seconds[command] = self.seconds.get(command, 0) + time.monotonic() - start
        if process.returncode:
            lines = [
                line for line in output.splitlines() if re.match(r"\S*(Error|Exception)", line)
            ]
            raise CannotLookError(f"{command}: {(lines or output.splitlines() or ['?'])[-1][:300]}")


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its workers when asked to
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def _model_names(script: Path) -> list[str]:
    """Return the variable whose parameters are asked for most often, for --models-to-track."""
    tree = ast.parse(script.read_text())
    assigned = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for whole in node.targets
        for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
        if isinstance(target, ast.Name)
    }
    asked = Counter(
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("parameters", "named_parameters")
        and isinstance(node.value, ast.Name)
        and node.value.id in assigned
    )
    return [name for name, _ in asked.most_common(1)]


def _json_objects(text: str) -> list[Any]:
    decoder, objects, position = json.JSONDecoder(), [], 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        objects.append(value)
        position += len(text[position:]) - len(text[position:].lstrip())
    return objects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--folders", nargs="*", default=["bugs", "healthy"])
    parser.add_argument("--match", default="", help="scripts whose names contain this")
    parser.add_argument("--sample", type=int, help="so many scripts of each folder, at random")
    parser.add_argument("--until", help="start no more scripts after this time, such as 21:30")
    parser.add_argument("--results", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    options = parser.parse_args()
    tools = () if options.table else tuple(options.tools)
    done = {_key(result) for result in _read(options.results)}
    for folder, name, form, ranks in _tasks(options.folders, options.sample):
        left = tuple(tool for tool in tools if (tool, folder, name, form) not in done)
        if options.until and time.strftime("%H:%M") >= options.until:
            break
        if options.match not in name or not left:
            continue
        results = []
        inside = [tool for tool in left if tool != "traincheck"]
        # Where ranks do not make the same number of steps, torchtest2 waits forever.
        apart = [tool for tool in inside if tool == "torchtest2" and ranks > 1]
        for group in ([tool for tool in inside if tool not in apart], apart):
            if group:
                results += run_in_forks(tuple(group), folder, name, form, ranks)
        if "traincheck" in left and form != "fixed":  # both forms at once
            results += run_traincheck(folder, name, ranks)
        with options.results.open("a") as file:
            for result in results:
                _print(result)
                file.write(json.dumps(result) + "\n")
    print(_table(_read(options.results)))


def _tasks(folders: list[str], sample: int | None) -> Iterator[tuple[str, str, str, int]]:
    """Yield the scripts in a random order that stays the same, so that each part is a sample."""
    facts: dict[str, Any] = {}
    for file in sorted(ROOT.glob("*.toml")):
        facts |= tomllib.loads(file.read_text())
    for folder in folders:
        names = sorted(script.stem for script in (ROOT / folder).glob("*.py"))
        random.Random(SEED).shuffle(names)
        for name in names[:sample]:
            for form in ("healthy",) if folder == "healthy" else ("bug", "fixed"):
                yield folder, name, form, facts[name].get("ranks", 1)


def _key(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(result[key] for key in ("tool", "folder", "name", "form"))


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _print(result: dict[str, Any]) -> None:
    shown = ", ".join(f"{check} {level}" for check, level, _ in _reports(result, 1)[:8])
    note = f" [{result['why']}]" if result.get("why") else ""
    print(f"{' '.join(_key(result))} {result['seconds']} s: {shown or '-'}{note}", flush=True)


def _reports(result: dict[str, Any], level: int) -> list[list[str]]:
    """Return the findings of at least a level; of TrainCheck, 2 leaves out the order of events."""
    return [
        finding
        for finding in result["findings"]
        if LEVELS.get(finding[1], 0) >= level and not (level == 2 and finding[0] in ORDER_RELATIONS)
    ]


def _table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| tool | reports that count | bugs looked at | caught | by a new report "
        "| false alarms, fixed twins | false alarms, healthy runs | seconds per run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tool in TOOLS:
        own = {_key(result)[1:]: result for result in results if result["tool"] == tool}
        for level, label in enumerate(TOOLS[tool], start=1):
            if own:
                lines.append("| " + " | ".join([tool, label, *_row(own, level)]) + " |")
    return "\n".join(lines) + "\n"


def _row(own: dict[tuple[str, ...], dict[str, Any]], level: int) -> list[str]:
    looked = {key: result for key, result in own.items() if not result.get("why")}
    names = sorted({key[1] for key in own if key[0] == "bugs"})
    pairs = [
        (
            {*map(_identity, _reports(looked["bugs", name, "bug"], level))},
            {*map(_identity, _reports(looked["bugs", name, "fixed"], level))},
        )
        for name in names
        if ("bugs", name, "bug") in looked and ("bugs", name, "fixed") in looked
    ]
    alarms = []
    for form in ("fixed", "healthy"):
        right = [result for key, result in looked.items() if key[2] == form]
        alarms.append(f"{sum(bool(_reports(r, level)) for r in right)} of {len(right)}")
    return [
        f"{len(pairs)} of {len(names)}",
        str(sum(bool(wrong and not right) for wrong, right in pairs)),
        str(sum(bool(wrong - right) for wrong, right in pairs)),
        *alarms,
        f"{statistics.median(result['seconds'] for result in looked.values()):.1f}",
    ]


def _identity(finding: list[str]) -> tuple[str, str]:
    """Tell findings apart by check, and TrainCheck's, which has few kinds, by invariant."""
    return finding[0], finding[2] if finding[1] == "VIOLATED" else finding[1]


if __name__ == "__main__":
    main()
