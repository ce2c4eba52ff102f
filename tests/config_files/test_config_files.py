"""Config files: what they may contain, what is built from them, and the errors for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hookline
from hookline.config_files import FileError, load_training, training_schema
from hookline.config_files.dry_run import dry_run
from hookline.config_files.loading import load_python
from hookline.config_files.merging import merge_files, parse_override
from hookline.config_files.resuming import NEWEST, find_resume
from hookline.config_files.sections import TrainingConfig

PROJECT = """
import torch
from torch import nn
from torch.nn import functional as F
import hookline

class Net(nn.Module):
    def __init__(self, width: int, act: nn.Module | None = None, fn=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)
        self.act, self.fn = act, fn

    def forward(self, x):
        x = self.first(x)
        return self.second(x if self.act is None else self.act(x))

    @classmethod
    def small(cls):
        return cls(2)

class Points(torch.utils.data.Dataset):
    def __init__(self, count: int = 8):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.full((8,), float(i)), torch.ones(4)

def batches(count: int = 2):
    return [(torch.ones(2, 8), torch.ones(2, 4)) for _ in range(count)]

def step(model, batch, scale=1.0):
    return {"loss": scale * F.mse_loss(model(batch[0]), batch[1]), "seen": torch.tensor(7.0)}

def tokens(batch, each=3):
    return each

class Watch(hookline.Hook):
    def __init__(self, threshold=1.0, helper=None):
        self.threshold, self.helper, self.steps = threshold, helper, []
    def on_step_end(self, step):
        self.steps.append(step)

class Look(hookline.ForwardHook):
    def __call__(self, activations):
        pass

def broken():
    raise RuntimeError("no network today")

ANSWER = 42
"""

BASE = """\
model:
  class_path: net.Net
  init_args: {width: 4}
data:
  train: net.batches
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1}
loss_fn: torch.nn.functional.mse_loss
trainer: {runs: null, progress: "off"}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(PROJECT)
    (tmp_path / "train.yaml").write_text(BASE)
    return tmp_path


def load(project: Path, *overrides: str, more: str = "", trust: tuple[str, ...] = ()) -> Any:
    """The training of the base file with more in it, as `key=value` or as text."""
    (project / "more.yaml").write_text(f"include: train.yaml\n{more}")
    return load_training(project / "more.yaml", *overrides, trust=trust)


def refused(project: Path, *overrides: str, more: str = "", trust: tuple[str, ...] = ()) -> str:
    with pytest.raises(FileError) as caught:
        load(project, *overrides, more=more, trust=trust)
    return str(caught.value)


# -- reading --------------------------------------------------------------------------------------

SAME = {
    "a.yaml": "x: {n: 1, f: 1.0e-3, t: true, s: 'no', d: '2026-11-15'}\nl: [1, [2], {k: v}]\n",
    "a.toml": 'l = [1, [2], {k = "v"}]\n[x]\nn = 1\nf = 1e-3\nt = true\ns = "no"\nd = 2026-11-15\n',
    "a.json": '{"x": {"n": 1, "f": 1e-3, "t": true, "s": "no", "d": "2026-11-15"},'
    '"l": [1, [2], {"k": "v"}]}',
}


def read(folder: Path, name: str, text: str, *overrides: str, **variables: str) -> Any:
    (folder / name).write_text(text)
    return merge_files(folder / name, overrides, variables)


def wrong(folder: Path, name: str, text: str, *overrides: str, **variables: str) -> str:
    with pytest.raises(FileError) as caught:
        read(folder, name, text, *overrides, **variables)
    return str(caught.value)


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    seen = [read(tmp_path, name, text).values for name, text in SAME.items()]
    x = {"n": 1, "f": 0.001, "t": True, "s": "no", "d": "2026-11-15"}
    assert seen == [{"x": x, "l": [1, [2], {"k": "v"}]}] * 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3.", 3.0),
        (".5", 0.5),
        ("-1_000", -1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("2026-11-15", "2026-11-15"),
        ("~", None),
        ("", None),
        ("True", True),
        (".inf", float("inf")),
        ("!!str 5", "5"),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
    ],
)
def test_yaml_is_read_by_its_newer_rules(tmp_path: Path, text: str, value: Any) -> None:
    assert read(tmp_path, "a.yaml", f"x: {text}").values == {"x": value}
    if text:  # on the command line, nothing is more likely a mistake
        assert parse_override(f"x={text}") == (("x",), value)


def test_keys_are_words_and_anchors_work(tmp_path: Path) -> None:
    values = read(tmp_path, "a.yaml", "{on: &a [1], 2: *a, null: 4}").values
    assert values == {"on": [1], "2": [1], "null": 4}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: 1\nb: [1", ["a.yaml:2:", "Not valid YAML"]),
        ("a.yaml", "a: 1\nb: 2\na: 3", ["a.yaml:3:", "Duplicate key 'a'", "line 1"]),
        ("a.yaml", "a: !!python/object:os.system x", ["a.yaml:1:", "!!python/object:os.system"]),
        ("a.yaml", "a: !!int x", ["a.yaml:1:", "'x' is not a valid int"]),
        ("a.yaml", "[1, 2]", ["[1, 2]", "expected a mapping"]),
        ("a.yaml", "? [1]\n: 2", ["a.yaml:1:", "A key is a list"]),
        ("a.yaml", "a: &a {x: 1}\nb: {<<: *a}", ["a.yaml:2:", "`<<` is not supported"]),
        ("a.yaml", "a: &a [*a]", ["nested more than 40"]),
        ("a.yaml", "a: " + "[" * 5000, ["nested more than 40"]),
        ("a.yaml", "a: \x00", ["Not valid YAML"]),
        ("a.toml", "a = 1\nb = [", ["a.toml", "Not valid TOML"]),
        ("a.toml", "a = 1\na = 2\n", ["a.toml: ", "Not valid TOML", "line 2"]),
        ("a.toml", "a = " + "[" * 3000 + "]" * 3000, ["a.toml"]),
        ("a.json", '{"a": 1,\n "b": }', ["a.json:2:", "Not valid JSON"]),
        ("a.json", '{"a": 1, "a": 2}', ["the key 'a' occurs twice"]),
        ("a.json", "[" * 100000, ["Not valid JSON"]),
        ("a.jsn", "{}", ["'.jsn'", "Did you mean '.json'?"]),
        ("a.py", "", ["train.py:make_trainer"]),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    said = wrong(tmp_path, name, text)
    for word in words:
        assert word in said


def test_a_file_that_is_not_there_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("")
    with pytest.raises(FileError, match=r"There is no such file. Did you mean 'train.yaml'\?"):
        merge_files(tmp_path / "trian.yaml")


def test_yaml_knows_the_line_of_a_key(tmp_path: Path) -> None:
    text = "a: 1\nb:\n  - x: 1\n  - x: 1\n    y:\n      z: 2\n"
    assert read(tmp_path, "a.yaml", text).place(("b", 1, "y", "z")) == (str(tmp_path / "a.yaml"), 6)


# -- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${LR}", 0.5),
        ("${LR:3}", 0.5),
        ("${NONE:true}", True),
        ("${NONE:}", ""),
        ("${NONE:a:b}", "a:b"),
        ("${NONE:[1, 2]}", "[1, 2]"),
        ("data/${NAME}/${LR}", "data/web/0.5"),
        ("$${NAME}", "${NAME}"),
        ("$NAME", "$NAME"),
    ],
)
def test_variables_of_the_environment(tmp_path: Path, text: str, value: Any) -> None:
    for name in ("a.json", "a.yaml"):
        quoted = json.dumps({"x": [text]})
        merged = read(tmp_path, name, quoted, LR="0.5", NAME="web")
        assert merged.values == {"x": [value]}
        assert type(merged.values["x"][0]) is type(value)


def test_variables_that_are_missing_are_named_all_at_once(tmp_path: Path) -> None:
    said = wrong(tmp_path, "a.yaml", "a: ${LERN_RATE}\nb:\n  c: ${x y}\n", LEARN_RATE="1")
    assert (
        "a.yaml:1: a: There is no key or environment variable 'LERN_RATE'. Did you mean 'LEARN_RA"
        in said
    )
    assert "${LERN_RATE:…}" in said
    assert "a.yaml:3: b.c: " in said
    assert "$${" in said


# -- references -----------------------------------------------------------------------------------


WIDTHS = """\
width: 64
lr: 1e-3
fast: true
nothing: null
model: {init_args: {width: "${width}", sizes: [1, 2]}, name: net}
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${width}", 64),
        ("${lr}", 0.001),
        ("${fast}", True),
        ("${nothing}", None),
        ("${model.init_args.width}", 64),
        ("${model.init_args.sizes}", [1, 2]),
        ("${model.init_args.sizes.1}", 2),
        ("${model.init_args.sizes[1]}", 2),
        ("${model}", {"init_args": {"width": 64, "sizes": [1, 2]}, "name": "net"}),
        ("${model.name}-${width}", "net-64"),
        ("a ${fast} ${nothing} ${lr}", "a true null 0.001"),
        ("${env:width}", 3),
        ("${env:width}.", "003."),
        ("${env:none:7}", 7),
        ("${OTHER}", "x"),
        ("${model.depth:2}", 2),
        ("${model.name:2}", "net"),
        ("$${width}", "${width}"),
    ],
)
def test_references_to_other_keys_keep_their_type(tmp_path: Path, text: str, value: Any) -> None:
    more = f"x: {json.dumps(text)}\n"
    values = read(tmp_path, "a.yaml", WIDTHS + more, width="003", OTHER="x").values
    assert values["x"] == value
    assert type(values["x"]) is type(value)


def test_references_see_included_files_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('a = "${b}"\nb = 1\n')
    text = "include: ${BASE}.toml\nb: 2\nc: ${a}\n"
    assert read(tmp_path, "a.yaml", text, BASE="base").values == {"a": 2, "b": 2, "c": 2}
    values = read(tmp_path, "a.yaml", text, "b=3", "d=${a}", BASE="base").values
    assert values == {"a": 3, "b": 3, "c": 3, "d": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: ${x}", "a.yaml:1: x: The reference leads back to itself: x → x."),
        (
            "b: ${c.d}\nc: {d: 'see ${b}'}",
            "a.yaml:1: b: The reference leads back to itself: b → c.d → b.",
        ),
        ("m: {n: 1, w: '${m}'}", "a.yaml:1: m.w: The reference leads back to itself: m.w → m.w."),
        (
            "m: {width: 1}\nx: ${m.widht}",
            "a.yaml:2: x: There is no key 'm.widht'. Did you mean 'm.width'?",
        ),
        ("m: [1]\nx: ${m.1}", "a.yaml:2: x: There is no key 'm.1'."),
        ("x: ${env:x}", "a.yaml:1: x: There is no environment variable 'x'."),
        (
            "m: [1]\nx: a ${m}",
            "a.yaml:2: x: ${m} is no single value, which cannot be a part of a text.",
        ),
        ("x: ${}", "a.yaml:1: x: '${}' is not a reference."),
        ("x: ${a", "a.yaml:1: x: '${' is not a reference."),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_said_once_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(FileError) as caught:
        read(tmp_path, "a.yaml", text)
    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("first", "again"),
    [("[1, 2]", "['${a{0}}', '${a{0}}']"), ("x" * 1000, "'${a{0}}${a{0}}'"), ("1", "['${a{0}}']")],
)
def test_references_that_would_fill_the_memory_are_an_error(
    tmp_path: Path, first: str, again: str
) -> None:
    lines = [f"a0: {first}", *(f"a{i + 1}: {again.replace('{0}', str(i))}" for i in range(60))]
    assert "References lead to more than 20,000" in wrong(tmp_path, "a.yaml", "\n".join(lines))


# -- includes -------------------------------------------------------------------------------------


def test_what_includes_wins_over_what_is_included(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.toml").write_text(
        'include = "two.json"\na = 1\n[m]\nx = 1\ny = [1, 2]\n'
    )
    (tmp_path / "sub" / "two.json").write_text('{"a": 0, "two": 2, "m": {"w": 0}}')
    (tmp_path / "three.yaml").write_text("m: {x: 3}\n")
    merged = read(tmp_path, "a.yaml", "include: [sub/one.toml, three.yaml]\nm: {y: [9]}\n")
    assert merged.values == {"a": 1, "two": 2, "m": {"w": 0, "x": 3, "y": [9]}}
    assert merged.place(("m", "x")) == (str(tmp_path / "three.yaml"), 1)
    assert merged.place(("a",)) == (str(tmp_path / "sub" / "one.toml"), None)


def test_another_class_does_not_inherit_arguments(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {class_path: a.B, init_args: {x: 1}}\n")
    other = read(tmp_path, "a.yaml", "include: base.yaml\nmodel: {class_path: a.C}\n")
    assert other.values == {"model": {"class_path": "a.C"}}
    same = read(tmp_path, "a.yaml", "include: base.yaml\nmodel: {class_path: a.B}\n")
    assert same.values["model"]["init_args"] == {"x": 1}


def test_what_cannot_be_included_is_said_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: 1\nb: [\n")
    said = wrong(tmp_path, "a.yaml", "include:\n  - bas.yaml\n  - 3\n  - broken.yaml\n")
    assert "a.yaml:2: include.0: " in said
    assert "There is no such file" in said
    assert "a.yaml:3: include.1: It is 3; expected the name of a file." in said
    assert "broken.yaml:3: Not valid YAML" in said


# -- the command line's settings ------------------------------------------------------------------


def test_settings_win_over_the_file(tmp_path: Path) -> None:
    text = "a: 1\nl: [{k: 1}, 2]\nn: null\nhooks: [lr_monitor]\nmodel: a.B\n"
    settings = ["a=2", "l.0.k=[1, x]", "l[1]=5", "n.x.y=1e-3", "hooks.0.every=3", "s=a=b"]
    merged = read(tmp_path, "a.yaml", text, *settings, "model.init_args.w=1")
    assert merged.values == {
        "a": 2,
        "l": [{"k": [1, "x"]}, 5],
        "n": {"x": {"y": 0.001}},
        "hooks": [{"name": "lr_monitor", "every": 3}],
        "s": "a=b",
        "model": {"class_path": "a.B", "init_args": {"w": 1}},
    }
    assert merged.place(("l", 0, "k")) == ("command line", None)


def test_settings_that_cannot_be_made_are_all_named(tmp_path: Path) -> None:
    said = wrong(tmp_path, "a.yaml", "l: [1]\na: 1\n", "l.1=2", "l.x=2", "a.b=1", "nothing", "x=[")
    assert "'l' is a list of 1 without an item '1'" in said
    assert "'l' is a list of 1 without an item 'x'" in said
    assert "'a.b' cannot be set: 'a' is 1, which has no keys." in said
    assert "'nothing' is not a valid override. Expected key=value" in said
    assert "The value in 'x=[' cannot be parsed" in said


# -- the models -----------------------------------------------------------------------------------


def test_all_mistakes_are_named_at_once_with_line_and_nearest_key(project: Path) -> None:
    (project / "train.yaml").write_text(
        "modle: a.B\n"
        "data:\n"
        "  trian: net.batches\n"
        "optimizer:\n"
        "  clas_path: torch.optim.SGD\n"
        "trainer:\n"
        "  max_epoch: 3\n"
        "  precision: bf61\n"
        "seed: x\n"
        "hooks:\n"
        "  loop: [{patience: 3}]\n"
        "  updates: []\n"
    )
    with pytest.raises(FileError) as caught:
        load_training(project / "train.yaml")
    problems = {one.key: one for one in caught.value.problems}
    assert {key: one.line for key, one in problems.items()} == {
        "modle": 1,
        "model": None,
        "data.train": 2,
        "data.trian": 3,
        "optimizer.class_path": 4,
        "optimizer.clas_path": 5,
        "trainer.max_epoch": 7,
        "trainer.precision": 8,
        "seed": 9,
        "hooks.loop.0": 11,
        "hooks.updates": 12,
    } | {"model": problems["model"].line}
    assert all(one.file == str(project / "train.yaml") for one in problems.values())
    assert "Did you mean 'model'?" in problems["modle"].text
    assert "Expected the model" in problems["model"].text
    assert "Did you mean 'train'?" in problems["data.trian"].text
    assert "Did you mean 'class_path'?" in problems["optimizer.clas_path"].text
    assert "Did you mean 'max_epochs'?" in problems["trainer.max_epoch"].text
    assert "'fp32', 'bf16' or 'fp16'" in problems["trainer.precision"].text
    assert "needs `name` or `class_path`" in problems["hooks.loop.0"].text
    assert "Did you mean 'update'?" in problems["hooks.updates"].text
    assert str(caught.value).startswith("11 problems:\n  ")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model=3", "model: It is 3. Expected a mapping."),
        ("model.class_path=Net", "'Net'. Expected a class path, `package.module.Name`."),
        ("hooks=lr_monitor", "hooks: It is 'lr_monitor'. Expected a mapping or a list."),
        (
            "data.train={clas_path: net.batches}",
            "data.train.clas_path: Unknown key 'clas_path'. Did",
        ),
        ("optimizer=[]", "at least 1 item"),
        ("scheduler.optimizer=-1", "greater than or equal to 0"),
        ("trust=numpy", "Pass `--trust PACKAGE`"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    project: Path, setting: str, said: str
) -> None:
    assert said in refused(project, setting)


# -- trust ----------------------------------------------------------------------------------------


def test_trust_may_be_a_part_of_a_package(project: Path) -> None:
    load(project, "loss_fn=xml.dom.minidom.parse", trust=("xml.dom",))
    assert "is not trusted" in refused(project, "loss_fn=xml.sax.parse", trust=("xml.dom",))


def test_hooks_need_trust_too(project: Path) -> None:
    said = refused(
        project,
        "hooks=[this.Hook, {class_path: antigravity.Hook}]",
        "trainer.hooks.hook_classes=[turtle.Hook]",
        "model.init_args.act={class_path: sched.Act}",
    )
    for package in ("this", "antigravity", "turtle", "sched"):
        assert f"`--trust {package}`" in said
    assert "hooks.1.class_path" in said
    assert "trainer.hooks.hook_classes.0" in said
    assert "model.init_args.act.class_path" in said


def test_a_file_with_the_name_of_another_module_does_not_make_it_trusted(project: Path) -> None:
    (project / "json.py").write_text("def dumps(): pass\n")
    (project / "yaml").mkdir()  # Python would import the installed one
    assert "is not trusted" in refused(project, "loss_fn=json.dumps")
    assert "is not trusted" in refused(project, "loss_fn=yaml.safe_load")


def test_two_projects_may_have_modules_of_the_same_name(tmp_path: Path) -> None:
    for name, width in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(PROJECT + f"\ndef sized(): return Net({width})\n")
        (tmp_path / name / "train.yaml").write_text(BASE)
    for name, width in (("one", 3), ("two", 5), ("one", 3)):
        file, override = tmp_path / name / "train.yaml", "model={class_path: net.sized}"
        training = load_training(file, override, project=tmp_path / name)
        assert training.trainer.model.first.out_features == width


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "model.init_args.widht=1",
            "Net has no argument 'widht'. Did you mean 'width'? The arguments are: width",
        ),
        ("model.init_args={}", "model.init_args.width: Net requires the argument 'width'."),
        ("model.init_args.width=wide", "model.init_args.width: It is 'wide'. Input should be a v"),
        ("model.init_args.width='4'", "Write the number without quotes."),
        ("data.train.loader={shuffle: no}", "Write true or false, without quotes."),
        ("model.class_path=net.Nett", "'net' has no 'Nett'. Did you mean 'Net'?"),
        (
            "model.class_path=net.ANSWER",
            "It is an instance of int; expected a class or a function.",
        ),
        ("model.class_path=nett.Net", "There is no module 'nett'. Did you mean 'net'?"),
        (
            "model.init_args.width=",
            "has no value. To set it to null, write model.init_args.width=null.",
        ),
        ("model.class_path=torch.nnn.Linear", "'torch' has no module 'nnn'. Did you mean 'nn'?"),
        ("optimizer.init_args.params=[]", "The argument 'params' of SGD is passed automatically."),
        ("scheduler=torch.optim.lr_scheduler.StepLR", "StepLR requires the argument 'step_size'."),
        ("data.train.loader={batchsize: 3}", "data.train.loader.batchsize: DataLoader has no ar"),
        ("loss_fn.init_args.reducton=sum", "Did you mean 'reduction'?"),
        ("loss_fn.init_args.reduction=3", "loss_fn.init_args.reduction: It is 3."),
        ("model.init_args.act={class_path: torch.nn.GELU, args: 1}", "Unknown key 'args'."),
        ("model.init_args.act={class_path: torch.nn.GELU, init_args: {a: 3}}", "act.init_args.a: "),
        (
            "model.init_args.fn={class_path: torch.relu, call: false, init_args: {x: 3}}",
            "nothing is called",
        ),
        ("hooks=[{name: early_stopping, patiense: 3}]", "Did you mean 'patience'?"),
        ("hooks=[{name: early_stopping, patience: x}]", "'patience' is 'x'."),
        (
            "hooks={update: [clip_norm]}",
            "hooks.update.0.max_norm: ClipNorm: The option 'max_norm' is required",
        ),
        ("hooks=[{name: lr_monitor, before: nobody}]", "There is no hook 'nobody'."),
        ("step_fn=net.step", "`loss_fn` is given, too"),
        ("scheduler.optimizer=1", "requires the argument"),
    ],
)
def test_what_does_not_fit_a_signature_is_said_before_anything_is_made(
    project: Path, setting: str, said: str
) -> None:
    more = "scheduler: torch.optim.lr_scheduler.StepLR\n" if "scheduler.o" in setting else ""
    assert said in refused(project, setting, more=more)


def test_seeds_that_contradict_each_other_are_an_error(project: Path) -> None:
    said = refused(project, "seed=1", "trainer.seed=2")
    assert "trainer.seed: It is 2, but `seed` is 1." in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model={class_path: net.broken}", "RuntimeError: no network today (net.py, line "),
        ("model={class_path: net.batches}", "It returned a list; expected a torch.nn.Module."),
        ("optimizer.params=[thrid]", "optimizer.params: No parameter matches 'thrid'"),
        (
            "data.train={class_path: net.Net.small}",
            "It returned a Net; expected an iterable of batches",
        ),
        ("trainer.device=toaster", "The device 'toaster' cannot be used here"),
        ("trainer.loaders.order=weighted", "weights"),
        (
            "data.train={class_path: net.Points, loader: {batch_size: -1}}",
            "data.train.loader: It could not be created: ValueError: batch_size",
        ),
        ("model={class_path: torch.nn.Identity}", "The model has no parameters to train."),
        ("seed=9223372036854775808", "less than 9223372036854775808"),
        ("optimizer.groups=[{params: [first]}, {params: [first.bias]}]", "in an earlier group"),
    ],
)
def test_what_cannot_be_made_is_an_error_with_its_place(
    project: Path, setting: str, said: str
) -> None:
    assert said in refused(project, setting)


# -- what is made ---------------------------------------------------------------------------------


def test_arguments_may_be_objects_or_functions_themselves(project: Path) -> None:
    training = load(
        project,
        "model.init_args.act={class_path: torch.nn.Embedding, call: false}",
        "model.init_args.fn=[{class_path: torch.nn.Softmax, init_args: {dim: 1}}]",
    )
    model = training.trainer.model
    assert model.act is torch.nn.Embedding
    assert model.fn[0].dim == 1


def test_the_seed_gives_the_same_weights(project: Path) -> None:
    def weights(*settings: str) -> torch.Tensor:
        return load(project, *settings).trainer.model.first.weight.detach().clone()

    assert torch.equal(weights("seed=3"), weights("seed=3"))
    assert torch.equal(weights("seed=3"), weights("trainer.seed=3"))
    assert not torch.equal(weights("seed=3"), weights("seed=4"))
    assert load(project, "seed=3").trainer.config.seed == 3


def test_groups_of_parameters_have_options_of_their_own(project: Path) -> None:
    trainer = load(project, more="optimizer: {groups: [{params: [second.*], lr: 0.5}]}\n").trainer
    model = trainer.model
    rest, group = trainer.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.second.parameters()]
    assert [id(p) for p in rest["params"]] == [id(p) for p in model.first.parameters()]
    assert (rest["lr"], group["lr"]) == (0.1, 0.5)


def test_several_optimizers_share_the_parameters_and_schedulers_choose_theirs(
    project: Path,
) -> None:
    (project / "train.yaml").write_text(BASE.replace("optimizer:", "ignored: &o") + "x: 1\n")
    text = BASE.replace(
        "optimizer:\n  class_path: torch.optim.SGD\n  init_args: {lr: 0.1}\n",
        "optimizer:\n"
        "  - {class_path: torch.optim.SGD, init_args: {lr: 0.1}, params: [first]}\n"
        "  - {class_path: torch.optim.AdamW, params: [second]}\n"
        "scheduler:\n"
        "  - {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1}, "
        "optimizer: 1}\n",
    )
    (project / "two.yaml").write_text(text)
    trainer = load_training(project / "two.yaml").trainer
    assert [type(one).__name__ for one in trainer.optimizers] == ["SGD", "AdamW"]
    assert trainer.schedulers[0].optimizer is trainer.optimizers[1]
    with pytest.raises(
        FileError, match=r"scheduler.0.optimizer: It is 2, but there are 2 optimizers"
    ):
        load_training(project / "two.yaml", "scheduler.0.optimizer=2")


def test_a_dataset_is_loaded_as_its_options_say(project: Path) -> None:
    training = load(
        project,
        "data.train={class_path: net.Points, init_args: {count: 6}, loader: {batch_size: 3, "
        "collate_fn: {class_path: torch.utils.data.default_collate, call: false}}}",
        "data.val={class_path: net.Points}",
    )
    assert training.trainer.train_data.length() == 2
    assert training.trainer.val_data.length() == 8
    assert training.fit().step == 2


def test_loaders_may_have_names_or_stand_in_a_list(project: Path) -> None:
    named = load(
        project,
        "data.train={web: net.batches, code: {class_path: net.batches, init_args: {count: 3}}}",
        "trainer.loaders.order=round_robin",
    )
    assert list(named.trainer.train_data.names) == ["web", "code"]
    assert named.fit().step == 5
    listed = load(project, "data.train=[net.batches, net.batches]")
    assert list(listed.trainer.train_data.names) == ["0", "1"]
    odd = load(project, "data.train={loader: net.batches, groups: net.batches}")
    assert list(odd.trainer.train_data.names) == ["loader", "groups"]


def test_losses_are_functions_bound_functions_or_objects(project: Path) -> None:
    x, y = torch.zeros(2, 4), torch.ones(2, 4)
    plain = load(project).trainer.loss_fn
    bound = load(project, "loss_fn.init_args.reduction=sum").trainer.loss_fn
    made = load(project, "loss_fn={class_path: torch.nn.L1Loss, init_args: {reduction: sum}}")
    assert plain is torch.nn.functional.mse_loss
    assert (float(plain(x, y)), float(bound(x, y))) == (1.0, 8.0)
    assert isinstance(made.trainer.loss_fn, torch.nn.L1Loss)


def test_steps_and_tokens_may_be_functions_of_the_project(project: Path) -> None:
    training = load(
        project,
        "loss_fn=null",
        "step_fn={class_path: net.step, init_args: {scale: 2.0}}",
        "tokens_fn={class_path: net.tokens, init_args: {each: 5}}",
        "hooks=[net.Watch]",
    )
    trainer = training.fit()
    assert trainer.tokens_seen == 10
    assert trainer.hooks.get_hook("watch").steps == [1, 2]


def test_hooks_are_registered_as_the_file_says(project: Path) -> None:
    trainer = load(
        project,
        more="hooks:\n"
        "  loop:\n"
        "    - {class_path: net.Watch, init_args: {threshold: 3}, as: mine, every: 2}\n"
        "    - {name: early_stopping, patience: 7, enabled: false}\n"
        "    - {name: net.Watch, helper: {class_path: torch.nn.GELU}}\n"
        "  forward: [net.Look]\n"
        "  update: [{name: clip_norm, max_norm: 2.0}]\n"
        "  probes: [{name: monitor, modules: [first]}]\n",
    ).fit()
    infos = {info.name: info for info in trainer.hooks.describe()}
    assert infos["mine"].options["threshold"] == 3
    assert trainer.hooks.get_hook("mine").steps == [2]
    assert isinstance(trainer.hooks.get_hook("watch").helper, torch.nn.GELU)
    assert infos["early_stopping"].status == "disabled"
    assert infos["early_stopping"].options["patience"] == 7
    assert {infos[name].kind for name in ("look", "clip_norm", "monitor")} == {
        "forward",
        "update",
        "probe",
    }


def test_steps_alone_train_for_so_many_steps(project: Path) -> None:
    assert load(project, "trainer.max_steps=5").fit().step == 5


# -- the hash -------------------------------------------------------------------------------------


def test_the_hash_of_a_training_does_not_depend_on_how_it_is_written(project: Path) -> None:
    (project / "same.json").write_text(json.dumps(yaml.safe_load(BASE)))
    (project / "same.toml").write_text(
        'loss_fn = "torch.nn.functional.mse_loss"\n'
        'model = {class_path = "net.Net", init_args = {width = 4}}\n'
        'data = {train = "net.batches"}\n'
        'trainer = {progress = "off"}\n'
        '[optimizer]\nclass_path = "torch.optim.SGD"\ninit_args = {lr = 1e-1}\n'
    )
    first = load_training(project / "train.yaml", "trainer.runs=here").config_hash
    for name in ("same.json", "same.toml"):
        assert load_training(project / name, "trainer.runs=here").config_hash == first
    again = load(
        project,
        "trainer.runs=here",
        "trainer.max_epochs=1",
        "optimizer.init_args.lr=1e-1",
        "loss_fn={class_path: torch.nn.functional.mse_loss, init_args: {}}",
        trust=("numpy",),
    )
    assert again.config_hash == first


@pytest.mark.parametrize(
    "setting",
    [
        "model.init_args.width=5",
        "trainer.max_steps=1",
        "hooks=[lr_monitor]",
        "seed=1",
        "data.train={class_path: net.batches, init_args: {count: 3}}",
    ],
)
def test_the_hash_of_another_training_is_another(project: Path, setting: str) -> None:
    assert load(project, setting).config_hash != load(project).config_hash


def test_steps_alone_are_another_training_than_steps_within_an_epoch(project: Path) -> None:
    alone = load(project, "trainer.max_steps=5")
    within = load(project, "trainer.max_steps=5", "trainer.max_epochs=1")
    assert alone.config_hash != within.config_hash


def test_the_record_of_a_run_has_the_whole_configuration_and_its_hash(project: Path) -> None:
    runs = project / "runs"
    training = load(project, f"trainer.runs={runs}", "seed=2", "hooks=[lr_monitor]")
    trainer = training.fit()
    manifest = hookline.open_run(trainer.run.path).manifest
    assert manifest["config_hash"] == training.config_hash
    assert manifest["config"]["model"] == {"class_path": "net.Net", "init_args": {"width": 4}}
    assert manifest["config"]["trainer"]["max_epochs"] == 1
    assert manifest["config"]["seed"] == manifest["seed"] == 2
    assert manifest["config"]["hooks"][0]["name"] == "lr_monitor"
    assert "include" not in manifest["config"]


# -- Python ---------------------------------------------------------------------------------------

SCRIPT = """
import torch
import hookline
import net

def make_trainer(lr=0.1, width=4, **more):
    model = net.Net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return hookline.get_trainer(
        "simple", model, net.batches(), optimizer, loss_fn=torch.nn.functional.mse_loss,
        progress="off", runs=None, **more,
    )

def with_loaders(val=False):
    model = net.Net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hookline.Trainer(
        {"progress": "off", "runs": None}, model, optimizer, loss_fn=torch.nn.functional.mse_loss
    )
    return (trainer, net.batches(3), net.batches()) if val else (trainer, net.batches(3))

def without_data():
    return with_loaders()[0]

def nothing():
    pass

def needs(lr):
    pass
"""


@pytest.fixture
def script(project: Path) -> str:
    (project / "script.py").write_text(SCRIPT)
    return str(project / "script.py")


def test_a_function_makes_the_training_with_settings_as_arguments(script: str) -> None:
    training = load_python(f"{script}:make_trainer", "lr=0.5", "width=3", "max_epochs=2")
    assert training.trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert training.fit().step == 4
    calls = [("make_trainer", "lr=0.5"), ("make_trainer", "lr=0.4"), ("with_loaders", "val=true")]
    hashes = {load_python(f"{script}:{name}", given).config_hash for name, given in calls}
    assert len(hashes) == 3


def test_a_function_may_return_loaders_beside_the_trainer(script: str) -> None:
    assert load_python(f"{script}:with_loaders").fit().step == 3
    trainer = load_python(f"{script}:with_loaders", "val=true").fit()
    assert trainer.validates


def test_a_function_of_a_module_is_found_from_the_folder(
    script: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert load_python("script:make_trainer").fit().step == 2


@pytest.mark.parametrize(
    ("target", "settings", "said"),
    [
        ("script.py:make_triner", [], "Did you mean 'make_trainer'?"),
        ("scrpt.py:make_trainer", [], "There is no file"),
        ("script.py:with_loaders", ["vall=1"], "Did you mean 'val'? The arguments are: val."),
        ("script.py:with_loaders", ["a.b=1"], "has no argument 'a.b'"),
        ("script.py:needs", [], "requires the argument 'lr'."),
        ("script.py:without_data", [], "a trainer without data"),
        ("script.py:nothing", [], "returned a NoneType; expected a Trainer"),
        ("json.py:loads", [], "another module 'json' is already imported"),
    ],
)
def test_functions_that_do_not_fit_are_a_clear_error(
    script: str, project: Path, target: str, settings: list[str], said: str
) -> None:
    (project / "json.py").write_text("")
    with pytest.raises(hookline.ConfigError) as caught:
        load_python(str(project / target), *settings)
    assert said in str(caught.value)


# -- resuming -------------------------------------------------------------------------------------


def test_a_run_that_its_time_limit_stopped_is_unfinished(project: Path) -> None:
    (project / "slow.py").write_text(
        "import time, hookline\n"
        "class Slow(hookline.Hook):\n"
        "    def on_step_end(self): time.sleep(0.05)\n"
    )
    more = (
        f"trainer: {{runs: {project / 'runs'}, max_epochs: 1000}}\n"
        "hooks: [slow.Slow, {name: time_limit, limit: 0.1}]\n"
    )
    training = load(project, more=more)
    assert training.fit().status == "stopped"
    found, _ = find_resume(load(project, more=more), NEWEST)
    assert found is not None
    assert found.parent.parent == training.trainer.run.path


# -- the schema -----------------------------------------------------------------------------------


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(one) for one in node.values()))
    return set().union(*(references(one) for one in node)) if isinstance(node, list) else set()


def test_the_schema_describes_every_section_and_every_option() -> None:
    schema = training_schema()
    for name, section in schema["properties"].items():
        assert section.get("description"), name
    names = {*TrainingConfig.model_fields, "$schema"}
    assert set(schema["properties"]) == names
    definitions = schema["$defs"]
    patience = definitions["early_stopping_options"]["properties"]["patience"]
    assert patience["description"]
    assert patience["default"] == 3
    assert patience["anyOf"][0]["type"] == "integer"
    assert patience["anyOf"][1] == {"$ref": "#/$defs/Reference"}
    mapping = definitions["HookConfig"]["anyOf"][1]
    rules = {one["if"]["properties"]["name"]["const"]: one["then"] for one in mapping["allOf"]}
    assert {"early_stopping", "clip_norm", "monitor"} <= set(rules)
    assert rules["early_stopping"]["additionalProperties"] is False
    assert {"patience", "every", "enabled", "as", "init_args"} <= set(
        rules["early_stopping"]["properties"]
    )
    for reference in references(schema):
        node: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_hookline_itself_imports_no_yaml_and_no_pydantic() -> None:
    script = (
        "import sys, hookline, hookline.config_files\n"
        "assert not {'yaml', 'pydantic', 'typer', 'torch'} & set(sys.modules)\n"
        "import hookline.config_files.loading\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- dry run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "metric", "override", "reason"),
    [
        ("{name: early_stopping}", "val/loss", "data.val=null", "give val_loaders to fit(), or"),
        (
            "{name: model_checkpoint, monitor: eval/loss, every_n_steps: 2}",
            *("eval/loss", "trainer.validate_every_epochs=null", "set one of them."),
        ),
    ],
)
def test_a_hook_without_the_validation_that_it_needs_is_an_error(
    project: Path, hook: str, metric: str, override: str, reason: str
) -> None:
    training = load(project, "data.val=net.batches", override, more=f"hooks:\n- {hook}\n")
    with pytest.raises(FileError) as error:
        dry_run(training)
    assert "more.yaml:3: hooks.0" in str(error.value)
    assert f"needs the metric '{metric}' of the validation" in str(error.value)
    assert reason in str(error.value)


def test_a_scheduler_without_the_validation_that_it_needs_is_an_error(project: Path) -> None:
    scheduler = "scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"
    with pytest.raises(hookline.TrainingError, match="ReduceLROnPlateau needs the metric 'val/lo"):
        dry_run(load(project, scheduler))
    assert dry_run(load(project, scheduler, "data.val=net.batches"))["schedulers"]


def test_a_hook_that_may_do_without_validation_passes(project: Path) -> None:
    options = ["{monitor: train/loss, check_on_train_epoch_end: true}", "{strict: false}"]
    for option in options:
        hook = f"{{name: early_stopping, init_args: {option}}}"
        assert dry_run(load(project, f"hooks=[{hook}]"))["val"] is None
    validated = load(project, "data.val=net.batches", "hooks=[early_stopping]")
    assert dry_run(validated)["val"] is not None


# -- name, tags, hparams --------------------------------------------------------------------------

LABELS = """
name: first try
tags: [small, mse]
hparams: {lr: 0.25, width: 3}
optimizer: {init_args: {lr: "${hparams.lr}"}}
"""


def test_a_file_names_its_run_and_gives_it_tags_and_hyperparameters(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Labelled(hookline.Trainer):
        def __init__(
            self, *args: Any, name: Any = None, tags: Any = (), hparams: Any = None, **options: Any
        ) -> None:
            seen.update(name=name, tags=tags, hparams=hparams)
            super().__init__(*args, **options)

    monkeypatch.setattr("hookline.config_files.building.Trainer", Labelled)
    training = load(project, more=LABELS)
    assert seen == {
        "name": "first try",
        "tags": ["small", "mse"],
        "hparams": {"lr": 0.25, "width": 3},
    }
    assert training.trainer.optimizer.param_groups[0]["lr"] == 0.25
    assert training.config["hparams"] == {"lr": 0.25, "width": 3}
    renamed = load(project, "name=second", "tags=[]", more=LABELS)
    assert renamed.config_hash == training.config_hash
    assert load(project, "hparams.width=4", more=LABELS).config_hash != training.config_hash
