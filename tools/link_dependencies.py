"""Link what a wheel depends on into the virtual environment in which it is installed.

    python -m venv --without-pip FOLDER
    python -m pip --python FOLDER/bin/python install --no-deps dist/*.whl
    python tools/link_dependencies.py FOLDER

Only what the wheel declares is linked, and what that depends on: an import that it does not declare
fails, as it would for users. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement


def needed_by(package: Distribution, extras: set[str]) -> list[Requirement]:
    """Return what a package requires on this machine, with these of its extras."""
    environments = [{"extra": extra} for extra in extras or {""}]
    required = [Requirement(text) for text in package.requires or ()]
    return [
        each
        for each in required
        if each.marker is None or any(map(each.marker.evaluate, environments))
    ]


def find_dependencies(package: Distribution) -> dict[str, Distribution]:
    """Return the installed packages that a package needs, directly or not, by name.

    Raises:
        SystemExit: the version that is installed is not one of those that are declared.
    """
    found: dict[str, Distribution] = {}
    seen = set[str]()
    waiting = needed_by(package, set())
    while waiting:
        required = waiting.pop()
        if str(required) in seen:
            continue
        seen.add(str(required))
        installed = distribution(required.name)
        if not required.specifier.contains(installed.version, prereleases=True):
            raise SystemExit(f"{required} is required, and {installed.version} is installed.")
        found[installed.name] = installed
        waiting += needed_by(installed, required.extras)
    return found


def link_files(package: Distribution, folder: Path) -> None:
    """Link a package's modules and metadata into a folder."""
    for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(str(package.locate_file(name))))


def main() -> None:
    (folder,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    (wheel,) = distributions(path=[str(folder)])
    packages = find_dependencies(wheel)
    for package in packages.values():
        link_files(package, folder)
    print(f"Linked {len(packages)} packages that {wheel.name} {wheel.version} depends on.")


if __name__ == "__main__":
    main()
