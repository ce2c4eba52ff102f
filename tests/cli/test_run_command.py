"""`hookline run` in real processes: the script's own end, and a run of whatever it has trained.

Most scripts run in forks of a process that has imported torch, which start as the command starts
them: with the start-up module and the variables. A few are started by the command itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT, call_hookline
from warm_processes import run_warm

from hookline.integrations.scripts.run_settings import STARTUP, RunSettings
from hookline.integrations.scripts.startup import sitecustomize
from hookline.runs import open_run

LOOP = """
import hashlib, os, signal, sys, threading
import torch
from torch import nn
from torch.nn import functional as F

def train(steps=6, at=lambda step: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(1, steps + 1):
        x = torch.randn(8, 4)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item(), flush=True)
        at(step)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    return model, optimizer
"""

CHILD = f"""
import runpy, sys
if len(sys.argv) > 2:
    runpy.run_path({str(STARTUP / "sitecustomize.py")!r}, run_name="sitecustomize")
sys.argv = sys.argv[1:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(
    folder: Path, script: str, *, plain: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork, as `hookline run` starts it; or plain."""
    file = folder / "script.py"
    file.write_text(LOOP + script)
    variables = RunSettings(runs=str(folder / "runs"), **settings).environment(ENVIRONMENT)
    variables.pop("HOOKLINE_RUN_PROCESS")
    words = ["-c", CHILD, str(file), *([] if plain else ["hooks"])]
    environment = {**(ENVIRONMENT if plain else variables), "HOOKLINE_REPORT": "1"}
    return run_warm(words, cwd=folder, environment=environment)


def find_runs(folder: Path) -> list[Any]:
    return [open_run(each) for each in sorted((folder / "runs").iterdir())]


def values(run: Any, name: str) -> list[float]:
    return [row["value"] for row in run.metrics(name)]


def losses(run: Any) -> list[float]:
    return values(run, "train/loss")


def printed(output: str) -> list[float]:
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss")]


@pytest.fixture(autouse=True)
def _no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that tests call in this process must not become a script."""

    def fail(*_: Any) -> None:
        pytest.fail("The script was started.")

    monkeypatch.setattr(os, "execvpe", fail)


# -- how a script ends ----------------------------------------------------------------------------


def test_the_losses_are_recorded_and_the_weights_are_the_same(tmp_path: Path) -> None:
    script = (
        "import gc; train(30)[0]; gc.collect()  # nobody has the model any more\n"
        "thread = threading.Thread(target=train)\nthread.start(); thread.join(); gc.collect()\n"
    )
    plain = run_script(tmp_path, script, plain=True)
    done = run_script(tmp_path, script)
    assert done.stdout == plain.stdout
    assert done.returncode == plain.returncode == 0
    first, second = find_runs(tmp_path)
    assert losses(first) + losses(second) == pytest.approx(printed(done.stdout))
    assert first.manifest["status"] == second.manifest["status"] == "completed"
    assert (first.path / "report.html").exists()
    names = set(first.results())
    expected = {"gradients/total/norm", "lr/AdamW"}
    assert expected <= names


@pytest.mark.parametrize(
    ("script", "code", "status"),
    [
        ("train(at=lambda step: step == 4 and sys.exit(3))", 3, "completed"),
        ("train(at=lambda step: step == 4 and 1 / 0)", 1, "error"),
        ("train(at=lambda step: step == 4 and os._exit(5))", 5, "training"),
        (
            "train(at=lambda step: step == 4 and os.kill(os.getpid(), signal.SIGKILL))",
            -signal.SIGKILL,
            "training",
        ),
        ("train(at=lambda step: step == 4 and os.kill(os.getpid(), 15))", 143, "preempted"),
    ],
    ids=["sys.exit", "crash", "os._exit", "SIGKILL", "SIGTERM"],
)
def test_the_end_is_the_scripts_own(tmp_path: Path, script: str, code: int, status: str) -> None:
    done = run_script(tmp_path, script)
    assert done.returncode == code
    assert ("ZeroDivisionError" in done.stderr) == (status == "error")
    [run] = find_runs(tmp_path)
    assert run.manifest["status"] == status


def test_a_fork_writes_nothing_and_a_spawned_process_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(
        "import sys\ndef look():\n"
        "    print('spawned', [m for m in sys.modules if m.startswith('hookline')], flush=True)\n"
    )
    script = """
def fork_and_train(step):
    if step == 3 and (pid := os.fork()) == 0:
        optimizer.step(); train(2)
        os._exit(0)
    elif step == 3:
        os.waitpid(pid, 0)

if __name__ == "__main__":
    import multiprocessing
    model, optimizer = train(2)
    train(6, fork_and_train)
    sys.path.insert(0, os.getcwd())
    import helper
    process = multiprocessing.get_context("spawn").Process(target=helper.look)
    sys.modules["__main__"].__spec__ = None
    del sys.modules["__main__"].__file__
    process.start(); process.join()
"""
    done = run_script(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "spawned []" in done.stdout
    assert [len(losses(run)) for run in find_runs(tmp_path)[:2]] == [2, 6]


@pytest.mark.parametrize(("failing", "status"), [(0, "completed"), (4, "error")])
def test_a_run_in_a_forked_child_is_closed(tmp_path: Path, failing: int, status: str) -> None:
    script = f"""
import multiprocessing
def work():
    train(at=lambda step: step == {failing} and 1 / 0)
child = multiprocessing.get_context("fork").Process(target=work)
child.start(); child.join()
sys.exit(child.exitcode)
"""
    done = run_script(tmp_path, script)
    assert done.returncode == (status == "error")
    [run] = find_runs(tmp_path)
    assert run.manifest["status"] == status
    assert losses(run) == pytest.approx(printed(done.stdout))


def test_the_default_hooks_report_what_is_not_finite_and_stop_nothing(tmp_path: Path) -> None:
    script = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 13):
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if step > 9 else 1.0)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
print("finished")
"""
    done = run_script(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished\n"
    [run] = find_runs(tmp_path)
    assert run.manifest["status"] == "completed"
    kinds = {event["kind"] for event in run.events()}
    assert {"debug_finding", "loss_spike"} <= kinds


def test_default_hooks_that_a_loop_does_not_allow_are_left_out(tmp_path: Path) -> None:
    script = """
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
"""
    done = run_script(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert "are left out here" in done.stderr
    assert len(values(find_runs(tmp_path)[0], "lr/LBFGS")) == 2  # it is seen from the second on


def test_hooks_that_need_more_than_the_loop_gives_are_left_out_or_strict(tmp_path: Path) -> None:
    hooks = [{"name": "lr_monitor", "frequency": "epoch"}, "lr_monitor"]
    done = run_script(tmp_path, "train()", hooks=hooks)
    assert done.returncode == 0
    assert "LRMonitor.on_epoch_end) needs" in done.stderr
    assert len(values(find_runs(tmp_path)[0], "lr/AdamW")) == 6
    done = run_script(tmp_path, "train()", hooks=hooks, strict=True)
    assert done.returncode == 1
    assert printed(done.stdout) == []
    assert "Wrap each epoch" in done.stderr


def test_an_interrupt_ends_the_script_by_its_signal(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        f"{LOOP}\ntrain(at=lambda step: step == 4 and os.kill(os.getpid(), signal.SIGINT))\n"
    )
    words = ["-m", "hookline", "run", "--", sys.executable, "loop.py"]
    done = run_warm(words, cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == -signal.SIGINT
    assert find_runs(tmp_path)[0].manifest["status"] == "interrupted"


def test_a_script_that_clears_its_environment_has_hooks(tmp_path: Path) -> None:
    done = run_script(tmp_path, "os.environ.clear(); train()")
    assert done.returncode == 0, done.stderr
    assert losses(find_runs(tmp_path)[0]) == pytest.approx(printed(done.stdout))


UNSEEN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.forward(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("file = open('kept.txt', 'w'); file.write('all')", 1, "has made no optimizer"),
        (UNSEEN, 1, "no module with their parameters was called"),
        ("raise SystemExit(3)", 1, "has made no optimizer"),
        ("import os\nif os.fork(): os.wait()", 1, "has made no optimizer"),
        ("import os; os._exit(4)", 4, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import subprocess, sys; subprocess.check_call([sys.executable, 'loop.py'])", 0, ""),
    ],
    ids=["no_optimizer", "unseen", "sys.exit", "fork", "os._exit", "interrupt", "child"],
)
def test_strict_fails_at_the_end_if_nothing_was_attached(
    tmp_path: Path, script: str, code: int, message: str
) -> None:
    (tmp_path / "loop.py").write_text(f"{LOOP}\ntrain()\n")
    words = ["-m", "hookline", "run", "--strict", "--", sys.executable, "-c", script]
    done = run_warm(words, cwd=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.count("hookline:") == (code == 1)
    if (file := tmp_path / "kept.txt").exists():
        assert file.read_text() == "all"


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hook", "nope"], "Unknown hook 'nope'"),
        (["--hook", "lr_monitor:evry=3"], "Unknown option 'evry'"),
        (["--hook", "gradient_monitor:log_frequency=-1"], "log_frequency"),
        (["--hook", "lr_monitor:=3"], "is not a valid override"),
        (["--hooks", "missing.yaml"], "There is no file 'missing.yaml'"),
        (["--hooks", "hooks.yaml"], "hooks.yaml:1: model: Unknown key 'model'"),
        (["--runs", "hooks.yaml"], "'hooks.yaml' is a file"),
        (["--hook", "own:Missing"], "has no 'Missing'"),
    ],
)
def test_a_mistake_is_found_before_the_script_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "hooks.yaml").write_text("model: x\n")
    (tmp_path / "own.py").write_text("")
    code, output = call_hookline("run", *arguments, "--", "touch", "started", cwd=tmp_path)
    assert message in output
    assert code == 2
    assert not (tmp_path / "started").exists()


def test_commands_that_cannot_run_or_cannot_have_hooks_are_named(tmp_path: Path) -> None:
    for command, message in {
        (): "COMMAND",
        ("nothing_like_it",): "There is no program",
        ("train.py",): "Write: -- python train.py",
        ("python", "-W", "error", "-uI", "train.py"): "python -I ignores",
    }.items():
        code, output = call_hookline("run", "--strict", "--", *command, cwd=tmp_path)
        assert code == 2
        assert message in output


def test_print_env_prints_what_a_job_file_evaluates(tmp_path: Path) -> None:
    (tmp_path / "hooks.yaml").write_text(
        "hooks:\n  update: [{name: clip_norm, max_norm: 2}]\nname: mine\ntags: [a]\n"
        "settings: {isolate: false}\ntrackers: [tensorboard]\n"
    )
    (tmp_path / "own.py").write_text(
        "import hookline\nclass Own(hookline.Hook):\n    def __init__(self, a, b=1): ...\n"
    )
    code, output = call_hookline(
        *("run", "--hooks", "hooks.yaml", "--hook", "own:Own:a=[1,2],b=it's", "--tag", "b"),
        *("--hook", "own:Own:a=2,every=5", "--print-env"),
        cwd=tmp_path,
    )
    assert code == 0, output
    script = f'{output}\nprintf "%s\\n" "$PYTHONPATH" "$HOOKLINE_RUN"'
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "own"}
    shown = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert shown[0] == f"{STARTUP}:own"
    settings = json.loads(shown[1])
    assert settings["hooks"] == [
        {"name": "clip_norm", "max_norm": 2},
        {"name": "own.Own", "a": [1, 2], "b": "it's"},
        {"name": "own.Own", "a": 2, "every": 5},
    ]
    assert settings["runs"] == str(tmp_path / "runs")
    assert (settings["name"], settings["tags"]) == ("mine", ["a", "b"])
    assert settings["settings"]["isolate"] is False
    assert settings["trackers"] == [{"name": "tensorboard"}]
    assert RunSettings().environment({"PYTHONPATH": ""})["PYTHONPATH"] == str(STARTUP)


def run_command(folder: Path, *words: str, text: str = "", **variables: str) -> Any:
    """Run `hookline run` in a process that has imported torch, which becomes the script's."""
    environment = {**ENVIRONMENT, **variables}
    command = [sys.executable, "-m", "hookline", "run", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_a_process_without_an_optimizer_imports_nothing(tmp_path: Path) -> None:
    code = "import sys; print('\\n'.join(sys.modules))"
    plain = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    done = run_warm(
        ["-m", "hookline", "run", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        environment=ENVIRONMENT,
    )
    added = set(done.stdout.split()) - set(plain.stdout.split())
    assert added <= {"sitecustomize", "__future__", "atexit"}
    assert "This process has made no optimizer, and no run was written" in done.stderr


def test_an_interpreter_without_hookline_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name = "hookline.integrations.scripts.script_hooks"
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    for strict in (False, True):
        settings = RunSettings(strict=strict).variables()
        child = sitecustomize._Child(settings["HOOKLINE_RUN"])
        if strict:
            with pytest.raises(RuntimeError, match="cannot import Hookline"):
                child.get(True)
        else:
            assert child.get(False) is child.get(True) is child.get(True) is None
            assert capsys.readouterr().err.count("cannot import Hookline") == 1


def test_a_module_with_stdin_a_hook_that_stops_and_a_sitecustomize_of_the_user(
    tmp_path: Path,
) -> None:
    package, own = tmp_path / "package", tmp_path / "own"
    package.mkdir()
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.ran_own = __file__")
    (package / "__init__.py").write_text(LOOP)
    (package / "__main__.py").write_text(
        "import sys\nfrom package import train\n"
        "print(sys.ran_own, input(), *sys.argv[1:])\ntrain()\nprint('after')\n"
    )
    (tmp_path / "hooks.py").write_text(
        "import hookline\nclass Stops(hookline.Hook):\n"
        "    def on_step_end(self, trainer, step):\n"
        "        if step == 4: trainer.stop('enough')\n"
    )
    hooks = ["--hook", "hooks:Stops", "--hook", "model_checkpoint:every_n_steps=2"]
    command = [sys.executable, "-m", "package", "--debug", "--lr", "1"]
    path = f"{own}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    done = run_command(tmp_path, *hooks, "--", *command, text="typed\n", PYTHONPATH=path)
    assert done.returncode == 75, done.stderr
    assert done.stdout.startswith(f"{own / 'sitecustomize.py'} typed --debug --lr 1\n")
    assert len(printed(done.stdout)) == 3  # the fourth is stopped before it is printed
    assert "after" not in done.stdout
    assert "Training was asked to stop in step 4 (enough)" in done.stderr
    assert "Traceback" not in done.stderr
    [run] = find_runs(tmp_path)
    assert run.manifest["status"] == "stopped"
    lines = done.stderr[done.stderr.index("    import hookline") :].splitlines()[:3]
    assert lines[1:] == [
        f"    checkpoint = hookline.open_run({str(run.path)!r}).checkpoints()[-1]",
        "    checkpoint.load_into(model)",
    ]
    assert [each.step for each in run.checkpoints()] == [4]


def test_torchrun_with_ddp_and_fsdp2_writes_a_run_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        """
import torch, torch.distributed as dist
from torch.distributed import destroy_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def train(wrap):
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print("loss", mean.item() / 2, flush=True)

dist.init_process_group("gloo")
train(torch.nn.parallel.DistributedDataParallel)
mesh = init_device_mesh("cpu", (2,))
train(lambda model: fully_shard(model, mesh=mesh))
destroy_process_group()
"""
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "ranks.py"]
    hook = "gradient_monitor:log_frequency=1"
    done = run_command(tmp_path, "--hook", hook, "--", sys.executable, *launch)
    assert done.returncode == 0, done.stderr
    runs = find_runs(tmp_path)
    assert [len(losses(run)) for run in runs] == [4, 4]
    assert [loss for run in runs for loss in losses(run)] == pytest.approx(printed(done.stdout))
    norms = [values(run, "gradients/total/norm") for run in runs]
    assert norms[0] == pytest.approx(norms[1])  # of all ranks, also where they are sharded
    assert [run.manifest["status"] for run in runs] == ["completed", "completed"]
    assert "no optimizer" not in done.stderr
