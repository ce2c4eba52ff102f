"""Requeueing the job of a training run that Slurm preempts."""

from __future__ import annotations

import logging
import os
import subprocess

__all__ = ["requeue_slurm_job"]

log = logging.getLogger("hookline")

_TIMEOUT = 30.0  # seconds; a job that is preempted has little time left


def requeue_slurm_job() -> bool:
    """Requeue the Slurm job of this process; return whether Slurm has accepted it.

    Outside of a Slurm job this does nothing. A failure is logged as an error and does not raise:
    the checkpoint is saved already, and the job can be submitted again by hand. In an array job the
    task is requeued, not the array.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            log.info("The Slurm job %s was requeued.", job)
            return True
        reason = f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
    log.error(
        "The Slurm job %s could not be requeued: `scontrol requeue %s` failed (%s). Submit it "
        "again; with --resume it continues from its last checkpoint.",
        *(job, job, reason),
    )
    return False
