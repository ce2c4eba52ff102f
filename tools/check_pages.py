"""The pages of Lint's checks: one for each, from its docstring, and the table of all of them."""

from __future__ import annotations

import ast
import inspect
import textwrap

from hookline.hooks.lint.catalogue import CHECKS
from hookline.hooks.lint.finding import Check

RULES = {
    1: "updates take effect",
    2: "the life of gradients",
    3: "micro-batches",
    4: "training and evaluation mode",
    5: "replicas agree",
    6: "ties stay ties",
    7: "data",
    8: "no leaks",
    9: "labels",
    10: "restored state",
    11: "averages",
    12: "the record is true",
    13: "precision and life",
}
_TITLES = {"Bug": "Bug", "Fix": "Fix", "Ignore": "When to ignore it"}


def pages() -> dict[str, str]:
    """Return the text of each page, by the check's id."""
    return {check.id: _page(check) for check in CHECKS}


def table() -> str:
    """Return a table of the checks of each rule."""
    lines: list[str] = []
    for rule, name in RULES.items():
        lines += [f"## {rule}: {name}", "", "| check | finds | severity | kind |"]
        lines += ["|---|---|---|---|"]
        for check in (one for one in CHECKS if one.rule == rule):
            finds = " ".join(check.page().split("\n\n")[0].split())
            link = f"[{check.id}](checks/{check.id}.md)"
            lines.append(f"| {link} | {finds} | {check.severity} | {_kind(check)} |")
        lines.append("")
    return "\n".join(lines)


def navigation() -> str:
    """Return the pages as entries of the navigation."""
    return "\n".join(f"          - {name}: checks/{name}.md" for name in sorted(pages()))


def _page(check: type[Check]) -> str:
    sections = check.sections()
    lines = [
        f"# {check.id}",
        "",
        "<!-- Written from the check's docstring; edit there. -->",
        "",
        sections.pop("").strip(),
        "",
        f"{check.severity.capitalize()}, {_kind(check)}: {_cost(check)}. "
        "[All checks](../checks.md).",
    ]
    for title, body in sections.items():
        text = textwrap.dedent(body) if title == "Bug" else " ".join(body.split())
        lines += ["", f"## {_TITLES[title]}", "", *_body(title, text.strip("\n"))]
    return "\n".join([*lines, ""])


def _body(title: str, text: str) -> list[str]:
    """Return a section: code as a block, prose as it is."""
    is_code = _is_python(text) or (title == "Bug" and not text.rstrip().endswith("."))
    return ["```python", text.rstrip(), "```"] if is_code else [text.rstrip()]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _kind(check: type[Check]) -> str:
    return "active" if check.is_active else "passive"


def _cost(check: type[Check]) -> str:
    """Return what a check does that takes time, as its code says."""
    own = [one for one in check.__mro__ if issubclass(one, Check) and one is not Check]
    source = "".join(map(inspect.getsource, own))
    costs = ["calls the model again, once"] if check.is_active else []
    costs += ["reads numbers"] if "self.read(" in source else []
    costs += ["sees each module's call"] if "def on_module_call" in source else []
    costs += ["exchanges values between ranks"] if "compare_ranks(" in source else []
    return ", ".join(costs) or "only Python objects"
