"""Run the Python code of README.md in an empty folder, with the installed package."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import hookline

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    installed = Path(hookline.__file__).resolve()
    if installed.is_relative_to(ROOT / "src"):
        raise SystemExit(f"{installed} is the checkout, not an installed wheel.")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
        os.chdir(ROOT)
    print(f"README.md runs with hookline {hookline.__version__} in {installed.parent}")


if __name__ == "__main__":
    main()
