"""Fixtures that several test files use."""

from __future__ import annotations

from pathlib import Path

import pytest
from packages import install_package


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that provides hooks, `acme-hooks`."""
    return install_package(tmp_path_factory.mktemp("package"))
