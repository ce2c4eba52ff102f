"""The start and the end of a trainer's run: its identity, record, crash, preemption and report.

Preemption: a signal asks the process to end, the state is saved, and Slurm requeues the job.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.dispatch import Summary
from hookline.loop.control_requests import SaveRequest, includes_full_save, split_requests
from hookline.runs.identity import Identity, describe_training, list_parameters
from hookline.runs.location import find_run_of_checkpoint, shorten_path

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

log = logging.getLogger("hookline")

_TIMEOUT = 30.0  # seconds
_unanswered: list[subprocess.Popen[str]] = []  # calls that go on


def describe_run(trainer: Trainer) -> Identity:
    """Return what is trained, for the run's manifest and for finding a run to continue."""
    config = trainer.config
    return Identity(
        config.model_dump(mode="json"),
        describe_training(trainer),
        list_parameters(trainer),
        trainer.name,
        trainer.tags,
        trainer.hparams,
        config_is_complete=hasattr(config, "training"),  # that of a config file
    )


def start_record(
    trainer: Trainer, identity: Identity, restored: Path | None, parent: Any
) -> tuple[str, Path] | None:
    """Start a run, or continue the folder of a resumed one; return its id and folder."""
    config, record = trainer.config, trainer.loop.record
    resumed = restored is not None and parent is None and config.runs is not None
    folder = find_run_of_checkpoint(restored) if restored and resumed else None
    if resumed and folder is None:
        trainer.announce(
            f"The checkpoint {restored} is not in the folder of its run: a new run is "
            f"written, whose records begin after step {trainer.step}."
        )
    record.begin(
        identity,
        trainer.hooks.describe(),
        seed=config.seed,
        device=trainer.device,
        step=trainer.step,
        resumed_run=folder,
        restored=restored,
        position=trainer.loop.state.restored_position,
        parent=parent,
    )
    run = record.run
    return None if run is None else (run.id, run.path.absolute())


def save_after_crash(trainer: Trainer) -> None:
    """Save the state after an exception, as `checkpoints.on_crash` asks."""
    strategy = trainer.strategy
    if trainer.run is None:
        return
    if strategy.is_sharded and strategy.is_distributed:
        log.warning(
            "The state after the exception is not saved (checkpoints.on_crash): this process "
            "has a shard of the model, and the others may not be there any more.",
            extra={"own_rank": True},
        )
        return
    own = f"_rank{strategy.processes.rank}" if strategy.is_distributed else ""
    folder = Path(trainer.run.checkpoints) / f"crash_{trainer.step:06d}{own}"
    try:
        trainer.loop.checkpoints.save_after_crash(folder)
    except Exception:  # the error that ended training matters more
        log.exception("The state after the exception could not be saved.")


def summarize_hooks(trainer: Trainer) -> Summary:
    """Return the summary of the hooks in all processes; after an error, of this process only."""
    summary = trainer.hooks.summary()
    if not trainer.strategy.is_distributed or trainer.status in ("error", "interrupted"):
        return summary
    # Options may be any objects: they are not sent.
    hooks = [replace(hook, options={}, unmasked_options={}) for hook in summary.hooks]
    sent = replace(summary, hooks=tuple(hooks))
    gathered = trainer.strategy.processes.gather_on_main(sent)
    return replace(summary, other_ranks=tuple(gathered[1:])) if gathered else summary


def write_report(trainer: Trainer, say: Callable[[str], None]) -> None:
    """Write the run's report, unless a signal asks this process to end soon."""
    is_wanted = trainer.strategy.processes.is_main and trainer.stop_signal is None
    if is_wanted and trainer.run is not None and not trainer.loop.is_forked:
        from hookline.report.document import write_report_at_end

        made = write_report_at_end(trainer.run, trainer.status, wanted=trainer.config.report)
        if made is not None:
            say(f"report {shorten_path(made)}")


# -- preemption ------------------------------------------------------------------------------------


class Preempted(BaseException):
    """A signal asked the process to end, and the state was saved."""


def save_for_signal(
    trainer: Trainer, say: Callable[[str], None], *, can_save: bool
) -> signal.Signals:
    """Save because of a signal, in all processes; return the signal that they end for.

    Nothing is saved unless `can_save`: all batches of a step were trained on.
    """
    loop, requests, processes = trainer.loop, trainer.loop.requests, trainer.strategy.processes
    signals = [one for one in processes.gather(requests.signal) if one]
    received = signal.SIGINT if signal.SIGINT in signals else signals[0]
    requests.end_for(received)
    loop.record.event("signal", step=trainer.step, signal=received.name)
    requested = loop.checkpoints.gather_requests()
    if not can_save:
        requested = []
        log.warning(
            "%s has also ended the workers of a loader, in the middle of a step with several "
            "batches. Nothing is saved: a resumed run continues from an earlier checkpoint.",
            received.name,
        )
    elif trainer.run is None:
        log.warning(
            "%s: training ends, and nothing is saved, because there is no run folder (`runs` "
            "is None).",
            received.name,
        )
    elif not includes_full_save(requested, trainer.run.checkpoints):
        requested.append(SaveRequest())
    requested = processes.broadcast(requested)  # rank 0 knows the run's folder
    for kind in reversed(split_requests(requested)):  # there may be time for only one
        if loop.is_forked:
            break
        saved = loop.checkpoints.save(loop.checkpoints.with_folders(kind), wait=True)
        if saved is not None:
            say(f"{received.name}: saved {shorten_path(saved)}")
    return received


def requeue(trainer: Trainer) -> None:
    """Requeue the job if the settings ask for it, and note that Slurm brings it back."""
    requests = trainer.loop.requests
    if trainer.config.checkpoints.requeue:
        requests.is_requeued = "SLURM_JOB_ID" in os.environ  # Slurm ends the job with SIGTERM
        is_main = trainer.strategy.processes.is_main
        if is_main and not requeue_slurm_job(requests.seconds_before_kill()):
            requests.is_requeued = False


def requeue_slurm_job(seconds: float | None = None) -> bool:
    """Requeue the Slurm job of this process; return whether Slurm has accepted it, or still may.

    Outside of a Slurm job this does nothing. A failure is logged and does not raise: the checkpoint
    is saved already, and the job can be submitted again by hand. Of the seconds that this process
    has left, half is waited for an answer, 30 at most. A call that is not answered then goes on,
    because nothing else brings the job back.
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
