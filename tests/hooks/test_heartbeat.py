"""The sign of life that Heartbeat gives, and when it stops."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from loops import batches, fit

import hookline
from hookline.hooks.notification.heartbeat import Heartbeat

ALWAYS = 1e-9  # seconds: due in every batch


def train(*hooks, **options):
    return fit(*hooks, data=batches(3), **options)


class Reads(hookline.Hook):
    """Reads the file whenever something happens. It comes before built-in hooks."""

    def __init__(self, path):
        self.path, self.seen = path, []

    def look(self):
        self.seen.append(json.loads(self.path.read_text()))

    def on_epoch_start(self):
        self.look()

    def on_train_batch_start(self):
        self.look()

    def on_epoch_end(self):
        self.look()


def test_the_file_follows_training_and_tells_how_it_ended(tmp_path):
    path = tmp_path / "beat.json"
    reads = Reads(path)
    before = time.time()
    train(reads, Heartbeat(path, every_seconds=ALWAYS), max_epochs=2)
    assert [(sign["step"], sign["epoch"]) for sign in reads.seen] == [
        (0, 0),  # at the start
        *((0, 0), (1, 0), (2, 0), (3, 0)),
        *((3, 0), (3, 0), (4, 1), (5, 1), (6, 1)),
    ]
    assert {sign["status"] for sign in reads.seen} == {"training"}
    last = json.loads(path.read_text())
    assert (last["status"], last["step"], last["pid"]) == ("completed", 6, os.getpid())
    assert before <= last["time"] <= time.time()
    assert [file.name for file in tmp_path.iterdir()] == ["beat.json"]


def test_by_default_the_file_is_in_the_run_folder(tmp_path):
    trainer = train(Heartbeat(), runs=tmp_path)
    assert json.loads((trainer.run.path / "heartbeat.json").read_text())["status"] == "completed"


def test_without_a_place_to_write_it_says_so_once_and_training_goes_on(caplog):
    trainer = train(Heartbeat(every_seconds=ALWAYS))
    assert trainer.status == "completed"
    assert "Pass path=… or url=…" in caplog.text
    assert trainer.hooks.describe()[0].failures == 1


# -- an address ------------------------------------------------------------------------------------


@contextmanager
def server():
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            got.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/ping/secret", got
        finally:
            server.shutdown()
            thread.join()


def test_an_address_is_fetched_and_no_file_is_written(tmp_path):
    before = threading.enumerate()
    with server() as (url, got):
        trainer = train(Heartbeat(url=url), runs=tmp_path)
    assert got == ["/ping/secret"]
    assert not (trainer.run.path / "heartbeat.json").exists()
    others = [t for t in threading.enumerate() if t not in before]
    assert not [t for t in others if t.name.startswith("hookline")]


def test_an_address_is_fetched_again_when_it_is_time():
    class Waits(hookline.Hook):
        """Lets each sign arrive: while one is being sent, only the latest one waits."""

        def __init__(self):
            self.expected = 1

        def on_train_batch_start(self):
            for _ in range(2000):
                if len(got) >= self.expected:
                    break
                time.sleep(0.005)
            self.expected = len(got) + 1

    with server() as (url, got):
        train(Waits(), Heartbeat(url=url, every_seconds=ALWAYS))
    assert len(got) == 4  # the start, and three batches


def test_the_address_is_shown_nowhere(caplog):
    hook = Heartbeat(url="http://127.0.0.1:9/secret")
    train(hook)
    assert hook.hookline_options["url"] == "***"
    assert "could not be sent" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(hookline.ConfigError, match="not a valid URL") as error:
        Heartbeat(url="secret")
    assert "'secret'" not in str(error.value)
