"""The page: one HTML file with its style, its scripts and its data.

Data is JSON in an element that browsers do not run, and the script only ever sets text. Beyond
that, the page's security policy allows exactly the scripts whose hashes it names, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

from hookline._version import __version__
from hookline.errors import RunError
from hookline.printable import printable
from hookline.report.page_data import to_script_json

MARK = '<meta name="generator" content="hookline'
"""The beginning of every report's first kilobyte has this."""

_SCRIPTS = (
    *("elements", "figures", "curves", "layers", "media", "hooks"),
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
    parts = {
        "POLICY": policy,
        "MARK": f'{MARK} {__version__}">',
        "TITLE": escape(printable(", ".join(names), 120)),
        "STYLE": style,
        "DATA": to_script_json(data),
        "PLOTLY": scripts[0],
        "SCRIPT": script,
        "VERSION": __version__,
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], _read("report.html"))


def _for_html(script: str) -> str:
    """Return a script in which nothing ends its HTML element, with the same meaning."""
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def _read(name: str) -> str:
    return files("hookline.report").joinpath("page", name).read_text("utf-8")
