"""Requeueing the job of a training run that Slurm preempts."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import Any

__all__ = ["requeue_slurm_job"]

log = logging.getLogger("hookline")

_TIMEOUT = 30.0  # seconds
_unanswered: list[subprocess.Popen[str]] = []  # calls that go on


def requeue_slurm_job(seconds: float | None = None) -> bool:
    """Requeue the Slurm job of this process; return whether Slurm has accepted it, or still may.

    Outside of a Slurm job this does nothing. A failure is logged as an error and does not raise:
    the checkpoint is saved already, and the job can be submitted again by hand. In an array job the
    task is requeued, not the array.

    Args:
        seconds: how long this process has left; half of it is waited for an answer, 30 seconds at
            most. A call that is not answered then goes on, because nothing else brings the job
            back.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    timeout = _TIMEOUT if seconds is None else min(_TIMEOUT, seconds / 2)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        call: subprocess.Popen[str] = subprocess.Popen(["scontrol", "requeue", job], **pipes)
    except OSError as error:
        reason = str(error)
    else:
        try:
            output, errors = call.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _unanswered.append(call)
            log.warning(
                "`scontrol requeue %s` has not answered within %.3g s. It goes on, and this "
                "process ends. If the job does not come back, submit it again; with --resume it "
                "continues from its last checkpoint.",
                *(job, timeout),
            )
            return True
        if call.returncode == 0:
            log.info("The Slurm job %s was requeued.", job)
            return True
        reason = f"exit code {call.returncode}: {(errors or output).strip()}"
    log.error(
        "The Slurm job %s could not be requeued: `scontrol requeue %s` failed (%s). Submit it "
        "again; with --resume it continues from its last checkpoint.",
        *(job, job, reason),
    )
    return False
