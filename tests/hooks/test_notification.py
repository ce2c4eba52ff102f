"""NotificationHook sends messages, and neither servers nor secrets get in the way."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from loops import batches, fit

import hookline
from hookline.hooks.notification import notification_hook
from hookline.hooks.notification.notification_hook import NotificationHook

SECRET = "T0000-very-secret"


class Server(ThreadingHTTPServer):
    """A webhook that records what it gets, and answers as it is told, then with 200."""

    daemon_threads = True

    def __init__(self, answers=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.requests = []
        self.gets = []
        self.go_on = threading.Event()  # who hangs waits for it

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/services/{SECRET}"

    @property
    def texts(self):
        return [json.loads(body)["text"] for _, _, body in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, dict(self.headers), body))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if answer == "hang":
            self.server.go_on.wait(30)
            return
        code, location = answer if isinstance(answer, tuple) else (answer, None)
        self.send_response(code)
        if location is not None:
            self.send_header("Location", location)
        self.end_headers()

    def do_GET(self):
        self.server.gets.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def webhook(*answers):
    with Server(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("hookline "):
            thread.join(10)  # one that hangs ends with its time-out
            assert not thread.is_alive()


def train(*hooks, data=None, **options):
    return fit(*hooks, data=batches(3) if data is None else data, **options)


class Validates(hookline.Hook):
    """Replaces the metrics of validations by given ones."""

    def __init__(self, name, *values):
        self.name, self.values = name, list(values)

    def on_validation_end(self, metrics):
        metrics[self.name] = self.values.pop(0)

    def on_epoch_end(self, metrics):
        if not self.name.startswith("val/"):
            metrics[self.name] = self.values.pop(0)


class Fails(hookline.Hook):
    critical = True

    def on_step_end(self):
        raise ValueError("a < b & c")


# -- what is sent ----------------------------------------------------------------------------------


def test_the_end_is_told_as_slack_wants_it():
    with webhook() as server:
        train(NotificationHook(server.url))
    ((path, headers, body),) = server.requests
    assert path == f"/services/{SECRET}"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"text": "Training completed at step 3."}


def test_an_exception_is_told_with_type_and_text_and_then_no_end():
    with webhook() as server, pytest.raises(hookline.HookFailedError):
        train(Fails(), NotificationHook(server.url))
    (text,) = server.texts
    assert text.startswith("Training failed at step 1: HookFailedError: ")
    assert text.endswith("ValueError: a &lt; b &amp; c")  # Slack's own signs are escaped


@pytest.mark.parametrize(
    ("occasion", "expected"),
    [
        ("training_start", ["Training starts: Net, run "]),
        ("training_end", ["Training completed at step 6. Best val/loss: "]),
        ("exception", []),
    ],
)
def test_only_what_was_asked_for_is_told(tmp_path, occasion, expected):
    with webhook() as server:
        hook = NotificationHook(server.url, notify_on=[occasion])
        train(hook, val=batches(1), max_epochs=2, runs=tmp_path)
    assert len(server.texts) == len(expected)
    for text, beginning in zip(server.texts, expected, strict=True):
        assert text.startswith(beginning)


def best(values, monitor="val/loss", **options):
    with webhook() as server:
        hook = NotificationHook(server.url, notify_on=["best_model"], monitor=monitor, **options)
        metrics = Validates(monitor, *values)
        train(metrics, hook, val=batches(1), max_epochs=len(values))
    return server.texts


def test_a_new_best_model_is_told_and_nan_is_none():
    assert best([float("nan"), 3.0, 3.0, 4.0, 2.0]) == [
        "New best model at step 6: val/loss 3.0000.",
        "New best model at step 15: val/loss 2.0000.",
    ]


def test_a_metric_that_is_not_there_is_said_once_with_those_there_are(caplog):
    with webhook() as server:
        hook = NotificationHook(server.url, notify_on=["best_model"], monitor="val/accuracy")
        train(hook, val=batches(1), max_epochs=2)
    assert server.texts == []
    assert caplog.text.count("the metric 'val/accuracy' for the best model is missing") == 1
    assert "'val/loss'" in caplog.text


# -- servers ---------------------------------------------------------------------------------------


def test_a_message_that_fails_is_sent_again():
    with webhook(500, 429, 200) as server:
        train(NotificationHook(server.url))
    assert len(server.requests) == 3
    assert len(set(server.texts)) == 1


@pytest.mark.parametrize("code", [301, 308])
def test_a_redirect_is_logged_and_not_followed(caplog, code):
    with webhook() as other, webhook((code, other.url)) as server:
        train(NotificationHook(server.url))
    assert other.requests == other.gets == []
    assert len(server.requests) == 1
    said = f"A notification could not be sent: the server responded with {code}, a redirect, which"
    assert said in caplog.text
    assert SECRET not in caplog.text
    assert "1 notification(s) could not be sent." in caplog.text


def test_training_goes_on_when_there_is_no_server(caplog, monkeypatch):
    monkeypatch.setattr(notification_hook, "RETRIES", 0)
    hook = NotificationHook(f"http://127.0.0.1:{free_port()}/{SECRET}")
    trainer = train(hook)
    assert trainer.status == "completed"
    assert trainer.hooks.describe()[0].failures == 0
    assert "ConnectionRefusedError" in caplog.text
    assert SECRET not in caplog.text


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def test_training_does_not_wait_for_a_server_that_hangs(caplog, monkeypatch):
    """The server hangs until training has ended: had training waited for it, it never would."""
    monkeypatch.setattr(notification_hook, "WAIT_AT_END", 0)
    with webhook("hang") as server:
        hook = NotificationHook(server.url, notify_on=["training_start", "training_end"])
        trainer = train(hook)
        assert trainer.status == "completed"
        assert not server.go_on.is_set()
        assert "2 notification(s) could not be sent." in caplog.text


def test_an_answer_that_does_not_come_in_time_is_given_up(caplog, monkeypatch):
    monkeypatch.setattr(notification_hook, "TIMEOUT", 0.1)
    monkeypatch.setattr(notification_hook, "RETRIES", 0)
    with webhook("hang") as server:
        train(NotificationHook(server.url))
        assert "A notification could not be sent: no response within 0.1 seconds." in caplog.text
        assert not server.go_on.is_set()


def test_a_secret_at_the_end_of_a_long_message_is_masked_before_the_message_is_cut(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "correct-horse-battery")

    class Fails(hookline.Hook):
        critical = True

        def on_step_end(self):
            raise ConnectionError("x " * 950 + "correct-horse-battery" * 10)

    with webhook() as server, pytest.raises(hookline.HookFailedError):
        train(Fails(), NotificationHook(server.url))
    assert "corr" not in server.texts[0]


# -- the secret ------------------------------------------------------------------------------------


def test_the_address_is_shown_nowhere(tmp_path, caplog):
    caplog.set_level(0)
    with webhook(500, 404) as server:
        hook = NotificationHook(webhook_url=server.url)
        trainer = train(hook, runs=tmp_path)
        assert hook.hookline_options["webhook_url"] == "***"
        assert trainer.hooks.describe()[0].options["webhook_url"] == "***"
        assert SECRET not in repr(hook) + str(trainer.hooks.describe())
    assert "could not be sent" in caplog.text
    assert SECRET not in caplog.text
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    "url",
    [
        f"file:///{SECRET}",
        f"https://[hooks/{SECRET}",
        f"https://hooks.slack.com:{SECRET}/",
        f"https:///{SECRET}",
        f"https://hooks.slack.com/{SECRET}\n",
        SECRET.encode(),
    ],
)
def test_an_address_that_cannot_be_used_is_an_error_that_does_not_show_it(url):
    with pytest.raises(hookline.ConfigError, match="is not a valid URL") as error:
        NotificationHook(url)
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__context__ is None


def test_the_address_may_stand_in_the_environment(monkeypatch):
    with webhook() as server:
        monkeypatch.setenv("HOOKLINE_WEBHOOK_URL", server.url)
        train(NotificationHook())
    assert len(server.requests) == 1


def test_without_an_address_it_is_an_error(monkeypatch):
    monkeypatch.delenv("HOOKLINE_WEBHOOK_URL", raising=False)
    with pytest.raises(hookline.ConfigError, match="Pass webhook_url"):
        NotificationHook()
