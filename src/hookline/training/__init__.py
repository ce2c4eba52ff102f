"""The parts of the trainer that are not the loop itself, one idea per file."""

from hookline.training.checks import (
    checked_model,
    checked_optimizers,
    device_for,
    match_schedulers,
)
from hookline.training.evaluation import evaluation, samples_in, tokens_in
from hookline.training.means import Means
from hookline.training.moment import TrainerMoment
from hookline.training.nan import LateNanCheck
from hookline.training.randomness import seed_everything
from hookline.training.wishes import Wishes

__all__ = [
    "LateNanCheck",
    "Means",
    "TrainerMoment",
    "Wishes",
    "checked_model",
    "checked_optimizers",
    "device_for",
    "evaluation",
    "match_schedulers",
    "samples_in",
    "seed_everything",
    "tokens_in",
]
