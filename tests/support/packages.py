"""Installed packages that provide hooks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parent / "entry_point_package"


def install_package(target: Path) -> Path:
    """Install `acme-hooks` with pip, without network; return the folder that has it."""
    source, site = target / "source", target / "site"
    shutil.copytree(_SOURCE, source)  # building leaves files there
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def describe_package(folder: Path, package: str, points: dict[str, str]) -> None:
    """Write the metadata of a package with these entry points, as pip would."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[hookline.hooks]\n{lines}")
