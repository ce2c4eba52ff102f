// The curves: a metric in training and validation, the learning rate, and what happened when.
const MARKS = {
  checkpoint: ["checkpoint", "triangle-down", "--good"], stop: ["stop", "square", "--bad"],
  skipped: ["skipped step", "x-thin-open", "--warn"], toggle: ["hook switched", "diamond", "--soft"],
  spike: ["loss spike", "triangle-up", "--bad"], finding: ["debug finding", "hexagon", "--bad"], failure: ["failure", "x", "--bad"],
  start: ["resumed", "star-triangle-right", "--accent"],
};

function metricNames() {
  const names = new Set();
  for (const run of RUNS) {
    for (const name of Object.keys(run.series)) {
      const [where, ...rest] = name.split("/");
      if ((where === "train" || where === "val") && rest.length && !rest.join("/").endsWith("_epoch")) names.add(rest.join("/"));
    }
  }
  return [...names].sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
}

function band(x, s, fill) {
  if (!s.lo) return [];
  const common = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...common, y: s.lo }, { ...common, y: s.hi, fill: "tonexty", fillcolor: fill }];
}

function curve(run, name, look, state, unit) {
  const s = values(run, name);
  if (!s || !s.y.length) return [];
  const x = positions(run, s, state.by, unit);
  const weight = look.isSmoothed ? state.smoothing : 0;
  const label = plain((MANY ? short(runName(run), 26) + " · " : "") + name);
  const extremes = s.lo ? s.lo.map((low, i) => `${number(low)} to ${number(s.hi[i])}`) : null;
  const template = (extremes ? "%{y:.5g} (%{customdata})" : "%{y:.5g}") + `<extra>${label}</extra>`;
  const traces = band(x, s, fade(look.color, 0.16));
  if (weight) {
    traces.push({ x, y: s.y, mode: "lines", line: { color: fade(look.color, 0.28), width: 1 }, hoverinfo: "skip", showlegend: false });
  }
  const isSparse = s.y.length < 60 && !look.isSmoothed;
  traces.push({
    x, y: smooth(s.y, weight), name: label, mode: isSparse || s.y.length === 1 ? "lines+markers" : "lines", marker: { size: 5 },
    line: { color: look.color, width: 1.8, dash: look.dash }, customdata: extremes, hovertemplate: template, connectgaps: false,
  });
  return traces.map((trace) => ({ ...trace, yaxis: look.yaxis }));
}

function markTraces(run, name, state, unit) {
  const s = values(run, name);
  if (!s || !s.y.length) return [];
  const ys = smooth(s.y, state.smoothing);
  const traces = [];
  for (const [kind, [label, symbol, ink]] of Object.entries(MARKS)) {
    const found = run.marks.filter((mark) => mark[0] === kind && (mark[1] !== null || mark[2] !== null));
    if (!found.length) continue;
    const steps = found.map((mark) => mark[1] ?? interpolate(s.times, s.steps, mark[2], true));
    const times = found.map((mark) => mark[2] ?? interpolate(s.steps, s.times, mark[1], true));
    const onCurve = steps.map((step) => interpolate(s.steps, ys, step));
    const y = kind === "spike" && name === "train/loss" ? onCurve.map((at, i) => found[i][4] ?? at) : onCurve;
    traces.push({
      x: positions(run, { steps, times }, state.by, unit), y, mode: "markers", name: label, legendgroup: kind,
      marker: { symbol, size: 10, color: css(ink), line: { width: symbol.includes("thin") ? 2 : 1, color: symbol.includes("thin") ? css(ink) : css("--card") } },
      text: found.map((mark) => plain(mark[3])), hovertemplate: "%{text}<extra></extra>",
      showlegend: run === RUNS[0] || !RUNS[0].marks.some((mark) => mark[0] === kind),
    });
  }
  return traces;
}

function curvesSection() {
  const names = metricNames();
  if (!names.length) return;
  const node = section("curves", "Curves", "Drag to zoom, double-click to go back; click a name in the legend to hide it.");
  const state = { metric: names[0], by: "steps", smoothing: 0, log: false, marks: true };
  const hasTokens = RUNS.some((run) => run.tokens.length);
  const rates = (run) => Object.keys(run.series).filter((name) => /^lr(\/|$)/.test(name) || name === "train/lr").slice(0, 6);
  const hasRates = RUNS.some((run) => rates(run).length);
  const chart = figure(hasRates ? 520 : 420, () => {
    const unit = timeUnit(RUNS);
    const traces = [];
    RUNS.forEach((run, i) => {
      const train = { color: color(MANY ? i : 0), isSmoothed: true, yaxis: "y" };
      traces.push(...curve(run, "train/" + state.metric, train, state, unit));
      const val = { color: color(MANY ? i : 1), dash: MANY ? "dot" : "solid", yaxis: "y" };
      traces.push(...curve(run, "val/" + state.metric, val, state, unit));
      if (state.marks) {
        const base = run.series["train/" + state.metric] ? "train/" : "val/";
        traces.push(...markTraces(run, base + state.metric, state, unit));
      }
      rates(run).forEach((name, k) => traces.push(...curve(run, name, { color: color(MANY ? i : 2 + k), yaxis: "y2" }, state, unit)));
    });
    const made = {
      xaxis: axis({ title: { text: axisTitle(state.by, unit), font: { size: 12 } }, anchor: hasRates ? "y2" : "y" }),
      yaxis: axis({ title: { text: plain(state.metric), font: { size: 12 } }, type: state.log ? "log" : "linear", domain: hasRates ? [0.3, 1] : [0, 1] }),
    };
    if (hasRates) made.yaxis2 = axis({ title: { text: "learning rate", font: { size: 12 } }, domain: [0, 0.2], exponentformat: "e", nticks: 4, ...flatRange(traces.filter((t) => t.yaxis === "y2")) });
    return { traces, layout: made };
  }, "Curves of " + names[0]);
  const change = (key) => (value) => { state[key] = value; redraw(chart); };
  const axes = [["steps", "Steps"], ...(hasTokens ? [["tokens", "Tokens"]] : []), ["time", "Time"]];
  node.append(
    h("div", { className: "controls" },
      names.length > 1 ? choice(names.map((n) => [n, short(n, 60)]), state.metric, change("metric"), "Metric") : null,
      buttons(axes, "steps", change("by"), "Axis"),
      slider("Smoothing", 0, 0, 0.99, 0.01, change("smoothing")).node,
      flag("Log scale", false, change("log")), flag("Marks", true, change("marks"))),
    chart);
  spikeList(node);
  findingList(node);
}

function findingList(node) {
  for (const run of RUNS) {
    const { count, first } = run.facts.debug_findings;
    if (!count) continue;
    const rows = first.map((one) => [one.step === null ? "unknown" : number(one.step), one.module === null ? "–" : one.module || "the model", one.where, one.condition, one.probe, one.message]);
    const shown = count > rows.length ? `: the first ${rows.length} of ${number(count)}` : "";
    node.append(h("h3", {}, "What debug probes found" + (MANY ? " in " + runName(run) : "") + shown), table(["step", "module", "where", "condition", "probe", "message"], rows, [0]));
  }
}

function spikeList(node) {
  for (const run of RUNS) {
    if (!run.spikes.length) continue;
    const items = run.spikes.map((spike) => h("details", {}, h("summary", {}, spike.title), table([], spike.rows),
      spike.values.length ? table(["logged around it", "median before", "at the spike", "farthest after"], spike.values, [1, 2, 3]) : null,
      spike.more ? h("p", { className: "lead" }, `${number(spike.more)} more series changed less.`) : null));
    const total = run.facts.loss_spikes;
    node.append(h("h3", {}, "Loss spikes" + (MANY ? " of " + runName(run) : "") + (total > items.length ? `: ${items.length} of ${number(total)}` : "")), ...items);
  }
}
