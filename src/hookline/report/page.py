"""The page: one HTML file with its style, its scripts and its data.

Data is JSON in an element that browsers do not run, and the script only ever sets text. Beyond
that, the page's security policy allows exactly the scripts whose hashes it names, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

from hookline._version import __version__
from hookline.errors import RunError
from hookline.printable import escape_controls, printable

GENERATOR = '<meta name="generator" content="hookline'
"""The beginning of every report's first kilobyte has this."""

_SCRIPTS = (
    *("elements", "figures", "findings", "curves", "layers", "media", "hooks"),
    *("system", "details", "main"),
)


def read_plotly() -> str:
    """Return plotly's script, from its Python package.

    Raises:
        RunError: plotly is not installed.
    """
    try:
        plotly = import_module("plotly.offline")
    except ImportError as error:
        raise RunError(
            f"A report needs plotly, which cannot be imported ({error}): "
            "pip install 'hookline[report]'"
        ) from error
    return str(plotly.get_plotlyjs())


def make_page(data: dict[str, Any], plotly: str) -> str:
    """Return the page for the encoded runs."""
    data = _escape(data)
    style, script = _read("report.css"), "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();'
    scripts = [_for_html(plotly), script]
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    names = [str(run["facts"]["name"] or run["facts"]["id"]) for run in data["runs"]]
    values = {
        "POLICY": policy,
        "GENERATOR": f'{GENERATOR} {__version__}">',
        "TITLE": escape(printable(", ".join(names), 120)),
        "STYLE": style,
        "DATA": to_script_json(data),
        "PLOTLY": scripts[0],
        "SCRIPT": script,
        "VERSION": __version__,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], _read("report.html"))


def to_script_json(value: Any) -> str:
    """Return JSON that can stand in an HTML script element, whatever texts it has."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _escape(value: Any) -> Any:
    """Return data with the control characters of all texts escaped."""
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, dict):
        return {escape_controls(name): _escape(one) for name, one in value.items()}
    return [_escape(one) for one in value] if isinstance(value, list | tuple) else value


def _for_html(script: str) -> str:
    """Return a script in which nothing ends its HTML element, with the same meaning."""
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def _read(name: str) -> str:
    return files("hookline.report").joinpath("page", name).read_text("utf-8")
