"""llms.txt: an index of the documentation for language models, from the pages themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
LINK = r"\[([^]]*)\]\([^)]*\)"
_HEAD = """# Hookline

> One hook system for every PyTorch training loop. A hook is a class with `on_…` methods; each
> method gets the arguments that its parameters name. It runs in Hookline's trainer, in bare loops
> (`hookline.attach`), with Accelerate, DDP and FSDP2, and inside Hugging Face, Lightning and Ignite
> trainers.
"""


def llms_text() -> str:
    """Return the whole file: the pages by section, each with its first sentence."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    lines = [_HEAD, "## Start", ""]
    sections: list[tuple[str, list[Any]]] = []
    for item in nav:
        ((title, value),) = item.items()
        if isinstance(value, str):
            lines.append(_entry(title, value))
        else:
            sections.append((title, value))
    for title, items in sections:
        lines += ["", f"## {title}", "", *_entries(items)]
    return "\n".join(lines) + "\n"


def _entries(items: list[Any]) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, str):
            lines.append(_entry(None, item))
            continue
        ((title, value),) = item.items()
        lines += [_entry(title, value)] if isinstance(value, str) else _entries(value)
    return lines


def _entry(title: str | None, page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    name = title or (heading.group(1) if heading else page)
    return f"- [{name}](docs/{page}){_first_sentence(text)}"


def _first_sentence(text: str) -> str:
    """Return the first sentence of a page's text, behind a colon; "" if it begins otherwise."""
    body = re.sub(r"<!--.*?-->|```.*?```", "", text, flags=re.DOTALL)
    for paragraph in body.split("\n\n"):
        words = " ".join(paragraph.split())
        if words and words[0] not in "#|-:!><*":
            sentence = re.split(r"(?<=[.:])\s", words)[0]
            if sentence.endswith("."):
                return ": " + re.sub(LINK, r"\1", sentence)
    return ""
