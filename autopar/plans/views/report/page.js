// Draws the charts with plotly, follows the colour scheme, zooms by buttons and keys, sorts and filters tables.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (position) => (typeof position === "number" ? variable(`--c${position}`) : position);
const dark = matchMedia("(prefers-color-scheme: dark)");

function coloured(trace) {
  const copy = { ...trace };
  if (trace.marker) copy.marker = { ...trace.marker, color: colour(trace.marker.color) };
  if (trace.line) copy.line = { ...trace.line, color: colour(trace.line.color) };
  if ("fillcolor" in trace) copy.fillcolor = colour(trace.fillcolor);
  return copy;
}

function laidOut(layout) {
  const axis = { gridcolor: variable("--line"), linecolor: variable("--line"), color: variable("--text") };
  return {
    ...layout,
    autosize: true,
    margin: { l: 10, r: 10, t: 40, b: 45 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: variable("--text") },
    dragmode: "zoom",
    uirevision: "zoom",
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    hoverlabel: { bgcolor: variable("--panel"), bordercolor: variable("--line"), font: { color: variable("--text") }, align: "left" },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
    shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: variable("--text") } })),
  };
}

function draw(name) {
  const chart = document.getElementById(`${name}-chart`);
  const { data, layout } = figures[name];
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  return Plotly.react(chart, data.map(coloured), laidOut(layout), options);
}

function zoom(name, step) {
  const chart = document.getElementById(`${name}-chart`);
  const [low, high] = chart.layout.xaxis.range;
  const width = high - low;
  const ranges = {
    in: [low + width / 4, high - width / 4],
    out: [low - width / 2, high + width / 2],
    left: [low - width / 4, high - width / 4],
    right: [low + width / 4, high + width / 4],
  };
  const whole = figures[name].layout.xaxis.range;
  const all = whole ? { "xaxis.range": [...whole] } : { "xaxis.autorange": true };
  return Plotly.relayout(chart, step in ranges ? { "xaxis.range": ranges[step] } : all);
}

const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };
const names = Object.keys(figures);
const drawn = new Set();
const drawOnce = (name) => (drawn.has(name) ? null : (drawn.add(name), draw(name)));
// Charts and long tables far below are drawn when the reader comes near, or prints.
const lazy = [...document.querySelectorAll(".chart, .many")];
const show = (e) => (e.matches(".chart") ? drawOnce(e.id.replace("-chart", "")) : e.classList.add("near"));
const drawAll = () => Promise.all(lazy.map(show));
const near = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => show(entry.target)),
  { rootMargin: "300px" },
);
lazy.forEach((element) => near.observe(element));
addEventListener("beforeprint", drawAll);
dark.addEventListener("change", () => drawn.forEach(draw));
for (const name of names) {
  const chart = document.getElementById(`${name}-chart`);
  chart.style.minHeight = `${figures[name].layout.height}px`;
  chart.addEventListener("keydown", (event) => {
    if (event.key in KEYS && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      zoom(name, KEYS[event.key]);
    }
  });
}
for (const tools of document.querySelectorAll("[data-zoom]")) {
  tools.addEventListener("click", (event) => {
    if (event.target.dataset.step) zoom(tools.dataset.zoom, event.target.dataset.step);
  });
}

function sort(table, column, direction) {
  const body = table.tBodies[0];
  const key = (row) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => direction * compare(key(a), key(b))));
  [...table.tHead.rows[0].cells].forEach((head, i) => {
    if (i === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
}

for (const table of document.querySelectorAll("[data-table]")) {
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (head) sort(table, head.cellIndex, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
  });
}

for (const input of document.querySelectorAll("[data-filter]")) {
  const table = document.querySelector(`[data-table="${input.dataset.filter}"]`);
  const count = document.querySelector(`[data-count="${input.dataset.filter}"]`);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  });
}
