"""Run folders that a stranger could have written."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ATTACKS", "MARKER", "Attack", "Place", "event", "metric", "rewind"]

MARKER = "MARKER-of-a-file-outside"


class Place(NamedTuple):
    """A folder of runs with a good and a hostile one, and a folder outside of it."""

    runs: Path
    good: Path
    run: Path
    outside: Path

    def change(self, **fields: Any) -> None:
        """Set fields of the hostile run's manifest."""
        file = self.run / "manifest.json"
        manifest = json.loads(file.read_bytes())
        file.write_text(json.dumps({**manifest, **fields}), encoding="utf-8")

    def change_attempt(self, **fields: Any) -> None:
        """Set fields of the only attempt in the hostile run's manifest."""
        manifest = json.loads((self.run / "manifest.json").read_bytes())
        self.change(attempts=[{**manifest["attempts"][0], **fields}])

    def replace_manifest(self, old: str, new: str) -> None:
        """Replace a text in the hostile run's manifest."""
        file = self.run / "manifest.json"
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")

    def append(self, name: str, *lines: bytes | dict[str, Any]) -> None:
        """Append lines to a log of the hostile run."""
        with (self.run / name).open("ab") as file:
            for line in lines:
                data = line if isinstance(line, bytes) else json.dumps(line).encode()
                file.write(data + b"\n")

    def link(self, name: str) -> None:
        """Replace a file or folder of the hostile run with a link to one outside."""
        inside = self.run / name
        if inside.exists():
            inside.rename(self.run / f"moved-{name}")
        inside.symlink_to(self.outside / name)

    def fifo(self, name: str) -> None:
        self.remove(name)
        os.mkfifo(self.run / name)

    def folder(self, name: str) -> None:
        self.remove(name)
        (self.run / name).mkdir()

    def write(self, name: str, data: bytes) -> None:
        self.remove(name)
        (self.run / name).write_bytes(data)

    def remove(self, name: str) -> None:
        path = self.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def socket(self, name: str) -> None:
        self.remove(name)
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir(self.run)  # the path of a socket is limited to 108 characters
            try:
                server.bind(name)
            finally:
                os.chdir(here)

    def sparse(self, name: str) -> None:
        """Give a file of the hostile run 64 GB of zeros."""
        os.truncate(self.run / name, 1 << 36)


def metric(**fields: Any) -> dict[str, Any]:
    record = {"v": 1, "step": 9, "epoch": 0, "time": 1.5, "name": "x", "kind": "scalar"}
    return {**record, "value": 1.0, **fields}


def event(**fields: Any) -> dict[str, Any]:
    return {"v": 1, "time": 1.5, "kind": "note", **fields}


def rewind(**fields: Any) -> dict[str, Any]:
    return {"rewinds": [{"metrics": 0, "end": 10, "repeated": 0, "restored": [], **fields}]}


Attack = Callable[[Place], object]


def set_field(**fields: Any) -> Attack:
    return lambda place: place.change(**fields)


def set_attempt(**fields: Any) -> Attack:
    return lambda place: place.change_attempt(**fields)


def add_metric(*lines: bytes | dict[str, Any]) -> Attack:
    return lambda place: place.append("metrics.jsonl", *lines)


def add_event(*lines: bytes | dict[str, Any]) -> Attack:
    return lambda place: place.append("events.jsonl", *lines)


def write(name: str, data: bytes) -> Attack:
    return lambda place: place.write(name, data)


def replace(old: str, new: str) -> Attack:
    return lambda place: place.replace_manifest(old, new)


LONG = "n" * 1_000_000
DIGITS = b"1" * 5000
_FAST = b'{"v": 1, "step": %b, "epoch": 0, "time": 1.5, "name": %b, "kind": "scalar", "value": %b}'

# The attack, and what is said about it.
ATTACKS: dict[str, tuple[Attack, str]] = {
    # -- what is opened
    "manifest link": (lambda p: p.link("manifest.json"), "manifest.json is a symbolic link"),
    "metrics link": (lambda p: p.link("metrics.jsonl"), "metrics.jsonl is a symbolic link"),
    "events link": (lambda p: p.link("events.jsonl"), "events.jsonl is a symbolic link"),
    "repeated link": (lambda p: p.link("repeated.jsonl"), "repeated.jsonl is a symbolic link"),
    "log link": (lambda p: p.link("log.jsonl"), "log.jsonl is a symbolic link"),
    "checkpoints link": (lambda p: p.link("checkpoints"), "checkpoints is a symbolic link"),
    "media link": (lambda p: p.link("media"), "media is a symbolic link"),
    "profile link": (lambda p: p.link("profile"), "profile is a symbolic link"),
    "dangling link": (
        lambda p: (p.run / "repeated.jsonl").symlink_to(p.outside / "new"),
        "repeated.jsonl is a symbolic link",
    ),
    "link to itself": (
        lambda p: (p.run / "profile").symlink_to(p.run / "profile"),
        "profile is a symbolic link",
    ),
    "manifest fifo": (lambda p: p.fifo("manifest.json"), "manifest.json is a FIFO"),
    "metrics fifo": (lambda p: p.fifo("metrics.jsonl"), "metrics.jsonl is a FIFO"),
    "events fifo": (lambda p: p.fifo("events.jsonl"), "events.jsonl is a FIFO"),
    "repeated fifo": (lambda p: p.fifo("repeated.jsonl"), "repeated.jsonl is a FIFO"),
    "media fifo": (lambda p: p.fifo("media"), "media is a FIFO"),
    "manifest folder": (lambda p: p.folder("manifest.json"), "manifest.json is a folder"),
    "metrics folder": (lambda p: p.folder("metrics.jsonl"), "metrics.jsonl is a folder"),
    "events folder": (lambda p: p.folder("events.jsonl"), "events.jsonl is a folder"),
    "metrics socket": (lambda p: p.socket("metrics.jsonl"), "metrics.jsonl is a socket"),
    "media file": (write("media", b""), "media is a regular file; expected a folder"),
    "sparse manifest": (lambda p: p.sparse("manifest.json"), "has more than 8,388,608 bytes"),
    "sparse metrics": (lambda p: p.sparse("metrics.jsonl"), "has more than 2,097,152 bytes"),
    "sparse events": (lambda p: p.sparse("events.jsonl"), "has more than 2,097,152 bytes"),
    # -- the text of the manifest
    "empty manifest": (write("manifest.json", b""), "Expecting value"),
    "truncated manifest": (write("manifest.json", b'{"format": "hook'), "line 1 column 12"),
    "manifest UTF-16": (write("manifest.json", '{"a": 1}'.encode("utf-16")), "can't decode"),
    "manifest latin-1": (write("manifest.json", b'{"name": "\xe9"}'), "can't decode"),
    "manifest NaN": (replace('"status":', '"seed": NaN, "status":'), "NaN is not standard"),
    "manifest 1e999": (replace('"status":', '"other": 1e999, "status":'), "range of floats"),
    "manifest duplicate": (replace('"status":', '"run_id": "a", "status":'), "occurs twice"),
    "manifest deep": (write("manifest.json", b'{"a": ' + b"[" * 100_000), "nested deeper"),
    "manifest deep enough": (
        replace('"status":', f'"other": {"[" * 500}{"]" * 500}, "status":'),
        "nested deeper",
    ),
    "manifest digits": (replace('"status":', f'"other": {"1" * 5000}, "status":'), "digits"),
    "manifest surrogate": (replace('"status":', r'"other": "\ud800", "status":'), "surrogate"),
    "manifest list": (write("manifest.json", b"[]"), "is not the manifest of a run"),
    "format object": (set_field(format={}), "is not the manifest of a run"),
    "version 99": (set_field(version=99), "has version 99"),
    "version 0": (set_field(version=0), "has version 0"),
    "version text": (set_field(version="1"), "has version 1"),
    "version true": (set_field(version=True), "has version True"),
    "version list": (set_field(version=[1]), "has version"),
    # -- names
    **{
        f"run id {shown}": (set_field(run_id=value), "'run_id' is .*; expected a plain name")
        for shown, value in {
            "parent": "../../outside",
            "absolute": "/tmp/outside",
            "slash": "a/b",
            "backslash": "..\\outside",
            "empty": "",
            "dots": "..",
            "number": 5,
            "null": None,
            "list": ["a"],
            "object": {"a": 1},
            "long": LONG,
            "escape": "\x1b[31mred",
            "bidi": "a\u202eb",
            "line feed": "a\nb",
            "nul": "a\0b",
            "device": "con",
        }.items()
    },
    "run id missing": (replace('"run_id"', '"run_id_"'), "it has no 'run_id'"),
    "parent id": (set_field(parent={"run_id": "../../x"}), "'run_id' of 'parent' is"),
    "parent list": (set_field(parent=[1]), "'parent' is a list"),
    # -- types of fields
    "status object": (set_field(status={"a": []}), "'status' is an object; expected a text"),
    "status list": (set_field(status=["training"]), "'status' is a list"),
    "started number": (set_field(started=10**400), "'started' is 1000"),
    "started text": (set_field(started="yesterday"), "'started' is 'yesterday'"),
    "ended list": (set_field(ended=[]), "'ended' is a list"),
    "created long": (set_field(created=LONG), "'created' is 'nnn"),
    "config list": (set_field(config=[1]), "'config' is a list; expected an object"),
    "config text": (set_field(config="x"), "'config' is 'x'"),
    "config hash object": (set_field(config_hash={}), "'config_hash' is an object"),
    "hooks number": (set_field(hooks=3), "'hooks' is 3; expected a list"),
    "tags object": (set_field(tags={"a": 1}), "'tags' is an object"),
    "tags of objects": (set_field(tags=[{"a": 1}]), "'tags' is a list; expected a list of texts"),
    "name object": (set_field(name={"a": 1}), "'name' is an object"),
    "last error object": (set_field(last_error={"a": 1}), "'last_error' is an object"),
    "git number": (set_field(git=3), "'git' is 3"),
    "git commit": (set_field(git={"commit": 5, "dirty": [1]}), "'commit' of 'git' is 5"),
    "git branch": (set_field(git={"branch": {"a": 1}}), "'branch' of 'git' is an object"),
    "versions list": (set_field(versions=[1]), "'versions' is a list"),
    "versions of objects": (set_field(versions={"torch": {}}), "'torch' of 'versions'"),
    "packages list": (set_field(packages=[1]), "'packages' is a list"),
    "devices text": (set_field(devices="cpu"), "'devices' is 'cpu'"),
    "training list": (set_field(training=[1]), "'training' is a list"),
    "lost records": (set_field(lost_records="many"), "'lost_records' is 'many'"),
    "lost records huge": (set_field(lost_records=10**400), "'lost_records' is 1000"),
    "attempts number": (set_field(attempts=3), "'attempts' is 3; expected a list of objects"),
    "attempts of numbers": (
        set_field(attempts=[3]),
        "'attempts' is a list; expected",
    ),
    "attempts object": (set_field(attempts={"a": 1}), "'attempts' is an object"),
    **{
        f"pid {pid}": (set_attempt(pid=pid, ended=None, status="training"), "'pid' of attempt 1 is")
        for pid in (0, -1, 2**31, 2**70, 10**400, 1.5, True, "1", [1])
    },
    "attempt times": (set_attempt(started=5, ended={}), "'started' of attempt 1 is 5"),
    "attempt time out of range": (set_attempt(started="0001-01-01T00:00:00+23:59"), ""),
    "attempt host": (set_attempt(host=["a"]), "'host' of attempt 1 is a list"),
    "attempt error": (set_attempt(error="x"), "'error' of attempt 1 is 'x'"),
    "attempt error fields": (
        set_attempt(error={"message": {}}),
        "'error' of attempt 1 is an",
    ),
    "attempt resumed from": (
        set_attempt(resumed_from={}),
        "'resumed_from' of attempt 1 is an",
    ),
    "rewinds text": (set_field(rewinds="x"), "'rewinds' is 'x'"),
    "rewinds of numbers": (set_field(rewinds=[1]), "'rewinds' is a list"),
    "rewind negative": (set_field(**rewind(metrics=-5)), "'rewinds' is a list"),
    "rewind end": (set_field(**rewind(metrics=50)), "'rewinds' is a list"),
    "rewind pieces": (set_field(**rewind(restored=[["a", 1]])), "'rewinds' is a list"),
    "rewind float": (set_field(**rewind(repeated=1.5)), "'rewinds' is a list"),
    # -- metrics
    "metrics no object": (add_metric(b"[1]"), r"line \d+: it is not an object"),
    "metrics number": (add_metric(b"5"), r"line \d+: it is not an object"),
    "metrics blank": (add_metric(b""), r"line \d+: Expecting value \(column 1\)"),
    "metrics empty object": (add_metric(b"{}"), r"line \d+: it has no version 'v'"),
    "metrics version": (add_metric(metric(v=7)), "records of version 7 were skipped"),
    "metrics version list": (add_metric(metric(v=[1])), r"line \d+: it has no version"),
    "metrics version huge": (add_metric(metric(v=10**400)), r"records of version 1000"),
    "metrics integer": (add_metric(metric(value=10**400)), "'value' is not a number that a float"),
    "metrics step integer": (add_metric(metric(step=10**400)), "'step' is not a number that"),
    "metrics digits": (
        add_metric(_FAST % (DIGITS, b'"x"', b"1.0"), _FAST % (b"1", b'"x"', DIGITS)),
        "2 lines cannot be read",
    ),
    "metrics long name": (add_metric(metric(name=LONG)), "'name' is not a text of up to 10,000"),
    "metrics name list": (add_metric(metric(name=["x"])), "'name' is not a text"),
    "metrics name null": (add_metric(metric(name=None)), "'name' is not a text"),
    "metrics kind object": (add_metric(metric(kind={"a": []})), "'kind' is not a text"),
    "metrics step list": (add_metric(metric(step=[1])), "'step' is not a number"),
    "metrics step text": (add_metric(metric(step="1")), "'step' is not a number"),
    "metrics epoch object": (add_metric(metric(epoch={})), "'epoch' is not a number"),
    "metrics time text": (add_metric(metric(time="now")), "'time' is not a number"),
    "metrics value object": (add_metric(metric(value={"a": 1})), "'value' is not a number"),
    "metrics value text": (add_metric(metric(value="5")), "'value' is not a number"),
    "metrics not UTF-8": (add_metric(_FAST % (b"1", b'"\xff\xfe"', b"1.0")), "can't decode"),
    "metrics control": (add_metric(_FAST % (b"1", b'"a\x1b[2J"', b"1")), "Invalid control char"),
    "metrics surrogate": (add_metric(_FAST % (b"1", rb'"\ud800"', b"1.0")), "surrogate pair"),
    "metrics NaN": (add_metric(_FAST % (b"1", b'"x"', b"NaN")), "NaN is not standard JSON"),
    "metrics step NaN": (add_metric(_FAST % (b"NaN", b'"x"', b"1")), "NaN is not standard JSON"),
    "metrics 1e999": (add_metric(_FAST % (b"1", b'"x"', b"1e999")), "range of floats"),
    "metrics leading zero": (add_metric(_FAST % (b"007", b'"x"', b"1")), "cannot be read"),
    "metrics duplicate": (add_metric(b'{"v": 1, "v": 1}'), "the key 'v' occurs twice"),
    "metrics deep": (add_metric(b'{"v": 1, "a": ' + b"[" * 90_000), "nested deeper"),
    "metrics text": (add_metric(metric(kind="text", value={})), "'value' is not a text"),
    "metrics histogram": (add_metric(metric(kind="histogram", value=[1])), "is not a histogram"),
    "metrics image": (
        add_metric(metric(kind="image", value={"path": "../../secret.png"})),
        "not an image in the folder media",
    ),
    "metrics image absolute": (
        add_metric(metric(kind="image", value={"path": "/etc/passwd"})),
        "not an image in the folder media",
    ),
    "metrics zeros": (add_metric(b"\0" * 100_000), "cannot be read"),
    "metrics random": (write("metrics.jsonl", bytes(range(256)) * 50), "lines cannot be read"),
    "metrics carriage returns": (write("metrics.jsonl", b"\r\r\n" * 9), "lines cannot be read"),
    # -- events
    "events no object": (add_event(b'"end"'), "it is not an object"),
    "events kind list": (add_event(event(kind=["end"])), "'kind' is not a text"),
    "events kind object": (add_event(event(kind={"a": 1})), "'kind' is not a text"),
    "events long kind": (add_event(event(kind=LONG)), "'kind' is not a text"),
    "events time": (add_event(event(time=10**400)), "'time' is not a number"),
    "events not UTF-8": (add_event(b'{"v": 1, "kind": "\xff"}'), "can't decode"),
    "events deep": (add_event(b"[" * 90_000), "nested deeper"),
    "events version": (add_event(event(v=2)), "records of version 2 were skipped"),
    # -- the lock, which only matters when the run is resumed
    "lock fifo": (lambda p: p.fifo("writer.lock"), "writer.lock is a FIFO"),
    "lock folder": (lambda p: p.folder("writer.lock"), "writer.lock is a folder"),
    "lock link": (lambda p: p.link("writer.lock"), "writer.lock is a symbolic link"),
    # -- names of files
    "name not UTF-8": (
        lambda p: p.run.rename(p.run.with_name("run-\udcff\x1b[2J")),
        "",
    ),
}
