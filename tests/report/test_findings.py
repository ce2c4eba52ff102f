"""The findings of Lint in a report: at the top, with a red badge, and as data of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_report import HOSTILE, browser, wait_for  # noqa: F401 (a fixture)

import hookline
from hookline.report import make_report
from hookline.report.facts import describe_status


def train(folder: Path, *, zeroes: bool, ignore: tuple[str, ...] = ()) -> Path:
    """Train with Lint and an optimizer whose name is hostile; return the run's folder."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = type(HOSTILE, (torch.optim.SGD,), {})(model.parameters(), lr=0.01)
    lint = hookline.Lint(ignore=ignore)
    with hookline.attach(model, optimizer, hooks=[lint], runs=folder) as session:
        for x in torch.randn(12, 8, 4):
            model(x).square().mean().backward()
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
    return Path(session.run.path)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    return train(folder, zeroes=False, ignore=("labels-sorted",))


def facts_of(run: Path) -> dict[str, Any]:
    (facts,) = make_report(run).facts["runs"]
    return facts


def test_findings_that_are_errors_are_facts_and_make_the_badge_red(wrong: Path) -> None:
    facts = facts_of(wrong)
    (finding,) = facts["lint"]["findings"]
    assert (finding["check"], finding["severity"]) == ("gradients-not-zeroed", "error")
    assert finding["subject"] == HOSTILE
    assert finding["step"] > 1
    assert "zero_grad" in finding["fix"]
    assert (facts["lint"]["count"], facts["lint"]["errors"]) == (1, 1)
    assert facts["lint"]["checks"] > 5
    assert facts["lint"]["left_out"]["labels-sorted"] == "ignored"
    assert describe_status(facts) == ["bad", "completed, with 1 error found by Lint"]
    html = make_report(wrong).html
    assert "<script>document" not in html
    assert "<img" not in html


def test_a_run_without_findings_stays_green_and_says_which_checks_were_made(tmp_path: Path) -> None:
    facts = facts_of(train(tmp_path, zeroes=True))
    assert (facts["lint"]["findings"], facts["lint"]["errors"]) == ([], 0)
    assert describe_status(facts) == ["good", "completed"]
    data = make_report(train(tmp_path, zeroes=True)).html
    assert "checks, no finding." in data


def test_a_run_without_lint_has_no_findings(tmp_path: Path, browser: Any) -> None:  # noqa: F811
    run = hookline.runs.Run.create(tmp_path, config={}, seed=0, hooks=[])
    run.log(1, 0, "train/loss", 1.0)
    run.close()
    report = make_report(run.path)
    assert report.facts["runs"][0]["lint"] is None
    browser.get(report.write(tmp_path / "page.html").as_uri())
    wait_for(browser, "return document.body.dataset.ready")
    assert browser.find_elements("css selector", "#findings") == []


def test_the_page_shows_findings_first_as_text(
    wrong: Path,
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    browser.set_window_size(1280, 900)
    browser.get(make_report(wrong).write(tmp_path / "page.html").as_uri())
    wait_for(browser, "return document.body.dataset.ready")
    first = browser.find_element("css selector", "main > section")
    assert first.get_attribute("id") == "findings"
    (shown,) = first.find_elements("css selector", ".finding")
    for text in ("error", "gradients-not-zeroed", "at step", HOSTILE, "Fix: Call optimizer."):
        assert text in shown.text
    browser.execute_script("document.querySelectorAll('#findings summary').forEach(s => s.click())")
    assert "optimizer.zero_grad()" in shown.find_element("css selector", "pre").text
    assert "labels-sorted" in first.text
    (badge,) = browser.find_elements("css selector", "h1 + .pill")
    assert badge.get_attribute("class") == "pill bad"
    assert "Hookline report" in browser.title  # no script of the run has changed it
    assert browser.get_log("browser") == []
