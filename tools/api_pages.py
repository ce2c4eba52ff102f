"""The pages of the API reference: which public names each one shows.

The text of the pages comes from the docstrings, through mkdocstrings, when the documentation is
built. `tools/generate.py` writes the lists of names, so that a new public name cannot be missed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import hookline

# Each page: its title, its introduction, and where its names are defined.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "hooks": (
        "Hooks and events",
        "The base classes of hooks, and the classes that register and call them. "
        "[Events](../events.md) lists the event methods of `Hook`.",
        (
            *("hookline.hook", "hookline.events", "hookline.context", "hookline.dispatch"),
            "hookline.tensors",
        ),
    ),
    "trainer": (
        "Trainer",
        "Hookline's own training loop and its configuration. See [the trainer](../trainer.md). "
        "[Trainer configuration](../trainer_config.md) lists the fields of `TrainerConfig`.",
        ("hookline.trainer", "hookline.config"),
    ),
    "session": (
        "Attach and session",
        "Hooks in a loop that you wrote. See [your own loop](../bare_loop.md).",
        ("hookline.integrations",),
    ),
    "probes": (
        "Probes",
        "Capture, measure, check and edit the values in a model. See [probes](../probes.md).",
        ("hookline.probes",),
    ),
    "updates": (
        "Updates",
        "Gradient transforms. See [updates](../updates.md).",
        ("hookline.updates",),
    ),
    "runs": (
        "Runs",
        "Write and read run folders, and make reports. See [runs](../runs.md) and "
        "[report](../report.md).",
        ("hookline.runs", "hookline.files", "hookline.report"),
    ),
    "trackers": (
        "Trackers",
        "Write a tracker of your own. See [trackers](../trackers.md).",
        ("hookline.trackers",),
    ),
    "config_files": (
        "Config files",
        "Load a training run from a file. See [config files](../configuration.md).",
        ("hookline.config_files",),
    ),
    "verification": (
        "Verification",
        "Check that training is reproducible and resumes exactly. See "
        "[two runs differ](../two_runs_differ.md).",
        ("hookline.verification",),
    ),
    "errors": (
        "Errors",
        "All errors derive from `HooklineError`.",
        ("hookline.errors",),
    ),
}
BUILT_IN = "hookline.hooks"  # these have pages of their own
PACKAGES = ("hookline", "hookline.probes", "hookline.updates", "hookline.runs")
PACKAGES += ("hookline.config_files", "hookline.verification")
# What the pages show of classes that also have methods for Hookline's own use.
HOOK_METHODS = ("add_hook", "remove_hook", "enable_hook", "disable_hook")
MEMBERS: dict[str, tuple[str, ...]] = {
    "Hook": ("critical", "intervenes", "state_dict", "load_state_dict"),
    "HookManager": (
        *HOOK_METHODS,
        *("register_hook", "register_hooks", "clear_hooks", "get_hook", "list_hooks", "fire"),
        *("describe", "summary", "state_dict", "load_state_dict"),
    ),
    "Session": (
        *HOOK_METHODS,
        *("hook_manager", "optimizer", "step", "status", "should_stop", "stop", "detach"),
        *("epoch", "batches", "validation", "backward", "updates", "skip_optimizer_step"),
        *("save_checkpoint", "load_checkpoint", "notify_checkpoint_saved"),
        *("log", "log_dict"),
    ),
}
INHERITS = ("Session", "Trainer")  # methods of a base class that is not public


def page(topic: str) -> str:
    """Return one page of the reference."""
    title, introduction, modules = PAGES[topic]
    names, aliases = public_names()[topic]
    lines = [f"# {title}", "", f"<!-- Written by `make generate` from {modules[0]}. -->", ""]
    lines += [introduction, ""]
    for path in names:
        lines += [f"::: {path}"]
        lines += [*_options(path), ""]
    lines += [f"`{alias}` is an alias of `{path}`.\n" for alias, path in aliases.items()]
    return "\n".join(lines).rstrip() + "\n"


def public_names() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return, for each page, the paths of its public names, and the aliases among them."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {topic: ([], {}) for topic in PAGES}
    known: dict[int, str] = {}
    for package in PACKAGES:
        module = import_module(package)
        # A class comes before other names that it has.
        names = sorted(module.__all__, key=lambda name: _is_alias(getattr(module, name), name))
        for name in names:
            value = getattr(module, name)
            if name.startswith("__") or _home(value).startswith(BUILT_IN + "."):
                continue
            paths, aliases = found[_topic(package, value)]
            path = f"{package}.{name}"
            if _home(value).endswith(f".{name}"):  # mkdocstrings would show the file of that name
                path = f"{_home(value)}.{name}"
            if id(value) not in known:
                known[id(value)] = path
                paths.append(path)
            elif known[id(value)].rpartition(".")[2] != name:
                aliases[path] = known[id(value)]
    return found


def _options(path: str) -> list[str]:
    """Return the options of mkdocstrings for one name."""
    name = path.removeprefix("hookline.")
    options = []
    if members := MEMBERS.get(name):
        unknown = [member for member in members if not hasattr(getattr(hookline, name), member)]
        if unknown:
            raise LookupError(f"{name} has no {unknown}. Correct MEMBERS in tools/api_pages.py.")
        options.append(f"members: [{', '.join(members)}]")
    if name in INHERITS:
        options.append("inherited_members: true")
    return ["    options:", *(f"      {option}" for option in options)] if options else []


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", "hookline.events"))  # EVENTS is a mapping


def _is_alias(value: Any, name: str) -> bool:
    return getattr(value, "__name__", name) != name


def _topic(package: str, value: Any) -> str:
    home = package if package != "hookline" else _home(value)
    if issubclass(type(value), type) and issubclass(value, hookline.HooklineError):
        home = _home(value)
    for topic, (_, _, modules) in PAGES.items():
        if any(f"{home}.".startswith(f"{module}.") for module in modules):
            return topic
    raise LookupError(f"{value!r} of {home} has no page in the API reference. Add it to PAGES.")
