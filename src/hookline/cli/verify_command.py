"""`hookline verify`: checks a training run by repeating it for a few steps."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from hookline.cli.command_base import Json, bad_value, exit_on_interrupt
from hookline.cli.text_output import print_json, print_text, progress_bar
from hookline.cli.train_command import Config, Overrides, TrustedPackages, load_config
from hookline.errors import HooklineError


def verify(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Number of steps of each run, 2 or more. By default one and a half epochs, or 20 "
            "steps if an epoch has more than 40.",
            metavar="INTEGER",
            show_default=False,
        ),
    ] = None,
    trust: TrustedPackages = None,
    as_json: Json = False,
) -> None:
    """Check that resuming is exact, that hooks only observe, and that seeds determine weights.

    It trains several times for a few steps and compares losses, batches, weights, optimizers,
    random states and the states of hooks, bit for bit. If two runs differ, it names the hook, the
    loader or the module that makes the difference. Runs are written to a temporary folder.

    Example: **hookline verify train.yaml --steps 30**

    Exit codes: 0 if all checks have passed, 1 if one has failed.
    """
    if steps is not None and steps < 2:
        raise bad_value("--steps", f"it is {steps}; expected a whole number of 2 or more.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise HooklineError(
            "`hookline verify` trains in one process, and torchrun has started "
            f"{os.environ['WORLD_SIZE']}. Start it without torchrun."
        )
    with exit_on_interrupt():
        folder = load_config(config, overrides, trust).folder
        from hookline.config_files.trust import importable
        from hookline.verification import verify as verify_training

        def make_trainer() -> Any:
            training = load_config(config, overrides, trust)
            data = training.loaders, training.val_loaders
            return training.trainer if data == (None, None) else (training.trainer, *data)

        with importable(folder), progress_bar() as watch:
            report = verify_training(make_trainer, steps, watch=watch)
    if as_json:
        print_json(report.as_dict())
    else:
        print_text(str(report))
    if not report.ok:
        raise typer.Exit(1)
