"""Reports of runs: what they say, what they survive, and how they look in a browser."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline
from hookline.report import make_report
from hookline.report.document import write_report_at_end
from hookline.report.page import to_script_json
from hookline.report.series import SampledSeries

HOSTILE = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='h'\">"
)
SPIKE = 11
ROOT = Path(__file__).parents[2]


class Incidents(hookline.Hook):
    """Fails, skips a step, makes the loss spike, toggles, saves, and logs every kind of value."""

    intervenes = True

    def __init__(self) -> None:
        self.skipped = False

    def on_train_batch_start(self, batch: Any, step: int) -> None:
        if step == SPIKE - 1:
            batch[0].mul_(30)

    def on_step_end(self, trainer: Any, step: int) -> None:
        trainer.log(f"activations/{HOSTILE}/std", step)
        trainer.log("activations/second/std", 2 * step)
        trainer.log("gradients/first/norm", 1.0)
        trainer.log("gradients/second/norm", 1e-9)
        trainer.log("gradients/third/norm", 1.0)
        trainer.log(f"weights/{HOSTILE}", torch.arange(10.0) * step, kind="histogram")
        trainer.log("sample", f"step {step} {HOSTILE}", kind="text")
        trainer.log("picture", torch.rand(3, 4, 5), kind="image")
        if step == 3:
            raise ValueError(HOSTILE)
        if step == 5 and not self.skipped:
            self.skipped = True
            trainer.skip_optimizer_step(reason=HOSTILE)
        if step == 7:
            trainer.log("train/tokens_seen", 70)  # as samples do: not at the end
            trainer.hooks.disable_hook("idle")
        if step == 8:
            trainer.save_checkpoint()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    model = torch.nn.Linear(4, 1)
    config = hookline.TrainerConfig(max_epochs=3, runs=folder, progress="off", seed=0)
    trainer = hookline.Trainer(
        config,
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        loss_fn=torch.nn.functional.mse_loss,
        name=HOSTILE,
        tokens_fn=lambda batch: 10,
    )
    trainer.add_hook(Incidents(), name=HOSTILE)
    trainer.add_hook(hookline.Hook(), name="idle")
    trainer.add_hook(hookline.LossSpikeDetector(50.0, min_steps=5, steps_after=5))
    trainer.fit(torch.utils.data.DataLoader(data, 8))
    return Path(trainer.run.path)


def test_a_report_states_the_facts_of_a_run(run: Path) -> None:
    report = make_report(run)
    (facts,) = report.facts["runs"]
    assert (facts["status"], facts["steps"], facts["tokens"]) == ("completed", 14, 150)
    assert (facts["steps_skipped"], facts["checkpoints_saved"]) == (1, 1)
    assert facts["loss_spikes"] == 1
    assert facts["metrics"]["train/loss"]["highest_step"] == SPIKE
    assert 0 < facts["steps_per_second"] == 14 / facts["seconds"]
    assert set(facts["phase_seconds"]) >= {"data", "forward", "backward", "hooks", "other"}
    assert facts["hooks"]["failures"] == 1
    assert list(facts["gradients"]["vanishing"]) == ["second"]
    json.dumps(facts, allow_nan=False)
    assert len(report.html) < 10_000_000


def test_nothing_of_a_run_is_markup_in_its_page(run: Path) -> None:
    html = make_report(run).html
    assert "hacked" in html  # it is there, as data
    assert "<script>document" not in html
    assert "<img" not in html
    assert json.loads(to_script_json(HOSTILE + "\u2028&")) == HOSTILE + "\u2028&"


def test_a_report_works_on_copied_damaged_and_empty_runs(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(run, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("this is not JSON\n{")
    (facts,) = make_report(copy).facts["runs"]
    assert facts["steps"] == 14
    assert any("metrics.jsonl" in line for line in facts["left_out"])
    for name in ("metrics.jsonl", "events.jsonl"):
        (copy / name).unlink()
    (facts,) = make_report(copy).facts["runs"]
    assert any("missing" in line for line in facts["left_out"])


def test_several_runs_have_a_table_of_what_differs(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["config"]["seed"] = 7
    (other / "manifest.json").write_text(json.dumps(manifest))
    differences = make_report(run, other).facts["differences"]
    assert differences["config"] == [["seed", "0", "7"]]


def test_sampling_keeps_extremes_and_counts() -> None:
    series = SampledSeries()
    for start in range(0, 10_000, 100):
        rows = [(i, 1.5, float(i % 10)) for i in range(start, start + 100)]
        if start == 5_000:
            rows[37], rows[38] = (5037, 1.5, 999.0), (5038, 1.5, math.nan)
        series.add(rows, 64)
    assert len(series) <= 64
    assert (series.highest, series.highest_step, max(series.highs)) == (999.0, 5037.0, 999.0)
    assert (series.not_finite, series.not_finite_steps) == (1, [5038.0])
    assert sum(series.counts) == 9_999


def test_a_completed_run_gets_a_report_unless_it_is_turned_off(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    opened = hookline.open_run(copy)
    assert write_report_at_end(opened, "completed") is None  # turned off by conftest.py
    monkeypatch.setenv("HOOKLINE_REPORT", "1")
    assert write_report_at_end(opened, "preempted") is None
    assert write_report_at_end(opened, "completed", wanted=False) is None
    assert write_report_at_end(opened, "completed") == copy / "report.html"


def test_the_command_writes_a_file_and_prints_facts(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "hookline", "report", str(run), "-o", str(out), "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed)["runs"][0]["steps"] == 14
    assert out.stat().st_size > 1_000_000
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    command[5:7] = ["-o", str(other)]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "is not a report" in failed.stderr
    assert other.read_text() == "mine"
    del command[5:7]  # without -o, --json writes no page
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert json.loads(printed)["report"] is None
    assert sorted(tmp_path.iterdir()) == [other, out]


# -- in a browser ---------------------------------------------------------------------------------


def find_programs() -> tuple[str, str]:
    """Return the paths of Chromium and of its driver, or skip the test.

    CI sets HOOKLINE_TEST_BROWSER=1 and fails without them: tests that are skipped everywhere show
    nothing.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if chromium is not None and driver is not None:
        return chromium, driver
    missing = [] if chromium else ["chromium"]
    missing += [] if driver else ["chromedriver"]
    reason = f"{' and '.join(missing)} not installed, which show the report in a browser"
    if os.environ.get("HOOKLINE_TEST_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    chromium, driver = find_programs()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--no-first-run", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver, env={**os.environ})
    opened = webdriver.Chrome(options=options, service=service)
    yield opened
    opened.quit()


def wait_for(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(lambda page: page.execute_script(script))


def open_page(browser: Any, *runs: Path) -> None:
    page = make_report(*runs).write(runs[0].parent / "shown.html")
    browser.set_window_size(1280, 900)
    browser.get(page.as_uri())
    wait_for(browser, "return document.body.dataset.ready")
    wait_for(browser, "return document.querySelector('#curves .main-svg') !== null")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_in_a_browser(run: Path, browser: Any, tmp_path: Path, width: int) -> None:
    page = make_report(run).write(tmp_path / "report.html")
    browser.set_window_size(width, 900)
    browser.get(page.as_uri())
    wait_for(browser, "return document.body.dataset.ready")
    # Charts are drawn when they come into view.
    for event in ("beforeprint", "afterprint"):
        browser.execute_script(f"window.dispatchEvent(new Event('{event}'))")
    count = "return document.querySelectorAll('.chart .main-svg').length"
    assert wait_for(browser, count) > 6
    traces = "return document.querySelector('#curves .chart').data.map(t => t.name)"
    names = browser.execute_script(traces)
    marks = {"checkpoint", "skipped step", "hook switched", "failure", "loss spike"}
    assert {"train/loss", *marks} <= {*names}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for axis, title in (("time", "time in seconds"), ("tokens", "tokens"), ("steps", "steps")):
        browser.execute_script(f"document.querySelector('[data-value={axis}]').click()")
        shown = "return document.querySelector('#curves .chart').layout.xaxis.title.text"
        assert browser.execute_script(shown) == title
    browser.execute_script("""
        const chart = document.querySelector('#curves .chart');
        chart.scrollIntoView({behavior: 'instant'});
        Plotly.Fx.hover(chart, [{curveNumber: 0, pointNumber: 3}]);
    """)
    assert wait_for(browser, "return document.querySelectorAll('#curves .hoverlayer *').length")
    before = browser.execute_script("return document.documentElement.dataset.theme")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") != before
    assert "onerror" in browser.execute_script("return document.querySelector('h1').textContent")
    assert "Hookline report" in browser.title  # no script of the run has changed it
    images = browser.execute_script("return [...document.images].map(i => [i.naturalWidth, i.src])")
    assert [size for size, _ in images] == [5] * 4  # the newest, drawn
    assert all(source.startswith("data:image/png;base64,") for _, source in images)
    assert browser.get_log("browser") == []


def test_a_loss_spike_is_marked_on_the_curve_and_explained(run: Path, browser: Any) -> None:
    (event,) = hookline.open_run(run).events("loss_spike")
    open_page(browser, run)
    find = "document.querySelector('#curves .chart').data.find(t => t.name === '%s')"
    x, y, text = browser.execute_script(
        f"const mark = {find % 'loss spike'}; return [mark.x[0], mark.y[0], mark.text[0]]"
    )
    assert (event["step"], x, y) == (SPIKE, SPIKE, pytest.approx(event["loss"]))
    assert "loss spike" in text
    highest = browser.execute_script(f"return Math.max(...{find % 'train/loss'}.y)")
    assert highest == pytest.approx(event["loss"], rel=1e-4)  # the curve goes through the mark
    browser.execute_script("document.querySelector('#curves details summary').click()")
    (details,) = browser.find_elements("css selector", "#curves details")
    assert f"Step {SPIKE}: loss" in details.text
    assert all(str(i) in details.text for i in event["batches"][0]["indices"])
    assert "activations/second/std" in details.text
    # The mark stays at the spike on the other axes, and when the curve is smoothed.
    browser.execute_script("document.querySelector('[data-value=tokens]').click()")
    assert browser.execute_script(f"return {find % 'loss spike'}.y[0]") == y
    assert browser.get_log("browser") == []


def test_the_page_prints_light_and_as_wide_as_paper(run: Path, browser: Any) -> None:
    open_page(browser, run)
    browser.execute_script("document.documentElement.dataset.theme = 'dark'")
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    widths = browser.execute_script(
        "return [...document.querySelectorAll('.chart .main-svg')].map(c => c.clientWidth)"
    )
    assert len(widths) > 6
    assert max(widths) <= 700
    root = "return [document.documentElement.dataset.theme, document.querySelectorAll('%s').length]"
    assert browser.execute_script(root % "details:not([open])") == ["light", 0]
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    theme, open_details = browser.execute_script(root % "details[open]")
    assert (theme, open_details) == ("dark", 0)
    assert len(browser.print_page()) > 100_000  # a PDF with charts, as base64
    assert browser.get_log("browser") == []


def test_runs_of_the_same_name_are_told_apart(run: Path, browser: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"v": 1, "step": i, "time": 1.7e9 + i, "name": n, "kind": "scalar", "value": i}
            )
            + "\n"
            for i in range(5)
            for n in ("train/loss", "only/here")
        )
    )
    open_page(browser, run, other)
    titles = browser.execute_script(
        "return [...document.querySelectorAll('#top h3')].map(h => h.textContent)"
    )
    assert len(titles) == len({*titles}) == 2
    names = "return document.querySelector('#curves .chart').data.map(t => t.name)"
    losses = [name for name in browser.execute_script(names) if "train/loss" in str(name)]
    assert len(losses) == len({*losses}) == 2
    assert browser.execute_script("return document.querySelectorAll('#differences tr').length") > 2
    assert browser.get_log("browser") == []


def test_control_characters_of_names_and_texts_are_escaped_once_in_the_page(tmp_path: Path) -> None:
    run = hookline.runs.Run.create(tmp_path, config={}, seed=0, hooks=[])
    run.log(1, 0, "n\u202em", 1.0)
    run.log(1, 0, "note", "a\u202eb", kind="text")
    run.close()
    html = make_report(run.path).html
    for begin, end in ("nm", "ab"):
        assert rf"{begin}\\u202e{end}" in html  # as JSON has a backslash
        assert rf"{begin}\u202e{end}" not in html
