"""Pictures of reports for the documentation: `python docs/scripts/screenshots.py`, with Chromium and playwright.

Each report is opened at a width of 1280 pixels; docs/images gets 1,000 pixels from a section on, in 64 colours.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import autopar
from autopar import zoo

IMAGES = Path(__file__).parents[1] / "images"
WIDTH, HEIGHT, COLOURS = 1280, 1000, 64

#: Name of a picture -> zoo model, its options, and the section that is on top of it.
REPORTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "report-llama3-8b": ("llama3-8b", {"mesh": (32, 8), "cluster": "dgx-h100:32"}, "header"),
    "report-gpt-39b": (
        "gpt-39b",
        {"stages": 16, "mesh": (64,), "num_microbatches": 32, "cluster": "dgx-h100:8"},
        "#timeline",
    ),
}


def main() -> None:
    chromium = shutil.which("chromium")
    with sync_playwright() as running, tempfile.TemporaryDirectory() as folder:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (model_name, options, section) in REPORTS.items():
            model = zoo.build(model_name)
            path = Path(folder, f"{name}.html")
            autopar.plan(model.step, *model.abstract_args(), **options).report(path)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(path.as_uri())
            page.evaluate("drawAll()")
            page.locator(section).evaluate("element => element.scrollIntoView()")
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
