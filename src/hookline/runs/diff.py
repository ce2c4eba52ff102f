"""Differences between two runs: configuration, code, hooks, versions, results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hookline.arguments import check_instance
from hookline.runs.jsonable import remove_addresses
from hookline.runs.metric_values import MetricSummary
from hookline.runs.reader import OpenedRun

_GIT_FIELDS = ("commit", "branch", "dirty")
_TIMED = ("system/", "time/", "train/tokens_per_second")  # no two runs have the same

Pairs = dict[str, list[Any]]


def diff_runs(a: OpenedRun, b: OpenedRun) -> dict[str, Pairs]:
    """Return the differences by section and name, each as the values of both runs.

    The sections are `config` (the configuration by dotted path, what the training run consists of,
    its name and tags, the run that it was forked from, and the seeds), `code` (the commit,
    uncommitted changes, and the hashes of the program's own modules), `hooks` (each hook by name,
    and their order), `versions` (Python, packages, platform and devices) and `results` (the
    status, the last recorded step, and the last and best value of each metric). A value that a run
    does not have is None. Memory addresses are no difference.

    If no difference of the code was found and some of it is not known, as that of a notebook,
    `code` has `{"modules": ["unknown", "unknown"]}`: whether the code is the same is not known.
    Without the manifest of a run, sections without differences have the same entry, `manifest`.
    """
    for run in (a, b):
        check_instance("diff_runs(a, b)", run, OpenedRun, "two runs, each from open_run(…)")
    first, second = describe_sections(a.manifest), describe_sections(b.manifest)
    differences = {name: _diff(first[name], second[name]) for name in first}
    if not differences["code"] and not (_has_code(a.manifest) and _has_code(b.manifest)):
        differences["code"] = {"modules": ["unknown", "unknown"]}
    if not (a.manifest and b.manifest):
        unknown: Pairs = {"manifest": ["unknown", "unknown"]}
        differences = {name: pairs or unknown for name, pairs in differences.items()}
    results = [describe_results(run.overview(), run.results()) for run in (a, b)]
    return {**differences, "results": _diff(*results)}


def describe_sections(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a manifest has of each section of `diff_runs` except the results, by name."""
    sections = {"config": _config, "code": _code, "hooks": _hooks, "versions": _versions}
    return {name: remove_addresses(select(manifest)) for name, select in sections.items()}


def diff_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """Return the differences between two configurations, by dotted path."""
    return _diff(flatten(a), flatten(b))


def _diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    names = [*a, *(name for name in b if name not in a)]
    pairs = {name: [a.get(name), b.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if not _are_equal(*pair)}


def _are_equal(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and (type(a) is bool) == (type(b) is bool)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names such as `optimizer.lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number_items(value: Any) -> Any:
    """Return lists of mappings, such as parameter groups, as mappings by number."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = {str(i): item for i, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {name: number_items(item) for name, item in value.items()}
    return value


def _section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return manifest.get(name) or {}


def _config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    labels = {name: manifest.get(name) for name in ("name", "tags", "seed", "torch_seed")}
    parent = _section(manifest, "parent")
    labels |= {f"parent.{name}": parent.get(name) for name in ("run_id", "step") if parent}
    config, training = _section(manifest, "config"), _section(manifest, "training")
    return {**labels, **flatten(config), **flatten(number_items(training))}


def _code(manifest: Mapping[str, Any]) -> dict[str, Any]:
    git, modules = _section(manifest, "git"), _section(manifest, "sources")
    hashes = {f"module {name}": digest for name, digest in modules.items()}
    return {**{name: git.get(name) for name in _GIT_FIELDS}, **hashes}


def _has_code(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest tells apart all code that its run may have had."""
    modules = manifest.get("sources")
    return modules is not None and None not in modules.values()


def _hooks(manifest: Mapping[str, Any]) -> dict[str, Any]:
    known = [hook for hook in manifest.get("hooks") or () if isinstance(hook, Mapping)]
    by_name = {str(h.get("name")): {k: v for k, v in h.items() if k != "name"} for h in known}
    return {"order": list(by_name), **flatten(by_name)} if by_name else {}


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    # Packages that are also in `versions` are compared once.
    versions = {**_section(manifest, "packages"), **_section(manifest, "versions")}
    machine = {"platform": manifest.get("platform"), "devices": _section(manifest, "devices")}
    return {**versions, **flatten(machine)}


def describe_results(
    overview: Mapping[str, Any], summaries: Mapping[str, MetricSummary]
) -> dict[str, Any]:
    """Return the status, the last step, and the last and best value of each metric."""
    metrics = {
        f"{metric} ({field})": getattr(summary, field)
        for metric, summary in summaries.items()
        if not metric.startswith(_TIMED)
        for field in ("last", "best")
    }
    return {"status": overview["status"], "steps": overview["steps"], **metrics}
