"""Secrets: found in no record, log, output or error text of real trainings."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import runpy
import stat
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from loops import batches, make
from warm_processes import WarmParent

import hookline
from hookline.cli.app import main
from hookline.config_files import load_training
from hookline.runs import Run
from hookline.runs.jsonable import config_hash
from hookline.runs.restart import find_unfinished_run

# Each place that a secret can come from, by the name of the secret in it.
NAMES = (
    *("token", "access_key", "secret_access_key", "private_key", "api_key", "openaiApiKey"),
    *("auth", "authorization", "passphrase", "pwd", "password", "dsn", "cookie", "credential"),
    *("credentials", "wandb_key", "hf_token", "HF-Token", "hfToken", "slack_webhook_url"),
    *("client-secret", "PGPASSWORD", "webhook", "x-api-key", "AWS_SESSION_TOKEN", "auth_tokens"),
)
URLS = {
    "user info": "https://bob:{}@host/x",
    "user only": "https://{}@github.com/a/b.git",
    "postgres": "postgresql://bob:{}@host:5432/db",
    "redis": "redis://:{}@host:6379/0",
    "mongodb": "mongodb+srv://bob:{}@host/db?w=1",
    "s3": "s3://key:{}@bucket/x",
    "amazon": "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature={}",
    "azure": "https://a.blob.core.windows.net/c?sv=1&sig={}",
    "google": "https://storage.googleapis.com/b?X-Goog-Signature={}&x=1",
    "key": "https://host/?key={}",
    "account": "AccountName=a;AccountKey={};EndpointSuffix=x",
    "last field": "Server=a;User Id=b;Password={}",
    "slack": "https://hooks.slack.com/services/T0/{}",
}
VARIABLES = ("MY_API_TOKEN", "WANDB_API_KEY", "DATABASE_DSN", "FTP_PASSWORD")
ARGUMENTS = ("hparams.api_key", "hparams.nested", "model.init_args.password", "hooks.3.url")
OTHERS = ("heartbeat", "notification", "declared", "python option", "python value")


SECRETS = {
    place: f"s{i:02}-{1234567 * (i + 3):x}-Zq"
    for i, place in enumerate(
        (
            *(f"name {name}" for name in NAMES),
            *(f"url {name}" for name in URLS),
            *(f"variable {name}" for name in VARIABLES),
            *(f"argument {name}" for name in ARGUMENTS),
            *OTHERS,
        )
    )
}
HARMLESS: dict[str, Any] = {
    "tokens": 5,
    "tokens_seen": 3,
    "max_tokens": 7,
    "num_tokens": 9,
    "pad_token_id": 2,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "tokenizer": "gpt2-harmless",
    "author": "Ada Lovelace",
    "authenticated": True,
    "auth": False,
    "password": None,
    "token": "",
    "key": "an ordinary key",
    "sort_key": "length",
    "monitor": "val/loss",
    "forward_pass": "second",
    "password_file": "/run/a/file",
    "address": "https://host:8080/@user?page=2&author=x",
    "text": "The loss per token = 5, the option 'token': required",
}

PROJECT = """
import os
import torch
import hookline

class Net(torch.nn.Linear):
    def __init__(self, width, password=None, **options):
        super().__init__(8, width)

def batches():
    return [(torch.ones(2, 8), torch.ones(2, 4)) for _ in range(3)]

class Leaky(hookline.Hook):
    "A hook whose errors contain all it knows."
    secret_options = frozenset({"endpoint"})
    critical = bool(os.environ.get("CRITICAL"))

    def __init__(self, endpoint, known, options=None, urls=None):
        self.endpoint, self.known, self.urls = endpoint, known, urls

    def on_step_end(self, step, run):
        run.log(step, 0, "note", f"with {os.environ['MY_API_TOKEN']}", "text")
        run.event("custom", api_key=self.known[0], note=" ".join(self.known))
        raise RuntimeError(f"no answer from {self.endpoint} {self.urls} with {self.known}")
"""


def _config() -> dict[str, Any]:
    named = {name: SECRETS[f"name {name}"] for name in NAMES}
    urls = {name: url.format(SECRETS[f"url {name}"]) for name, url in URLS.items()}
    closed = "http://127.0.0.1:9/"
    return {
        "model": {"class_path": "project.Net", "init_args": {"width": 4, "settings": named}},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "data": {"train": {"class_path": "project.batches"}},
        "loss_fn": {"class_path": "torch.nn.functional.mse_loss"},
        "hparams": {
            **named,
            "list": [{"deeper": named}, list(urls.values())],
            "by reference": ["${MY_API_TOKEN}", "a ${WANDB_API_KEY} within", "${DATABASE_DSN}"],
            "harmless": HARMLESS,
        },
        "trainer": {"runs": "runs", "progress": "off", "max_steps": 3},
        "hooks": [
            {"name": "heartbeat", "url": f"{closed}{SECRETS['heartbeat']}"},
            {"name": "notification", "webhook_url": f"{closed}{SECRETS['notification']}"},
            {
                "class_path": "project.Leaky",
                "endpoint": f"{closed}{SECRETS['declared']}",
                "known": [*named.values(), "${MY_API_TOKEN}", "${FTP_PASSWORD}"],
                "options": named,
                "urls": urls,
            },
            {"name": "heartbeat", "as": "another", "url": closed},
        ],
    }


def _arguments() -> list[str]:
    given = {place: SECRETS[f"argument {place}"] for place in ARGUMENTS}
    return [
        f"hparams.api_key={given['hparams.api_key']}",
        f"hparams.nested={{auth: {given['hparams.nested']}, other: 1}}",
        f"model.init_args.password='{given['model.init_args.password']}'",
        f"hooks.3.url=http://127.0.0.1:9/{given['hooks.3.url']}",
    ]


LOOP = """
import logging, os, sys
sys.path.insert(0, ".")
import torch
import hookline
from project import Leaky, batches

logging.basicConfig(level=logging.DEBUG)
option, value = sys.argv[2], os.environ["VALUE"]

class Client(hookline.Hook):
    secret_options = {"url"}
    def __init__(self, url):
        self.url = url
    def on_step_end(self, step):
        raise ConnectionError(f"Max retries exceeded with url: {self.url}")

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hooks = [Client(f"http://127.0.0.1:9/{value}"), hookline.Heartbeat(url=f"http://127.0.0.1:9/{value}")]
config = {"api_key": option, "nested": [{"hfToken": option}]}
with hookline.attach(model, optimizer, hooks=hooks, runs="runs", config=config) as session:
    for x, y in batches():
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(session.hooks.describe())
    print(session.hooks.summary())
"""


def run_with_secrets(folder: str, *command: str) -> None:
    """Run a command in a process of its own, with secrets in its environment."""
    os.chdir(folder)
    for name in VARIABLES:
        os.environ[name] = SECRETS[f"variable {name}"]
    os.environ["VALUE"] = SECRETS["python value"]
    if "--debug" in command:
        os.environ["CRITICAL"] = "1"
    sys.argv = list(command)
    if command[0] == "hookline":
        main()
    else:
        runpy.run_path(command[0], run_name="__main__")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that trainings with all these secrets leave behind, by where it was found."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "project.py").write_text(PROJECT)
    (folder / "train.yaml").write_text(yaml.safe_dump(_config(), sort_keys=False))
    (folder / "loop.py").write_text(LOOP)
    commands = {
        "train": ["hookline", "train", "train.yaml", *_arguments()],
        "check": ["hookline", "check", "train.yaml", *_arguments(), "--json"],
        "failed": ["hookline", "--debug", "train", "train.yaml", *_arguments()],
        "loop": ["loop.py", "--wandb_key", SECRETS["python option"]],
    }
    with WarmParent() as parent:
        started = {
            name: parent.start(run_with_secrets, folder, *command, log=folder / f"{name}.log")
            for name, command in commands.items()
        }
        codes = {name: process.wait(180) for name, process in started.items()}
    found = {name: process.output for name, process in started.items()}
    assert codes == {**dict.fromkeys(commands, 0), "failed": 1}, found
    assert "failed in Leaky.on_step_end" in found["train"]
    assert "HookFailedError" in found["failed"]
    assert "could not be sent" in found["train"]
    assert "Max retries exceeded" in found["loop"]
    files = [file for file in (folder / "runs").rglob("*") if file.is_file()]
    found |= {str(file.relative_to(folder)): file.read_text(errors="replace") for file in files}
    manifests = [name for name in found if name.endswith("manifest.json")]
    assert len(manifests) >= 3
    return found


@pytest.mark.parametrize("place", SECRETS)
def test_a_secret_is_found_nowhere(texts: dict[str, str], place: str) -> None:
    secret = SECRETS[place]
    assert [name for name, text in texts.items() if secret in text] == []


def test_harmless_values_stay_as_they_are(texts: dict[str, str]) -> None:
    manifests = [json.loads(text) for name, text in texts.items() if name.endswith("manifest.json")]
    configs = [one["config"] for one in manifests if "model" in one.get("config", {})]
    assert len(configs) == 2
    for config in configs:
        assert config["hparams"]["harmless"] == HARMLESS
        assert config["hparams"]["by reference"] == ["***", "a *** within", "***"]
        assert config["hooks"][2]["endpoint"] == "***"
    versions = manifests[0]["packages"]
    assert "***" not in versions.values()
    assert "***" not in str(manifests[0]["versions"])


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hooks.0.timeout", {"password": "hush-hush-1"}),
        ("hooks.0.webhook_url", ["hush-hush-1"]),
        ("model.init_args.api_key", ["hush-hush-1"]),
        ("model.init_args.token", {"a": "hush-hush-1"}),
        ("model.init_args.width", "https://bob:hush-hush-1@host"),
        ("trainer.seed", {"token": "hush"}),
        ("trainer.max_steps", "https://bob:hush@host/"),
        ("optimizer.password", "hush"),
        ("trainer", [{"api_key": "hush"}]),
        ("hooks", {"loop": {"webhook_url": "hush"}}),
        ("include", "https://bob:hush@host/x.yaml"),
        ("hparams.password", "a${hush b}"),
        ("hparams.password", "a${hush}"),
    ],
)
def test_an_error_in_a_config_file_does_not_show_a_secret(
    tmp_path: Path, key: str, value: Any
) -> None:
    (tmp_path / "typed_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, width: int, api_key: str = '', token: str = ''):\n"
        "        super().__init__(8, width)\n"
    )
    config: dict[str, Any] = {
        "model": {"class_path": "typed_net.Net", "init_args": {"width": 4}},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "data": {"train": {"class_path": "torch.ones", "init_args": {"size": [2]}}},
        "trainer": {},
        "hooks": [{"name": "notification", "webhook_url": "http://127.0.0.1:9/"}],
    }
    overrides = [f"{key}={json.dumps(value)}"]
    if key == "include":
        config, overrides = config | {key: value}, []
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(hookline.ConfigError) as error:
        load_training(tmp_path / "train.yaml", *overrides, project=tmp_path, trust=["torch.ones"])
    _assert_not_shown("hush", error.value)


@pytest.mark.parametrize("value", ["*hush", "!hush x", "'hush", "[hush", "!!int hush", "hush: x"])
def test_an_error_of_syntax_does_not_show_a_secret(tmp_path: Path, value: str) -> None:
    (tmp_path / "train.yaml").write_text(f"hparams:\n  password: {value}\n")
    with pytest.raises(hookline.ConfigError) as error:
        load_training(tmp_path / "train.yaml")
    _assert_not_shown("hush", error.value)


@pytest.mark.parametrize(
    "text",
    ["api_key=[hush", "hparams={api_key: [hush, b}", "hparams={pwd: a hush", "auth=hush: x: y"],
)
def test_an_invalid_override_does_not_show_a_secret(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.yaml").write_text("seed: 1\n")
    with pytest.raises(hookline.ConfigError) as error:
        load_training(tmp_path / "train.yaml", text)
    _assert_not_shown("hush", error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["hparams={auth: two hush words}"],
        ["hparams={api_key: [hush, x]}"],
        ["hparams={a: {pwd:  !!str hush}, b: 1}"],
        ["hparams.api_key =hush"],
        ["'hparams.api_key'=hush"],
        ['--data={"password": ["hush"]}'],
        ["--token", "-hush"],
        ['{"password": "hush"}'],
        ['{"a": 1, "password": "x=hush"}'],
        ["Authorization: Token hush"],
    ],
)
def test_an_argument_of_the_command_line(arguments: list[str]) -> None:
    from hookline.masking import mask_arguments

    masked = mask_arguments([*arguments, "lr=1"])
    assert "hush" not in str(masked)
    assert masked[-1] == "lr=1"


def _assert_not_shown(secret: str, error: BaseException | None) -> None:
    while error is not None:
        assert secret not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class _Typed(hookline.NotificationHook):
    secret_options = frozenset({"webhook_url", "prefix"})


@pytest.mark.parametrize(
    "make_error",
    [
        lambda: hookline.NotificationHook(["hush-hush-3"]),  # type: ignore[arg-type]
        lambda: hookline.Heartbeat(url=5 * ["hush"]),  # type: ignore[arg-type]
        lambda: _Typed("http://127.0.0.1:9/", prefix=["hush"]),  # type: ignore[arg-type]
        lambda: hookline.Heartbeat(every_seconds={"token": "hush"}),  # type: ignore[arg-type]
        lambda: hookline.TrainerConfig(seed={"token": "hush"}),  # type: ignore[arg-type]
        lambda: hookline.HookRegistry([{"name": "heartbeat", "init_args": ["https://a:hush@b"]}]),
        lambda: hookline.HookRegistry({"loop": {"webhook_url": "hush"}}),
    ],
)
def test_a_type_error_does_not_show_a_secret(make_error: Any) -> None:
    with pytest.raises((hookline.HooklineError, TypeError)) as error:
        make_error()
    _assert_not_shown("hush", error.value)


# -- records --------------------------------------------------------------------------------------


def test_the_configuration_hash_does_not_change_with_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"api_key": "hush-hush-4", "place": "an-ordinary-value", "db": "redis://:hush@h"}
    before = config_hash(config)
    monkeypatch.setenv("SOME_TOKEN", "an-ordinary-value")
    hparams = {"place": "an-ordinary-value", "token": "hush-hush-5"}
    hashes = []
    for variable in ("SOME_TOKEN", "OTHER"):
        monkeypatch.setenv(variable, "an-ordinary-value")
        trainer = hookline.Trainer({"runs": tmp_path, "progress": "off"}, *make(), hparams=hparams)
        hashes.append(trainer.fit(batches(1)).run.manifest["config_hash"])
        assert trainer.run.manifest["training"]["hparams"] == {"place": "***", "token": "***"}
        monkeypatch.delenv(variable)
    assert len(set(hashes)) == 1
    assert config_hash(config) == before
    # Neither a rotated secret nor its mask is another configuration; another value is.
    assert config_hash(config | {"api_key": "***", "db": "redis://:other@h"}) == before
    assert config_hash(config | {"place": "elsewhere"}) != before


def test_a_resumed_run_is_found_after_a_secret_was_replaced(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={"seed": 1}, seed=1, hooks=[])
    run.close("interrupted")
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["config"] = {"seed": 1, "api_key": "hush-hush-6"}  # as an older version recorded it
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    _, message = find_unfinished_run(tmp_path, {"config": {"seed": 1, "api_key": "***"}})
    assert "1 unfinished run has this configuration" in message
    _, message = find_unfinished_run(tmp_path, {"config": {"seed": 2, "api_key": "***"}})
    assert "there is no unfinished run of this configuration" in message


def test_the_error_that_ends_a_run_is_recorded_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_PASSWORD", "p4ss/w0rd with 'quotes'")

    def fail(model: Any, batch: Any) -> Any:
        value = os.environ["DEMO_PASSWORD"]
        raise ConnectionError(f"{value!r} and {quote(value)} and {json.dumps(value)}")

    run = hookline.Trainer({"runs": tmp_path, "progress": "off"}, *make(), step_fn=fail)
    with pytest.raises(ConnectionError):
        run.fit(batches(1))
    assert run.run is not None
    text = "".join(p.read_text() for p in run.run.path.rglob("*.json*"))
    assert "p4ss" not in text
    assert json.loads((run.run.path / "manifest.json").read_text())["last_error"].startswith(
        "ConnectionError: "
    )


def test_records_of_loggers_have_no_secrets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_API_KEY", "k3y-0f-the-demo")
    log = logging.getLogger("hookline")
    try:
        raise ValueError("k3y-0f-the-demo")
    except ValueError:
        log.exception("Failed with %s", "k3y-0f-the-demo")
    log.error("%d of %d", 1, 2)
    assert "k3y-0f-the-demo" not in caplog.text
    assert "Failed with ***" in caplog.text
    assert caplog.records[-1].args == (1, 2)


def test_texts_that_users_log_keep_all_but_known_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "t0ken-0f-the-demo")
    trainer = hookline.Trainer({"runs": tmp_path, "progress": "off"}, *make())

    class Log(hookline.Hook):
        def on_step_end(self, step: int, run: Any) -> None:
            run.log(step, 0, "sample", "password=abc said t0ken-0f-the-demo", "text")

    trainer.add_hook(Log())
    trainer.fit(batches(1))
    [row] = [r for r in hookline.open_run(trainer.run.path).metrics() if r["name"] == "sample"]
    assert row["value"] == "password=abc said ***"


def test_a_declared_secret_is_masked_in_copies_and_descriptions() -> None:
    hook = hookline.Heartbeat(url="http://127.0.0.1:9/hush-hush-7")
    for one in (hook, copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        [info] = hookline.HookManager([one]).describe()
        assert info.options["url"] == "***"
        assert "hush" not in f"{info} {hookline.HookManager([one]).summary().as_dict()}"


def test_the_saved_state_of_hooks_is_not_masked(tmp_path: Path) -> None:
    """The state of a hook is restored exactly; hooks must not put secrets in their state."""
    states: list[Any] = []

    class Stateful(hookline.Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"token": "exactly-this"}

        def load_state_dict(self, state: Any) -> None:
            states.append(state)

    settings = {"runs": tmp_path, "progress": "off", "max_epochs": 1}
    first = hookline.Trainer(settings, *make())
    first.add_hook(Stateful(), "stateful")
    first.add_checkpointing()
    first.fit(batches(2))
    second = hookline.Trainer({**settings, "max_epochs": 2}, *make())
    second.add_hook(Stateful(), "stateful")
    second.add_checkpointing()
    second.fit(batches(2), resume_from=first.run.path)
    assert states == [{"token": "exactly-this"}]


# -- names and texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_name(name: str) -> None:
    from hookline.masking import is_secret_name

    assert is_secret_name(name)
    assert is_secret_name(name.upper())
    assert is_secret_name(name.lower())
    assert is_secret_name(f"my_{name}")


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "tokens_seen", "max_tokens", "num_tokens", "pad_token_id", "tokenizer"),
        *("pad_token", "loss_per_token", "author", "authors", "authenticated", "key", "monitor"),
        *("sort_key", "key_dim", "forward_pass", "passes", "url", "password_file", "train/token"),
        *("cookie_policy", "secretary", "monkey", "tokens_fn", "", "-", "ü"),
    ],
)
def test_a_name_that_is_not_secret(name: str) -> None:
    from hookline.masking import is_secret_name

    assert not is_secret_name(name)


def test_every_option_of_a_built_in_hook_is_shown_unless_it_is_a_secret() -> None:
    from hookline.config.hook_names import BUILT_INS, load_hook_class
    from hookline.masking import is_secret_name
    from hookline.options import get_options

    declared = {name: load_hook_class(name) for name in BUILT_INS}
    masked = {
        (name, option)
        for name, hook_class in declared.items()
        for option in get_options(hook_class)
        if is_secret_name(option) or option in hook_class.secret_options
    }
    assert masked == {("notification", "webhook_url"), ("heartbeat", "url")}
    fields = [*hookline.TrainerConfig.model_fields, *hookline.HooksConfig.model_fields]
    assert [name for name in fields if is_secret_name(name)] == []


@given(
    st.recursive(
        st.text() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_masking_changes_nothing_twice(value: Any) -> None:
    from hookline.masking import mask_secrets

    masked = mask_secrets(value)
    assert mask_secrets(masked) == masked


@pytest.mark.parametrize(
    "part",
    [
        *("a", "a-", "a=", "://", "?", "a@", ";=", "password=", "password=x ", "pwd=abcde;"),
        *("Bearer ", "Basic YT", "Bearer a.a"),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nAAAABBBBCCCCDDDD "),
    ],
)
def test_long_texts_are_masked_in_linear_time(part: str) -> None:
    from hookline.masking import mask_text

    text = "https://" + part * (400_000 // len(part))  # minutes, if it took quadratic time
    assert len(mask_text(text)) <= len(text)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("sent Bearer hush.hush.hush", "sent Bearer ***"),
        ("(https://a:hush@h/x), next", "(https://***@h/x), next"),
        ("ssh://git@github.com/a/b", "ssh://git@github.com/a/b"),
        ("https://hooks.zapier.com/hush", "https://hooks.zapier.com/***"),
        ("key sk-proj-hush0123456789hush012345 is", "key *** is"),
        ("hf_hushHUSHhushHUSHhushHUSHhush012345.", "***."),
        ("AKIAHUSHHUSHHUSH0123, xoxb-0123456789-hush", "***, ***"),
        ("(ghp_hush0123456789hush0123456789hush0)", "(***)"),
        ("got Basic aHVzaDpodXNo, and", "got Basic ***, and"),
        ("with basic aHVzaDpodXNoMQ==", "with basic ***"),
        ("a bearer hush12345 was sent", "a bearer *** was sent"),
        ("Bearer hushhushhushhushhushhush", "Bearer ***"),
        ("https://ptb.discord.com/api/webhooks/1/hush", "https://ptb.discord.com/api/webhooks/***"),
    ],
)
def test_a_text(text: str, masked: str) -> None:
    from hookline.masking import mask_text

    assert mask_text(text) == masked


KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nhushhushhushhushhushhushhushhush\nAoIBAQ=="
PLAIN_KEY = "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
@pytest.mark.parametrize("written", [str, repr, json.dumps, lambda text: text[:-40]])
def test_a_private_key(kind: str, written: Any) -> None:
    from hookline.masking import mask_text

    block = PLAIN_KEY.format(KEY).replace("PRIVATE", f"{kind}PRIVATE")
    text = written(f"It failed with {block}")
    masked = mask_text(f"{text}\nThe next line.")
    assert "hush" not in masked
    assert "AoIBAQ" not in masked or written("x") == "x"  # a last line may be short
    assert f"-----BEGIN {kind}PRIVATE KEY-----***" in masked
    assert masked.endswith("The next line.")
    assert mask_text(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "Basic training of beginners, basic authentication, Basic input/output.",
        "Bearer tokens are sent, and the bearer certificates too; multi-layer Bearer multi-layer.",
        "train.yaml:3: hparams.password: Unknown field. Did you mean 'passwords'?",
        "optimizer.password: Expected a string. password: required",
        "task-sk-learn-pipelines-and-others, hf_hub_download, AKIA, github_pat_, eyJ",
        "password=two words, password: ${PASSWORD}; token = 5; secret = True",
        "A file that begins with -----BEGIN PRIVATE KEY----- is a key.",
        "-----BEGIN CERTIFICATE-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n-----END PUBLIC KEY-----",
    ],
)
def test_ordinary_prose_stays(text: str) -> None:
    from hookline.masking import mask_text

    assert mask_text(text) == text


def test_containers_within_themselves() -> None:
    from hookline.masking import mask_secrets, remember_secrets

    items: list[Any] = [{"token": "x"}]
    items += [items, items]
    remember_secrets(items)
    assert mask_secrets(items) == [{"token": "***"}, "…", "…"]


# -- file modes -----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_are_created_with_the_umask_and_locks_for_their_owner(
    tmp_path: Path, umask: int
) -> None:
    from hookline.cli.init_command import init

    class Log(hookline.Hook):
        def on_step_end(self, step: int, run: Any) -> None:
            locks.extend(p.stat().st_mode for p in run.path.iterdir() if p.name == "writer.lock")
            run.log(step, 0, "picture", [[[0.5]]], "image")

    locks: list[int] = []
    old = os.umask(umask)
    try:
        trainer = hookline.Trainer({"runs": tmp_path / "runs", "progress": "off"}, *make())
        trainer.add_hook(Log())
        trainer.add_hook(hookline.Heartbeat())
        trainer.add_hook(hookline.JSONLogHook())
        trainer.add_checkpointing()
        trainer.fit(batches(2))
        init(tmp_path / "project", slurm=True)
    finally:
        os.umask(old)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    files = {p: mode for p, mode in modes.items() if p.is_file()}
    assert {p.suffix for p in files} >= {".json", ".jsonl", ".safetensors", ".sh"}
    for path, mode in modes.items():
        is_open = path.is_dir() or path.name == "job.sh"
        expected = (0o777 if is_open else 0o666) & ~umask
        assert mode == (0o600 if path.name == "writer.lock" else expected), path
    assert locks
    assert {stat.S_IMODE(mode) for mode in locks} == {0o600}
