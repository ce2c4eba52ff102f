// Figures are drawn when they come near the window, and again when the theme changes.
const root = document.documentElement;
const figures = new Map();
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const color = (i) => css("--c" + (i % 12));
// plotly reads a few tags in texts; names of a run are shown as they are.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const short = (text, length) => (text.length > length ? "…" + text.slice(1 - length) : text);
const isNarrow = () => window.innerWidth < 640;

function fade(hex, alpha) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
}

function axis(options) {
  return {
    gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true,
    tickfont: { size: 11 }, title: { font: { size: 12 } }, ...options,
  };
}

const LEGEND = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } };

function layout(options) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: { color: css("--soft"), family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12 },
    margin: { l: 52, r: 14, t: 10, b: 38 }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
    legend: LEGEND,
    ...options,
  };
}

const CONFIG = {
  responsive: true, displayModeBar: "hover", displaylogo: false, showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toggleSpikelines", "sendDataToCloud", "sendChartToCloud", "copyChartLink"],
};

function figure(height, make, label) {
  const node = h("div", { className: "chart", role: "img", "aria-label": label, style: `height:${height}px` });
  figures.set(node, { make, isDrawn: false });
  watcher.observe(node);
  return node;
}

function draw(node) {
  const one = figures.get(node);
  if (!one || !node.isConnected) return;
  one.isDrawn = true;
  const made = one.make(node);
  if (made.height) node.style.height = made.height + "px";
  Plotly.react(node, made.traces, layout(made.layout), made.small ? { ...CONFIG, displayModeBar: false } : CONFIG);
  if (made.onclick && !one.listens) {
    one.listens = true;
    node.on("plotly_click", made.onclick);
  }
}

function redraw(node) {
  if (figures.get(node)?.isDrawn) draw(node);
}

function drop(node) {
  watcher.unobserve(node);
  figures.delete(node);
  Plotly.purge(node);
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !figures.get(entry.target)?.isDrawn) draw(entry.target);
  }
}, { rootMargin: "400px" });

function redrawAll() {
  for (const [node, one] of figures) if (one.isDrawn) draw(node);
}

function setTheme(theme) {
  root.dataset.theme = theme;
  redrawAll();
}

// On paper: light, as wide as a page, and nothing folded away.
let undoPrint = null;
window.addEventListener("beforeprint", () => {
  if (undoPrint) return;
  const theme = root.dataset.theme, folded = [...document.querySelectorAll("details:not([open])")];
  for (const one of folded) one.open = true;
  root.dataset.theme = "light";
  root.classList.add("print");
  for (const node of figures.keys()) draw(node);
  undoPrint = () => {
    for (const one of folded) one.open = false;
    root.classList.remove("print");
    setTheme(theme);
  };
});
window.addEventListener("afterprint", () => { undoPrint?.(); undoPrint = null; });

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = prefersDark.matches ? "dark" : "light";
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));

// -- values ------------------------------------------------------------------------------------

function values(run, name) {
  const found = Object.hasOwn(run.series, name) ? run.series[name] : null;
  if (!found) return null;
  const { steps, times } = run.xs[found.x];
  return { ...found, steps, times };
}

function startTime(run) {
  if (run.start === undefined) {
    let first = Infinity;
    for (const x of run.xs) for (const t of x.times) if (t !== null && t < first) first = t;
    const began = Date.parse(run.facts.started) / 1000;
    run.start = Number.isFinite(began) && began <= first && first - began < 3600 ? began : first;
  }
  return run.start;
}

// The x of a resumed run may go back: of several points, the last one counts. Beyond the ends, the
// nearest y, or the line through the nearest two points.
function interpolate(xs, ys, x, isExtended = false) {
  let low = -1, high = -1;
  for (let i = 0; i < xs.length; i += 1) {
    if (xs[i] === null) continue;
    if (xs[i] <= x && (low < 0 || xs[i] >= xs[low])) low = i;
    if (xs[i] >= x && (high < 0 || xs[i] <= xs[high])) high = i;
  }
  if (low < 0 || high < 0) {
    const end = low < 0 ? high : low, next = low < 0 ? high + 1 : low - 1;
    if (end < 0) return null;
    const width = (xs[end] ?? 0) - (xs[next] ?? xs[end]);
    return isExtended && width ? ys[end] + ((ys[end] - ys[next]) / width) * (x - xs[end]) : ys[end];
  }
  return xs[high] === xs[low] ? ys[low] : ys[low] + ((x - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
}

// Around a value that never changes, plotly would show one above and one below.
function flatRange(traces) {
  let low = Infinity, high = -Infinity;
  for (const { y } of traces) for (const v of y) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
  return low === high && low !== 0 ? { range: [Math.min(0, 2 * low), Math.max(0, 2 * low)] } : {};
}

function timeUnit(runs) {
  const longest = Math.max(...runs.map((run) => Math.max(0, ...run.xs.map((x) => (x.times.at(-1) || 0) - startTime(run)))));
  return longest > 5 * 3600 ? [3600, "hours"] : longest > 300 ? [60, "minutes"] : [1, "seconds"];
}

function positions(run, s, by, unit) {
  if (by === "time") return s.times.map((t) => (t === null ? null : (t - startTime(run)) / unit[0]));
  if (by === "tokens" && run.tokens.length) return s.steps.map((step) => interpolate(run.tokens[0], run.tokens[1], step, true));
  return s.steps;
}

function axisTitle(by, unit) {
  return by === "time" ? `time in ${unit[1]}` : by;
}

function smooth(ys, weight) {
  if (!weight) return ys;
  let mean = 0, total = 0;
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
