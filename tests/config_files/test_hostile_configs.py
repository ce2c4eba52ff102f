"""Config files of strangers: `hookline check` runs none of their code, and prints one message."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import call_hookline
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import HooklineError
from hookline.config_files import load_training

PROJECT = """
import subprocess
import types
import torch

tools = types.SimpleNamespace(subprocess=subprocess)

class Net(torch.nn.Linear):
    subprocess = subprocess
    def __init__(self, width=2):
        super().__init__(2, width)

def batches():
    return [(torch.ones(2, 2), torch.ones(2, 2))]
"""

VALID: dict[str, Any] = {
    "model": "net.Net",
    "data": {"train": "net.batches"},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "loss_fn": "torch.nn.functional.mse_loss",
    "trainer": {"runs": None, "progress": "off", "max_epochs": 1},
}

MARKING = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """End a command that hangs, with a traceback of where."""

    def hang(*_: Any) -> None:
        raise AssertionError("It hangs.")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Stranger:
    """A project's folder, and beside it a folder with a stranger's files."""

    def __init__(self, folder: Path) -> None:
        self.project, self.downloads = folder / "project", folder / "downloads"
        self.marker = folder / "marker"
        for one in (self.project, self.downloads):
            one.mkdir()
            (one / "net.py").write_text(PROJECT)
        self.touch = f"touch {self.marker}"

    def write(self, text: str | bytes, name: str = "train.yaml") -> list[str]:
        """Write a file in the project's folder; return the arguments of `check`."""
        (self.project / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return [name]

    def config(self, **sections: Any) -> list[str]:
        """Write a valid file in which these sections are others."""
        return self.write(json.dumps(VALID | sections))

    def downloaded(self, **sections: Any) -> list[str]:
        """Write the same in the stranger's folder."""
        (self.downloads / "train.yaml").write_text(json.dumps(VALID | sections))
        return ["../downloads/train.yaml"]

    def calling(self, path: str, /, **arguments: Any) -> list[str]:
        """Write a file whose model is this class."""
        return self.config(model={"class_path": path, "init_args": arguments})


Attack = Callable[[Stranger], list[str]]
ATTACKS: dict[str, tuple[Attack, str]] = {}


def attack(message: str) -> Callable[[Attack], Attack]:
    """Register an attack with a part of the message that answers it."""

    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__] = function, message
        return function

    return register


def check(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run `hookline check`; return the exit code and what it printed."""
    return call_hookline("check", *arguments, cwd=folder)


def test_the_file_that_is_changed_here_is_valid(tmp_path: Path) -> None:
    stranger = Stranger(tmp_path)
    code, output = check(stranger.project, *stranger.config())
    assert (code, output.split()[-1]) == (0, "OK"), output


# -- code -----------------------------------------------------------------------------------------

NOT_TRUSTED = "is not trusted"


@attack(NOT_TRUSTED)
def command_of_collect_env(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.utils.collect_env.run", command=stranger.touch)


@attack(NOT_TRUSTED)
def pickle_with_torch_load(stranger: Stranger) -> list[str]:
    class Evil:
        def __reduce__(self) -> Any:
            return subprocess.getoutput, (stranger.touch,)

    (stranger.project / "evil.pt").write_bytes(pickle.dumps(Evil()))
    return stranger.calling("torch.load", f="evil.pt", weights_only=False)


@attack(NOT_TRUSTED)
def library_with_torch_ops(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.ops.load_library", path="evil.so")


@attack(NOT_TRUSTED)
def repository_with_torch_hub(stranger: Stranger) -> list[str]:
    code = MARKING.format(str(stranger.marker)) + "def evil(): pass\n"
    (stranger.downloads / "hubconf.py").write_text(code)
    folder = str(stranger.downloads)
    return stranger.calling("torch.hub.load", repo_or_dir=folder, model="evil", source="local")


@attack(NOT_TRUSTED)
def process_of_torch_elastic(stranger: Stranger) -> list[str]:
    path = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"
    arguments = {"entrypoint": "touch", "args": [str(stranger.marker)], "env": {}}
    rest = {"stdout": None, "stderr": None, "local_rank_id": 0, "numa_options": None}
    return stranger.calling(path, **arguments, **rest)


@attack(NOT_TRUSTED)
def script_with_torch_jit(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.jit.load", f="evil.pt")


@attack(NOT_TRUSTED)
def archive_with_torch_package(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.package.PackageImporter", file_or_buffer="evil.pt")


@attack(NOT_TRUSTED)
def compiler_of_cpp_extensions(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.utils.cpp_extension.load", name="evil", sources=["evil.cpp"])


@attack(NOT_TRUSTED)
def file_that_a_datapipe_opens(stranger: Stranger) -> list[str]:
    path = "torch.utils.data.datapipes.iter.FileOpener"
    opener = {"class_path": path, "init_args": {"datapipe": ["/etc/passwd"], "mode": "rb"}}
    return stranger.config(data={"train": opener})


@attack(NOT_TRUSTED)
def loader_of_hookline(stranger: Stranger) -> list[str]:
    return stranger.calling("hookline.open_run", path="evil")


@attack(NOT_TRUSTED)
def training_within_a_training(stranger: Stranger) -> list[str]:
    return stranger.calling("hookline.config_files.load_training", path="evil.yaml")


@attack("has no module")
def importer_of_hookline(stranger: Stranger) -> list[str]:
    return stranger.calling("hookline.config.hook_names.load_object", path="os.system")


@attack(NOT_TRUSTED)
def importer_within_functional(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.nn.functional.boolean_dispatch", arg_name="x")


@attack("os")
def module_that_a_module_of_torch_imports(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.utils.data.dataloader.os.system", command=stranger.touch)


@attack("torch.nn.modules.module.torch")
def torch_within_a_module_of_torch(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.nn.modules.module.torch.load", f="evil.pt")


@attack("imported there")
def module_that_the_project_imports(stranger: Stranger) -> list[str]:
    return stranger.calling("net.subprocess.getoutput", cmd=stranger.touch)


@attack("imported there")
def module_that_a_class_of_the_project_has(stranger: Stranger) -> list[str]:
    return stranger.calling("net.Net.subprocess.getoutput", cmd=stranger.touch)


@attack("imported there")
def module_that_an_object_of_the_project_has(stranger: Stranger) -> list[str]:
    return stranger.calling("net.tools.subprocess.getoutput", cmd=stranger.touch)


def item_of(wrapped: dict[str, Any], attribute: str, key: str) -> dict[str, Any]:
    """Return an object that is `getattr(wrapped, attribute)[key]`, by means of torch.nn."""
    wrapper = {"cpp_module": wrapped, "attr": attribute}
    owner = {"class_path": "torch.nn.cpp.OrderedDictWrapper", "init_args": wrapper}
    return {"class_path": "torch.nn.ParameterDict.get", "init_args": {"self": owner, "key": key}}


@attack(NOT_TRUSTED)
def globals_by_methods_of_torch(stranger: Stranger) -> list[str]:
    method = "torch.utils.data.DataLoader.check_worker_number_rationality"
    os_module = item_of({"class_path": method, "call": False}, "__globals__", "os")
    options = {"dataset": [stranger.touch], "batch_size": None}
    options["collate_fn"] = item_of(os_module, "__dict__", "system")
    loader = {"class_path": "torch.utils.data.DataLoader", "init_args": options}
    return stranger.config(data={"train": loader})


@attack(NOT_TRUSTED)
def method_with_any_self(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.nn.ParameterDict.get", self={"a": "x"}, key="a")


@attack("begins with '__'")
def globals_of_a_function(stranger: Stranger) -> list[str]:
    return stranger.calling("torch.nn.Linear.__init__.__globals__.get", key="torch")


@attack(NOT_TRUSTED)
def function_that_is_passed_on(stranger: Stranger) -> list[str]:
    collate = {"class_path": "subprocess.getoutput", "call": False}
    dataset = {"class_path": "torch.utils.data.TensorDataset"}
    return stranger.config(data={"train": {**dataset, "loader": {"collate_fn": collate}}})


@attack(NOT_TRUSTED)
def hook_of_another_package(stranger: Stranger) -> list[str]:
    return stranger.config(hooks=[{"class_path": "antigravity.Hook"}])


@attack(NOT_TRUSTED)
def hook_class_of_the_trainer(stranger: Stranger) -> list[str]:
    return stranger.config(trainer={"hooks": {"hook_classes": ["antigravity.Hook"]}})


def marked_module(stranger: Stranger, name: str) -> None:
    (stranger.downloads / f"{name}.py").write_text(MARKING.format(str(stranger.marker)))


@attack("not in the project")
def module_beside_a_downloaded_file(stranger: Stranger) -> list[str]:
    marked_module(stranger, "evil")
    return stranger.downloaded(model="evil.Net")


@attack("torch.optim.SGDD")
def module_of_a_name_that_torch_imports(stranger: Stranger) -> list[str]:
    for name in ("numpy", "pdb", "tensorboard", "sympy", "this"):
        marked_module(stranger, name)
    return stranger.downloaded(optimizer="torch.optim.SGDD", hooks=[])


@attack(NOT_TRUSTED)
def installed_module_without_trust(stranger: Stranger) -> list[str]:
    return stranger.config(model="idlelib.idle.Net")


@attack("antigravity.fly")
def plug_in_beside_a_downloaded_file(stranger: Stranger) -> list[str]:
    metadata = stranger.downloads / "evil-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hookline.hooks]\nevil = antigravity:fly\n")
    return stranger.downloaded(model="antigravity.fly")


@attack("--trust")
def trust_in_the_file(stranger: Stranger) -> list[str]:
    model = {"class_path": "subprocess.getoutput", "init_args": {"cmd": stranger.touch}}
    return stranger.config(trust=["subprocess", "*"], model=model)


@attack("HOOKLINE_TRUST")
def trust_in_an_included_file(stranger: Stranger) -> list[str]:
    stranger.write("trust: ['*']\n", "more.yaml")
    model = {"class_path": "subprocess.getoutput", "init_args": {"cmd": stranger.touch}}
    return stranger.config(include="more.yaml", model=model)


@attack(NOT_TRUSTED)
def trust_in_a_downloaded_pyproject(stranger: Stranger) -> list[str]:
    (stranger.downloads / "pyproject.toml").write_text('[tool.hookline]\ntrust = ["*"]\n')
    model = {"class_path": "subprocess.getoutput", "init_args": {"cmd": stranger.touch}}
    return stranger.downloaded(model=model)


# -- includes -------------------------------------------------------------------------------------


@attack("bytes")
def includes_that_fan_out(stranger: Stranger) -> list[str]:
    for level in range(8):
        names = [f"level_{level + 1}.yaml"] * 8
        stranger.write(json.dumps({"include": names}), f"level_{level}.yaml")
    stranger.write("{}", "level_8.yaml")
    return ["level_0.yaml"]


@attack("more than 10 levels")
def includes_in_a_long_chain(stranger: Stranger) -> list[str]:
    for i in range(1500):
        stranger.write(f"include: chain_{i + 1}.yaml\n", f"chain_{i}.yaml")
    stranger.write("{}", "chain_1500.yaml")
    return ["chain_0.yaml"]


@attack("include each other")
def include_of_itself(stranger: Stranger) -> list[str]:
    return stranger.config(include="./../project/train.yaml")


@attack("a FIFO")
def include_of_a_fifo(stranger: Stranger) -> list[str]:
    os.mkfifo(stranger.project / "fifo.yaml")
    return stranger.config(include="fifo.yaml")


@attack("a FIFO")
def fifo_as_the_file(stranger: Stranger) -> list[str]:
    os.mkfifo(stranger.project / "fifo.yaml")
    return ["fifo.yaml"]


@attack("a symbolic link")
def include_of_a_link_to_a_device(stranger: Stranger) -> list[str]:
    (stranger.project / "zero.yaml").symlink_to("/dev/zero")
    return stranger.config(include="zero.yaml")


@attack("a device")
def link_to_a_device_as_the_file(stranger: Stranger) -> list[str]:
    (stranger.project / "zero.yaml").symlink_to("/dev/zero")
    return ["zero.yaml"]


@attack("outside of the project")
def include_of_a_secret(stranger: Stranger) -> list[str]:
    (stranger.downloads / "secret.json").write_text('{"sesame": "hunter2"}')
    return stranger.config(include="../downloads/secret.json")


@attack("outside of the project")
def include_by_an_absolute_path(stranger: Stranger) -> list[str]:
    (stranger.downloads / "secret.json").write_text('{"sesame": "hunter2"}')
    return stranger.config(include=str(stranger.downloads / "secret.json"))


@attack("outside of the project")
def include_through_a_link_of_a_folder(stranger: Stranger) -> list[str]:
    (stranger.downloads / "secret.json").write_text('{"sesame": "hunter2"}')
    (stranger.project / "link").symlink_to(stranger.downloads)
    return stranger.config(include="link/secret.json")


@attack("include")
def include_of_names_that_no_file_has(stranger: Stranger) -> list[str]:
    names = ["a\0b.yaml", "x" * 100_000 + ".yaml", "\ud800.yaml", "https://example.com/x.yaml", "."]
    return stranger.config(include=names)


# -- sizes ----------------------------------------------------------------------------------------


@attack("more than 20,000 values")
def sixty_thousand_unknown_keys(stranger: Stranger) -> list[str]:
    return stranger.write(json.dumps(VALID | {f"key_{i}": i for i in range(60_000)}))


@attack("problems")
def unknown_keys(stranger: Stranger) -> list[str]:
    return stranger.write(json.dumps(VALID | {f"key_{i}": i for i in range(5_000)}), "train.json")


@attack("problems")
def unknown_arguments(stranger: Stranger) -> list[str]:
    return stranger.calling("net.Net", **{f"argument_{i}": i for i in range(5_000)})


@attack("problems")
def unknown_modules(stranger: Stranger) -> list[str]:
    within = [{"class_path": f"module_{i}.Net"} for i in range(3_000)]
    return stranger.calling("net.Net", width=within)


@attack("problems")
def unknown_references(stranger: Stranger) -> list[str]:
    keys = {f"key_{i}": f"${{kye_{i}}}" for i in range(3_000)}
    return stranger.config(hparams=keys)


@attack("more than")
def file_of_five_megabytes(stranger: Stranger) -> list[str]:
    return stranger.write("#" * 5_000_000)


@attack("more than")
def includes_of_five_megabytes_together(stranger: Stranger) -> list[str]:
    for i in range(12):
        stranger.write(json.dumps({"hparams": {f"text_{i}": "x" * 450_000}}), f"part_{i}.json")
    return stranger.config(include=[f"part_{i}.json" for i in range(12)])


@attack("more than")
def aliases_that_multiply(stranger: Stranger) -> list[str]:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    return stranger.write("\n".join(lines))


@attack("not supported")
def merge_keys_that_multiply(stranger: Stranger) -> list[str]:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 30)]
    return stranger.write("\n".join([*lines, *(f"c{i}: *a29" for i in range(9_000))]))


@attack("not supported")
def merge_key_of_itself(stranger: Stranger) -> list[str]:
    return stranger.write("a: &a {<<: *a}\n")


@attack("more than 40 levels")
def brackets(stranger: Stranger) -> list[str]:
    return stranger.write("a: " + "[" * 300_000)


@attack("more than")
def lists_of_numbers(stranger: Stranger) -> list[str]:
    return stranger.write("a: [" + "1," * 300_000 + "]")


@attack("more than")
def numbers_in_json(stranger: Stranger) -> list[str]:
    return stranger.write('{"hparams": {"a": [' + "1," * 1_500_000 + "1]}}", "train.json")


@attack("Not valid TOML")
def list_that_is_not_closed_in_toml(stranger: Stranger) -> list[str]:
    return stranger.write("a = [\n" + "1,\n" * 100_000, "train.toml")


@attack("more than")
def keys_in_toml(stranger: Stranger) -> list[str]:
    return stranger.write("".join(f"k{i} = 1\n" for i in range(30_000)), "train.toml")


@attack("more than")
def list_in_toml(stranger: Stranger) -> list[str]:
    return stranger.write("a = [\n" + "1,\n" * 100_000 + "]\n", "train.toml")


@attack("Not valid TOML")
def mistake_at_the_end_of_toml(stranger: Stranger) -> list[str]:
    text = "".join(f"[table_{i}]\n" for i in range(8_000)) + 'a = """\n' + "x\n" * 50_000
    return stranger.write(text, "train.toml")


@attack("more than 40 levels")
def dots_in_toml(stranger: Stranger) -> list[str]:
    return stranger.write("a." * 200_000 + "b = 1\n", "train.toml")


@attack("digits")
def integer_of_many_digits(stranger: Stranger) -> list[str]:
    return stranger.write(f"seed: {'1' * 10_000}\n")


@attack("digits")
def hexadecimal_of_many_digits(stranger: Stranger) -> list[str]:
    text = json.dumps(VALID)[:-1] + ', "hparams": {"a": 0x' + "f" * 200_000 + "}}"
    return stranger.write(text)


@attack("digits")
def hexadecimal_of_many_digits_in_toml(stranger: Stranger) -> list[str]:
    return stranger.write("seed = 0x" + "f" * 200_000, "train.toml")


@attack("limit")
def integer_of_many_digits_in_json(stranger: Stranger) -> list[str]:
    return stranger.write('{"seed": ' + "1" * 10_000 + "}", "train.json")


@attack("seed")
def number_beyond_floats(stranger: Stranger) -> list[str]:
    return stranger.write("seed: 1e999999\n")


@attack("more than")
def references_that_multiply_text(stranger: Stranger) -> list[str]:
    keys = {"a0": "x" * 1_000}
    keys |= {f"a{i}": f"${{hparams.a{i - 1}}}" * 9 for i in range(1, 4)}
    return stranger.config(hparams=keys | {f"b{i}": "${hparams.a3}!" for i in range(10_000)})


@attack("Unknown key")
def key_of_a_long_name(stranger: Stranger) -> list[str]:
    return stranger.write(json.dumps(VALID | {"k" * 200_000: 1}), "train.json")


@attack("occurs twice")
def long_duplicate_key(stranger: Stranger) -> list[str]:
    key = json.dumps("k" * 200_000)
    return stranger.write(f"{{{key}: 1, {key}: 2}}", "train.json")


@attack("seed")
def value_of_many_letters(stranger: Stranger) -> list[str]:
    return stranger.config(seed="x" * 200_000)


@attack("xxx")
def class_path_of_a_long_name(stranger: Stranger) -> list[str]:
    return stranger.config(model="x" * 100_000 + ".Net")


@attack("class_path")
def class_path_of_many_parts(stranger: Stranger) -> list[str]:
    return stranger.config(model="net" + ".Net" * 200_000)


@attack("Unknown hook")
def hook_of_a_long_name(stranger: Stranger) -> list[str]:
    return stranger.config(hooks=["x" * 200_000])


@attack("Unknown tag")
def tag_of_a_long_name(stranger: Stranger) -> list[str]:
    return stranger.write("a: !" + "x" * 200_000 + " 1\n")


# -- letters --------------------------------------------------------------------------------------


@attack("UTF-8")
def bytes_that_are_no_text(stranger: Stranger) -> list[str]:
    return stranger.write(b"model: \xff\xfe\x00\n")


@attack("not allowed")
def null_bytes(stranger: Stranger) -> list[str]:
    return stranger.write(b"model: \x00\n")


@attack(r"\x1b[2J")
def escape_sequences_in_a_key(stranger: Stranger) -> list[str]:
    keys = {"\x1b[2J\x1b]0;owned\x07": 1, "\u202eyek": 1, "a\nhookline: OK": 1}
    return stranger.write(json.dumps(VALID | keys), "train.json")


@attack("surrogate pair")
def lone_surrogates(stranger: Stranger) -> list[str]:
    keys = {"\ud800": "\udfff"}
    return stranger.write(json.dumps(VALID | keys), "train.json")


# -- overrides ------------------------------------------------------------------------------------


@attack("40")
def override_of_many_parts(stranger: Stranger) -> list[str]:
    return [*stranger.config(), "hparams" + ".a" * 20_000 + "=1"]


@attack("not a valid override")
def override_of_no_parts(stranger: Stranger) -> list[str]:
    return [*stranger.config(), "..=1"]


@attack("hooks")
def override_of_a_large_index(stranger: Stranger) -> list[str]:
    return [*stranger.config(hooks=[]), "hooks[99999999999999999999]=1"]


@attack("--trust")
def override_of_trust(stranger: Stranger) -> list[str]:
    return [*stranger.config(), "trust=['*']"]


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_file_is_answered_with_one_message(tmp_path: Path, name: str) -> None:
    stranger = Stranger(tmp_path)
    attack_file, message = ATTACKS[name]
    code, output = check(stranger.project, *attack_file(stranger))
    assert code in (1, 2), output[-3000:]
    assert len(output) < 10_000
    assert "Traceback" not in output
    assert "For the traceback" not in output  # of an unexpected error
    assert not stranger.marker.exists()
    for text in ("\x1b", "\u202e", "hunter2"):
        assert text not in output
    assert message in output


# -- anything -------------------------------------------------------------------------------------


def test_a_package_is_trusted_on_the_command_line(tmp_path: Path) -> None:
    stranger = Stranger(tmp_path)
    arguments = stranger.config(loss_fn={"class_path": "math.dist"})
    code, output = check(stranger.project, *arguments, "--trust", "math")
    assert (code, "With a batch of data.train" in output) == (1, True), output  # it was called


fuzzed = settings(max_examples=100, deadline=None, derandomize=True, database=None)
PIECES = (
    *(b"include", b"model", b": ", b"\n", b"  ", b"- ", b"{", b"}", b"[", b"]", b"'", b'"', b","),
    *(b"&a", b"*a", b"<<", b"${", b"= ", b'"""', b"\0", b"\xff", b"1", b"e9", b"!!", b"#"),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("fuzz"))


def load_any(stranger: Stranger, contents: bytes, name: str) -> None:
    """Load a file; any error has a short message."""
    (file := stranger.project / name).write_bytes(contents)
    message = ""
    try:
        load_training(file, project=stranger.project)
    except HooklineError as error:
        message = str(error)
    assert len(message.encode()) < 40_000  # which fails for lone surrogates
    assert not stranger.marker.exists()


@fuzzed
@given(
    suffix=st.sampled_from(["yaml", "toml", "json"]),
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=4), max_size=40),
)
def test_any_bytes_are_an_error_with_a_message(
    shared: Stranger, suffix: str, pieces: list[bytes]
) -> None:
    load_any(shared, b"".join(pieces), f"any.{suffix}")


PATHS = (
    *("torch", "nn", "utils", "data", "optim", "functional", "hookline", "hooks", "net", "os"),
    *("Linear", "load", "system", "subprocess", "getoutput", "modules", "module", "dataloader"),
    *("Net", "__init__", "__globals__", "", "_C", "runs", "probes", "Module", "Any", "ops"),
)


@fuzzed
@given(
    parts=st.lists(st.sampled_from(PATHS), min_size=1, max_size=5),
    arguments=st.dictionaries(
        st.sampled_from(["path", "f", "cmd", "command", "name", "in_features"]),
        st.sampled_from(["evil", 3, None]),
        max_size=2,
    ),
)
def test_any_class_path_calls_only_what_is_trusted(
    shared: Stranger, parts: list[str], arguments: dict[str, Any]
) -> None:
    arguments = {
        key: shared.touch if value == "evil" else value for key, value in arguments.items()
    }
    model = {"class_path": ".".join(parts), "init_args": arguments}
    load_any(shared, json.dumps(VALID | {"model": model}).encode(), "path.json")
