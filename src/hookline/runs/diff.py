"""What differs between two runs: configuration, code, hooks, versions, results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from hookline.runs.metric_summary import Result
from hookline.runs.run_reader import OpenedRun

__all__ = ["diff_configs", "diff_runs"]

_CODE = ("commit", "branch", "dirty", "diff_sha256", "untracked")
_RESULT = ("last", "best")

Pairs = dict[str, list[Any]]


def diff_runs(a: OpenedRun, b: OpenedRun) -> dict[str, Pairs]:
    """Return what differs, by section; each difference as the values of both runs.

    `config` has the configuration by dotted path, and the seeds; `code` the commit, whether files
    differed from it, and how; `hooks` each hook by name, and their order; `versions` Python and
    packages, platform and devices; `results` the last and the best value of each metric. None
    stands for what a run does not have.
    """
    one, other = a.manifest, b.manifest
    return {
        "config": _diff(_config(one), _config(other)),
        "code": _diff(_code(one), _code(other)),
        "hooks": _diff(_hooks(one), _hooks(other)),
        "versions": _diff(_versions(one), _versions(other)),
        "results": _diff(_results(a.results()), _results(b.results())),
    }


def diff_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """Return what differs between two configurations, by dotted path."""
    return _diff(dict(_flat(a, "")), dict(_flat(b, "")))


def _diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    names = [*a, *(name for name in b if name not in a)]
    pairs = {name: [a.get(name), b.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if not _same(*pair)}


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and (type(a) is bool) == (type(b) is bool)


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}


def _config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    seeds = {name: manifest.get(name) for name in ("seed", "torch_seed")}
    return {**seeds, **dict(_flat(_section(manifest, "config"), ""))}


def _code(manifest: Mapping[str, Any]) -> dict[str, Any]:
    git = _section(manifest, "git")
    return {name: git.get(name) for name in _CODE}


def _hooks(manifest: Mapping[str, Any]) -> dict[str, Any]:
    hooks = manifest.get("hooks")
    told = [h for h in hooks if isinstance(h, Mapping)] if isinstance(hooks, list) else []
    named = {str(hook.get("name")): {k: v for k, v in hook.items() if k != "name"} for hook in told}
    return {"order": list(named), **dict(_flat(named, ""))} if named else {}


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    # The parts of `versions` that are packages too are told once.
    versions = {**_section(manifest, "packages"), **_section(manifest, "versions")}
    places = {"platform": manifest.get("platform"), "devices": _section(manifest, "devices")}
    return {**versions, **dict(_flat(places, ""))}


def _results(results: Mapping[str, Result]) -> dict[str, Any]:
    return {
        f"{metric} ({what})": asdict(result)[what]
        for metric, result in results.items()
        for what in _RESULT
    }
