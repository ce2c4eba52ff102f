"""What a trainer writes down, by kind, and what it shows."""

from __future__ import annotations

import json

import pytest
import torch
from loops import batches, fit, make

import hookline
from hookline import Trainer, TrainerConfig
from hookline.runs import read_records


def fit_and_read(tmp_path, *hooks, **options):
    trainer = fit(*hooks, data=batches(2), **{"runs": tmp_path} | options)
    lines = (trainer.run.path / "metrics.jsonl").read_text().splitlines()
    return trainer, [json.loads(line) for line in lines]


def test_values_are_recorded_by_kind(tmp_path):
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, model):
            trainer.log("scalar", torch.tensor(2.5))
            trainer.log("words", "hello", kind="text")
            trainer.log("weights", model.first.weight.detach(), kind="histogram")
            trainer.log("picture", torch.rand(3, 4, 5), kind="image")

    trainer, records = fit_and_read(tmp_path, Logs())
    by_name = {record["name"]: record for record in records if record["step"] == 1}
    assert by_name["scalar"]["value"] == 2.5
    assert (by_name["words"]["kind"], by_name["words"]["value"]) == ("text", "hello")
    assert sum(by_name["weights"]["value"]["counts"]) == 128
    assert (trainer.run.path / by_name["picture"]["value"]["path"]).read_bytes()[1:4] == b"PNG"


def test_what_is_logged_carries_its_step_and_epoch(tmp_path):
    class Logs(hookline.Hook):
        def on_step_end(self, trainer, step):
            trainer.log("x", step)

    _, records = fit_and_read(tmp_path, Logs(), max_epochs=2)
    told = [(r["step"], r["epoch"], r["value"]) for r in records if r["name"] == "x"]
    assert told == [(1, 0, 1), (2, 0, 2), (3, 1, 3), (4, 1, 4)]


def test_elsewhere_than_in_a_terminal_progress_is_plain_lines_and_a_table(tmp_path, capsys):
    class Fails(hookline.Hook):
        def on_step_end(self):
            raise RuntimeError("my bad")

    fit_and_read(tmp_path, Fails(), progress="plain")
    out = capsys.readouterr().out
    assert "step 2" in out
    assert "loss" in out
    assert "fails" in out
    assert "failures" in out


@pytest.mark.parametrize("off", ["off", False])
def test_the_display_is_off_with_one_setting(tmp_path, capsys, off):
    fit_and_read(tmp_path, progress=off)
    assert capsys.readouterr().out == ""


def test_an_unknown_kind_is_an_error_also_without_a_record():
    trainer = Trainer(TrainerConfig(runs=None, progress="off"), *make())
    with pytest.raises(hookline.RunError, match=r"Unknown kind 'picture'\. There are 'scalar'"):
        trainer.log("a", 1.0, kind="picture")


def test_epoch_means_have_one_name_in_the_run_of_both_loops(tmp_path):
    model, optimizer = make()

    def step_fn(model, batch):
        x, y = batch
        return {"loss": (model(x) - y).square().mean(), "size": len(x)}

    config = {"runs": tmp_path / "trainer", "progress": "off"}
    trainer = Trainer(config, model, optimizer, step_fn=step_fn)
    trainer.fit({"web": batches(2), "code": batches(1)})
    names = {record["name"] for record in read_records(trainer.run.path / "metrics.jsonl")}
    assert {"train/loss_epoch", "train/size_epoch", "train/dl_web/size_epoch"} <= names
    assert {"train/loss", "train/size"} <= names

    with hookline.attach(model, optimizer, runs=tmp_path / "loop") as session, session.epoch():
        for batch in session.batches(batches(2)):
            outputs = step_fn(model, batch)
            session.log("size", outputs["size"])
            outputs["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    names = {record["name"] for record in read_records(session.run.path / "metrics.jsonl")}
    assert {"train/loss", "train/size", "train/loss_epoch", "train/size_epoch"} <= names
