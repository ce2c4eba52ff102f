"""What is written to a run after its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import RunError
from hookline.masking import mask_secrets
from hookline.runs.jsonable import to_jsonable
from hookline.runs.lease import Lease
from hookline.runs.manifest import read_run_manifest, write_run_manifest

__all__ = ["amend_manifest"]

log = logging.getLogger("hookline")


def amend_manifest(folder: Path, field: str, items: Mapping[str, Any]) -> None:
    """Add items to a field of the manifest of a run that has ended.

    Nothing is written if another process writes the run by now.
    """
    try:
        lease = Lease.acquire(folder)
        try:
            manifest = read_run_manifest(folder)
            added = mask_secrets(to_jsonable(dict(items)), by_name=False)
            write_run_manifest(folder, {**manifest, field: {**manifest.get(field, {}), **added}})
        finally:
            lease.release()
    except (OSError, RunError) as error:
        log.warning("'%s' is not written to the manifest of %s: %s", field, folder, error)
