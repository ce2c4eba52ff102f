"""The start and the end of a trainer's run: its identity, its record, its crash, its report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.dispatch import Summary
from hookline.runs.identity import Identity, describe_training, list_parameters
from hookline.runs.location import find_run_of_checkpoint, shorten_path

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

log = logging.getLogger("hookline")


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
