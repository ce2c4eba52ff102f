"""TensorBoard: event files in the run's folder, or in `tensorboard/<run id>`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from hookline.arguments import user_path
from hookline.trackers.protocol import TrackedRun, TrackedValue, log_each


class TensorBoardTracker:
    """Writes TensorBoard's event files.

    Args:
        folder: where to write; by default `tensorboard` in the run's folder, and for a run without
            a folder `tensorboard/<run id>`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, Any]:
        """Open a new event file; TensorBoard shows all of a folder as one run."""
        from torch.utils.tensorboard.writer import SummaryWriter

        default = Path("tensorboard", run.id) if run.folder is None else run.folder / "tensorboard"
        folder = default if self._folder is None else user_path(self._folder) / run.id
        self._writer = SummaryWriter(str(folder))
        self._write_hyperparameters(run.hyperparameters)
        shown = json.dumps(run.manifest, indent=1, ensure_ascii=False)
        self._writer.add_text("hookline/manifest", f"```json\n{shown}\n```", 0)
        self._writer.flush()
        return {
            "folder": str(folder if run.folder is None else os.path.relpath(folder, run.folder))
        }

    def log(self, values: Sequence[TrackedValue]) -> None:
        """Write values; those of a step that were logged in one second have one time."""
        try:
            self._write_scalars([value for value in values if value.kind == "scalar"])
            log_each(self._write, [value for value in values if value.kind != "scalar"])
        finally:
            self._writer.flush()

    def rewind(self, step: int, values: Sequence[TrackedValue]) -> None:
        """Let TensorBoard drop what it has from a step on."""
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        session = events.SessionLog(status=events.SessionLog.START)
        self._writer.file_writer.add_event(events.Event(session_log=session), step)
        self.log(values)

    def finish(self, status: str) -> None:
        """Close the file."""
        self._writer.close()

    def _write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in hyperparameters.items()
        }
        for summary in hparams(plain, {}):
            self._writer.file_writer.add_summary(summary)

    def _write_scalars(self, values: Sequence[TrackedValue]) -> None:
        """Write scalars, those of a step in one event: each event takes time in the interpreter."""
        summary_class: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        for (step, _), group in groupby(values, lambda value: (value.step, int(value.time))):
            scalars = list(group)
            added = [summary_class.Value(tag=one.name, simple_value=one.value) for one in scalars]
            self._writer.file_writer.add_summary(summary_class(value=added), step, scalars[0].time)

    def _write(self, value: TrackedValue) -> None:
        writer, at = self._writer, {"global_step": value.step, "walltime": value.time}
        if value.kind == "text":
            writer.add_text(value.name, value.value, **at)
        elif value.kind == "histogram":
            self._write_histogram(value)
        else:
            self._write_image(value)

    def _write_histogram(self, value: TrackedValue) -> None:
        counts, edges = value.value["counts"], [float(edge) for edge in value.value["edges"]]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        pairs = list(zip(middles, counts, strict=True))
        self._writer.add_histogram_raw(
            value.name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(middle * count for middle, count in pairs),
            sum_squares=sum(middle * middle * count for middle, count in pairs),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=value.step,
            walltime=value.time,
        )

    def _write_image(self, value: TrackedValue) -> None:
        summary_class: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        data = Path(value.value).read_bytes()
        width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
        image = summary_class.Image(
            height=height, width=width, colorspace=3, encoded_image_string=data
        )
        summary = summary_class(value=[summary_class.Value(tag=value.name, image=image)])
        self._writer.file_writer.add_summary(summary, value.step, value.time)
