"""The report in headless Chromium: complete, readable, and with the figures of the plan.

Every plan is opened once. Without Chromium or playwright the tests are skipped. `python -m tests.plans.test_report`
measures the report of GPT-39B with all of its 48 layers.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import shutil
import tempfile
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import zoo
from autopar.bench.equal.case import dear
from autopar.errors import ArgumentError
from autopar.ir.text import seconds, size
from autopar.plans import cache as plan_cache
from autopar.plans.views.parallelism import describe
from autopar.plans.views.report import charts, pictures, tables
from autopar.plans.views.timeline import trace_events

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

#: Name -> zoo model, its sizes, and the options of its plan.
PLANS = {
    "data parallel": ("mlp-toy", {}, {"mesh": (8,), "pins": {"*params/*": P(), "*opt/*": P(), "batch/*": P("x")}}),
    "llama on 256": ("llama3-8b", {"layers": 4}, {"mesh": (32, 8), "cluster": "dgx-h100:32"}),
    "gpt-39b in stages": (
        "gpt-39b",
        {"layers": 16, "batch": 64},
        {"stages": 16, "mesh": (64,), "num_microbatches": 16, "cluster": "dgx-h100:8"},
    ),
    "moe on a pod": ("moe-toy", {}, {"mesh": (8, 8), "cluster": "tpu-v5e:8"}),
}  # fmt: skip

#: For every element with text of its own, the ratio of luminances (WCAG 2.1, 1.4.3) of the text and what is behind it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    const rect = element instanceof SVGElement && element.parentNode.querySelector(":scope > rect");
    if (rect && element.closest("svg[role=img]")) return rgba(getComputedStyle(rect).fill);
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] > 0) return color;
    }
    return [255, 255, 255, 255];
  };
  const ratios = [];
  for (const e of document.querySelectorAll("body *:not(tr:nth-child(n+20) *)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.matches("script, style, title, option") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const [a, b] = [luminance(rgba(svg ? style.fill : style.color)), luminance(behind(e))];
    ratios.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.trim().slice(0, 40)]);
  }
  return ratios;
}"""


#: The widths in pixels of the bars of one instruction, when the axis shows (low, high).
ZOOMED = """async ([id, name, low, high]) => {
  const chart = document.getElementById(id);
  await Plotly.relayout(chart, {"xaxis.range": [low, high]});
  const trace = (bar) => bar.parentNode.parentNode.__data__[0].trace;
  const bars = [...chart.querySelectorAll(".bars .point")];
  const named = bars.filter((bar) => trace(bar).customdata[bar.__data__.i][0] === name);
  return named.map((bar) => bar.getBoundingClientRect().width);
}"""


def events_of(plan, kind):
    """The spans of a plan's timeline: "passes" of ranks (all of one mesh), or "links", what they send and receive."""
    spans = [e for e in trace_events(plan)["traceEvents"] if e["ph"] == "X" and e["tid"] != 0]
    return [e for e in spans if (plan.pipelined and e["name"].startswith(("send", "recv"))) == (kind == "links")]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra test)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium.new_context(viewport={"width": 1280, "height": 900})  # one, which compiles plotly once
        chromium.close()


@pytest.fixture(scope="module", params=PLANS)
def plan(request):
    name, sizes, options = PLANS[request.param]
    model = zoo.build(name, **sizes)
    return autopar.plan(model.step, *model.abstract_args(), **options)


@pytest.fixture(scope="module")
def opened(browser, plan, tmp_path_factory):
    """The page of a plan at 1280 pixels, and what the console said."""
    path = tmp_path_factory.mktemp("report") / "plan.html"
    plan.report(path)
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on(
        "request", lambda request: said.append(f"request: {request.url}") if "plan.html" not in request.url else None
    )
    page.goto(path.as_uri())
    page.evaluate("drawAll()")
    yield page, said
    page.close()


def column(page, table, number):
    """The numbers of a column of a table, from the top."""
    cells = page.locator(f"[data-table={table}] tbody tr td:nth-child({number + 1})")
    return cells.evaluate_all("cells => cells.map(cell => +cell.dataset.value)")


def test_the_page_is_complete_and_silent(plan, opened):
    page, said = opened
    assert [line for line in said if not line.startswith(("request: data:", "request: file:"))] == []
    assert page.locator("[data-table=tensors] tbody tr").count() == len(plan.input_paths) + len(plan.output_paths)
    assert sum(column(page, "collectives", 3 if plan.pipelined else 2)) == sum(c.count for c, _ in plan.sent())
    assert page.locator("#devices svg rect").count() == math.prod(plan.mesh_sizes)
    assert page.locator("[data-table=stages] tbody tr").count() == (len(plan.stages) if plan.pipelined else 0)
    passes, links = events_of(plan, "passes"), events_of(plan, "links")
    assert page.locator("#timeline-chart .bars path").count() == len(passes) > 0
    assert page.locator("#transfers-chart .bars path").count() == len(links)
    assert bool(links) == plan.pipelined
    shown = page.locator("header").inner_text()
    assert seconds(plan.step_time_s) in shown
    assert size(plan.peak_memory_bytes) in shown


def test_zooming_reaches_every_instruction(plan, opened):
    page, _ = opened
    low, high = page.evaluate("document.getElementById('timeline-chart').layout.xaxis.range")
    page.focus("#timeline-chart")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    narrow = page.evaluate("document.getElementById('timeline-chart').layout.xaxis.range")
    assert narrow[1] - narrow[0] == pytest.approx((high - low) / 2)
    assert narrow[0] > low
    page.click("[data-zoom=timeline] [data-step=all]")
    assert page.evaluate("document.getElementById('timeline-chart').layout.xaxis.range") == pytest.approx([low, high])
    for chart, kind in (("timeline", "passes"), ("transfers", "links")):
        events = sorted(events_of(plan, kind), key=lambda event: event["dur"])
        for event in events[:3] + events[-3:]:
            begin, taken = event["ts"] / 1e3, event["dur"] / 1e3
            widths = page.evaluate(ZOOMED, [f"{chart}-chart", event["name"], begin - taken, begin + 2 * taken])
            assert max(widths) > 200, event
        if events:
            page.click(f"[data-zoom={chart}] [data-step=all]")


def test_hovering_shows_the_figures_of_the_plan(plan, opened):
    page, _ = opened
    longest = max(events_of(plan, "passes"), key=lambda event: event["dur"])
    traces = charts.timeline(plan, trace_events(plan)["traceEvents"])["data"]
    bars = [bar for trace in traces for bar in zip(trace["y"], trace["customdata"], strict=True)]
    row = next(row for row, data in bars if data[0] == longest["name"])
    middle = (longest["ts"] + longest["dur"] / 2) / 1e3
    page.locator("#timeline-chart").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([x, row]) => {
          const chart = document.getElementById("timeline-chart"), box = chart.getBoundingClientRect();
          const {xaxis, yaxis} = chart._fullLayout;
          return [box.x + xaxis._offset + xaxis.d2p(x), box.y + yaxis._offset + yaxis.d2p(row)];
        }""",
        [middle, row],
    )
    page.mouse.move(x, y - 300)
    page.mouse.move(x, y)
    page.wait_for_selector("#timeline-chart .hoverlayer text")
    text = page.locator("#timeline-chart .hoverlayer").text_content()
    assert longest["name"] in text
    assert seconds(longest["dur"] / 1e6) in text


def test_the_table_filters_and_sorts(plan, opened):
    page, _ = opened
    word = plan.input_paths[0].split("/")[-1]
    page.fill("[data-filter=tensors]", f"{word} P(")
    shown = page.eval_on_selector_all(
        "[data-table=tensors] tbody tr:not([hidden])", "rows => rows.map(r => r.textContent)"
    )
    rows = page.eval_on_selector_all("[data-table=tensors] tbody tr", "rows => rows.map(r => r.textContent)")
    assert sorted(shown) == sorted(row for row in rows if word.lower() in row.lower() and "p(" in row.lower())
    assert 0 < len(shown) < len(rows)
    assert page.locator("[data-count=tensors]").inner_text() == f"{len(shown)} of {len(rows)}"
    page.fill("[data-filter=tensors]", "")
    page.click("[data-table=tensors] th:nth-child(6) button")
    page.click("[data-table=tensors] th:nth-child(6) button")
    nbytes = page.eval_on_selector_all(
        "[data-table=tensors] tbody tr", "rows => rows.map(r => +r.cells[5].dataset.value)"
    )
    assert nbytes == sorted(nbytes, reverse=True)
    assert page.locator("[data-table=tensors] th:nth-child(6)").get_attribute("aria-sort") == "descending"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_any_screen(opened, scheme):
    page, _ = opened
    page.emulate_media(color_scheme=scheme)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"document.getElementById('timeline-chart')._fullLayout.width <= {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) > 50
    assert [pair for pair in ratios if pair[0] < 4.5] == []
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light")


def test_on_paper_there_are_no_controls(opened):
    page, _ = opened
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not page.locator(".tools").first.is_visible()
    assert page.locator("[data-table=tensors] tbody tr").last.is_visible()
    page.emulate_media(media="screen")


@pytest.fixture(scope="module")
def small():
    model = zoo.build("mlp-toy")
    return autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), cluster=dear((2, 4)))


def test_baselines_are_the_strategies_of_their_names(small):
    plans = small.origin.baselines()
    assert list(plans) == ["data parallel", "ZeRO-1", "FSDP (ZeRO-3)", "Megatron over y"]
    described = {name: describe(plan) for name, plan in plans.items()}
    assert described["data parallel"] == "data parallel over x and y (8 ways)"
    assert "optimizer state sharded over x and y (ZeRO-" in described["ZeRO-1"]
    assert "weights sharded over x and y (FSDP, ZeRO-3)" in described["FSDP (ZeRO-3)"]
    assert "tensor parallel over y (4 ways: columns of weights, rows of weights)" in described["Megatron over y"]
    assert all(plan.step_time_s >= small.step_time_s * (1 - 1e-9) for plan in plans.values())


def test_the_comparison_has_the_figures_of_every_plan(small):
    other = replace(small, step_time_s=2.0, memory_limit_bytes=small.peak_memory_bytes - 1000)
    rows = tables.comparison({"this plan": small, "by hand": other, "none": "no layout fits"}).rows
    texts = [[cell.text for cell in row] for row in rows]
    peak = size(small.peak_memory_bytes)
    assert [row[:3] for row in texts[:2]] == [
        ["this plan", seconds(small.step_time_s), peak],
        ["by hand", "2 s", f"{peak}, 1 kB too much"],
    ]
    assert texts[2] == ["none", "", "", "", "", "no layout fits"]


def test_a_report_that_cannot_be_written(small):
    with pytest.raises(ArgumentError, match="the report cannot be written to"):
        small.report("/nowhere/plan.html")
    with pytest.raises(ArgumentError, match=r"report\(baselines=True\) needs the step, which a file does not contain"):
        replace(small, origin=None).report("/nowhere/plan.html", baselines=True)


@pytest.mark.parametrize(
    "spec", [P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y")), P(None, "y"), P("x"), P()]
)
def test_parts_are_on_the_devices_on_which_jax_has_them(spec):
    model = zoo.build("mlp-toy")
    plan = autopar.plan(model.step, *model.abstract_args(), mesh=(2, 4), pins={"params/blocks/*/w1": spec})
    picture = next(p for p in pictures.layouts(plan) if "w1" in p.name)
    shape = plan.input_shapes[plan.input_paths.index("state/params/blocks/0/w1")]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    expected = {}
    for device, index in jax.sharding.NamedSharding(mesh, spec).devices_indices_map(shape).items():
        part = ", ".join(f"{s.start or 0}:{n if s.stop is None else s.stop}" for s, n in zip(index, shape, strict=True))
        expected.setdefault(f"[{part}]", []).append(str(device.id))
    shown = dict(cell.title.split(" on devices ") for cell in picture.cells)
    assert {part: sorted(ids) for part, ids in expected.items()} == {p: sorted(t.split(", ")) for p, t in shown.items()}


def test_memory_over_a_pipeline_reaches_the_peak_of_every_rank():
    model = zoo.build("mlp-toy", layers=4)
    args = model.abstract_args()
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        plan = autopar.plan(model.step, *args, mesh=(2,), stages=2, num_microbatches=4, schedule=schedule)
        for rank, levels in charts.memory_levels(plan).items():
            (stage,) = plan.ranks[rank]
            times = [level.seconds for level in levels]
            assert times == sorted(times)
            assert times[-1] == plan.step_time_s
            assert max(level.nbytes for level in levels) == pytest.approx(sum(stage.memory.values()))
            at_rest = {kind: nbytes for kind, nbytes in stage.memory.items() if kind != "residuals"}
            assert {kind: nbytes for kind, nbytes in levels[0].kinds.items() if nbytes} == at_rest
            assert levels[-1].kinds == pytest.approx(levels[0].kinds)


def measured(name, sizes, options):
    """Seconds of planning, of writing the report and of opening it at 1280 pixels in a new browser; what it has."""
    from playwright.sync_api import sync_playwright

    model, times = zoo.build(name, **sizes), [time.perf_counter()]
    plan = autopar.plan(model.step, *model.abstract_args(), **options)
    times.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = pathlib.Path(folder, "plan.html")
        plan.report(path)
        times.append(time.perf_counter())
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        opening = time.perf_counter()
        page.goto(path.as_uri())
        page.locator("#timeline").scroll_into_view_if_needed()
        page.wait_for_selector("#timeline .bars", state="attached")
        times.append(times[-1] + time.perf_counter() - opening)
        browser.close()
        planning, writing, opening = (after - before for before, after in itertools.pairwise(times))
        return (
            f"{name}: {len(plan.stages)} stages, {len(plan.input_paths)} arguments, planned in {planning:.1f} s; "
            f"report of {path.stat().st_size / 1e6:.1f} MB written in {writing:.1f} s, opened in {opening:.1f} s"
        )


if __name__ == "__main__":  # `python -m tests.plans.test_report`: GPT-39B as it is
    with plan_cache.off():
        name, _, options = PLANS["gpt-39b in stages"]
        print(measured(name, {"batch": 64}, options))
