"""Make the pictures of the README and the docs: `.venv/bin/python tools/pictures.py`.

The pictures of the report are taken in chromium, of a run of the demo that this program trains. The
picture of activation patching is drawn, with matplotlib, from what the notebook printed.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import hookline
from hookline.cli.demo_command import make_trainer

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
NOTEBOOK = ROOT / "notebooks" / "activation_patching.ipynb"
NAME = "small GPT"
# What a picture shows of a report: from the top of the first element to the end of the last one.
SECTIONS = {"report": ("#top", "#curves"), "report_gradients": ("#gradients", "#gradients")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(Path(folder))
        driver = open_browser()
        try:
            driver.get(page.as_uri())
            for picture, (first, last) in SECTIONS.items():
                (IMAGES / f"{picture}.png").write_bytes(take(driver, first, last))
        finally:
            driver.quit()
    draw_patching(IMAGES / "probe_patching.png")


def write_report(folder: Path) -> Path:
    """Train the demo's model, name the run, and return the path of its report."""
    torch.set_num_threads(1)
    trainer, train, val = make_trainer(400, folder, seed=0)
    trainer.fit(train, val)
    assert trainer.run is not None
    manifest = trainer.run.path / "manifest.json"
    fields = json.loads(manifest.read_text(encoding="utf-8")) | {"name": NAME}
    manifest.write_text(json.dumps(fields), encoding="utf-8")
    page = folder / "report.html"
    hookline.make_report(trainer.run.path).write(page)
    return page


def open_browser() -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit("chromium is not installed")
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1240,1400"):
        options.add_argument(argument)
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )


def take(driver: Any, first: str, last: str) -> bytes:
    """Return a picture from the top of one element to the end of another."""
    driver.execute_script(f"document.querySelector('{last}').scrollIntoView()")
    time.sleep(2)  # charts are drawn when they come into view
    driver.execute_script("window.scrollTo(0, 0)")
    top, bottom = (
        driver.execute_script(
            "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [box.top + scrollY, box.bottom + scrollY]",
            name,
        )
        for name in (first, last)
    )
    clip = {"x": 0, "y": top[0], "width": 1240, "height": bottom[1] - top[0], "scale": 1}
    options = {"clip": clip, "captureBeyondViewport": True}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"])


def draw_patching(path: Path) -> None:
    """Draw the table that the notebook has printed as a map with labels."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("agg")

    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    printed = "".join(
        line for cell in cells for out in cell.get("outputs", ()) for line in out.get("text", ())
    )
    rows = re.findall(r"^transformer\.\S+((?: +-?\d\.\d\d)+)$", printed, re.MULTILINE)
    values = [[float(value) for value in row.split()] for row in rows]
    blocks = ["embeddings", *(f"after block {i}" for i in range(len(values) - 1))]
    positions = [str(position) for position in range(len(values[0]))]
    positions[0] += "\n(the answer)"
    positions[-1] += "\n(the question)"

    figure, axes = pyplot.subplots(figsize=(8.2, 3.7), dpi=125)
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "black" if value > 0.6 else "white"
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(positions)), positions)
    axes.set_yticks(range(len(blocks)), blocks)
    axes.set_xlabel("position of the patched activation in the prompt")
    axes.set_ylabel("where it is patched")
    axes.set_title("How much of the answer one patched activation brings back")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, label="share of the answer", format="{x:.0%}")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
