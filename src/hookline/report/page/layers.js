// Layers over steps as a heat map, and a profile of all layers at one step.
const SCALE = [[0, "#440154"], [0.125, "#472d7b"], [0.25, "#3b528b"], [0.375, "#2c728e"], [0.5, "#21918c"], [0.625, "#28ae80"], [0.75, "#5ec962"], [0.875, "#addc30"], [1, "#fde725"]]; // viridis

function layerGrid(run, pairs) {
  const layers = new Map(pairs);
  const names = [...layers.keys()].filter((layer) => values(run, layers.get(layer))?.y.length);
  const uses = new Map();
  for (const layer of names) {
    const x = run.series[layers.get(layer)].x;
    uses.set(x, (uses.get(x) || 0) + 1);
  }
  const main = [...uses].sort((a, b) => b[1] - a[1] || run.xs[b[0]].steps.length - run.xs[a[0]].steps.length)[0];
  if (!main) return null;
  const steps = run.xs[main[0]].steps;
  const rows = names.map((layer) => {
    const s = values(run, layers.get(layer));
    if (s.x === main[0]) return s.y;
    let i = 0;
    return steps.map((step) => {
      while (i < s.steps.length - 1 && s.steps[i] < step) i += 1;
      return s.steps[0] > step || s.steps[s.steps.length - 1] < step ? null : s.y[i];
    });
  });
  return { names, steps, rows };
}

function layerView(node, choices, options) {
  const state = { run: 0, key: choices[0][0], log: options.log, at: -1 };
  let grid = null;
  const read = () => {
    const [group, measure] = JSON.parse(state.key);
    const layers = RUNS[state.run].layers[group]?.[measure];
    grid = layers ? layerGrid(RUNS[state.run], layers.series) : null;
    order.textContent = !layers ? "" : layers.order === "model" ? "Layers are in the order in which the model defines them, the first at the top." : "Layers are in the order in which they were first recorded, which need not be that of the model.";
    if (grid) {
      moment.input.max = grid.steps.length - 1;
      if (state.at < 0 || state.at >= grid.steps.length) state.at = grid.steps.length - 1;
      moment.input.value = state.at;
    }
  };
  const shownValue = (v) => (v === null ? null : state.log ? (v === 0 ? null : Math.log10(Math.abs(v))) : v);
  const measureName = () => JSON.parse(state.key)[1];
  const rowTicks = (height) => {
    const every = Math.max(1, Math.ceil(grid.names.length / ((height - 70) / 15)));
    const at = grid.names.map((_, i) => i).filter((i) => i % every === 0);
    return { tickvals: at, ticktext: at.map((i) => plain(short(grid.names[i], isNarrow() ? 14 : 34))) };
  };
  const map = figure(420, () => {
    if (!grid) return { traces: [], layout: {} };
    const height = Math.min(760, Math.max(230, 90 + grid.names.length * 16));
    const z = grid.rows.map((row) => row.map(shownValue));
    const unit = state.log ? { tickprefix: "10<sup>", ticksuffix: "</sup>", tickformat: ".2~f" } : { tickformat: ".2~g" };
    return {
      height,
      traces: [{
        type: "heatmap", z, x: grid.steps, y: grid.names.map((_, i) => i), customdata: grid.rows, colorscale: SCALE,
        text: grid.rows.map((row, i) => row.map(() => plain(grid.names[i]))), hoverongaps: false,
        hovertemplate: "%{text}<br>step %{x}: %{customdata:.4g}<extra></extra>",
        colorbar: { thickness: 10, outlinewidth: 0, len: 1, tickfont: { size: 11 }, ...unit },
      }],
      layout: {
        hovermode: "closest", margin: { l: 20, r: 10, t: 30, b: 38 },
        xaxis: axis({ title: { text: "steps", font: { size: 12 } }, showgrid: false, ...(grid.steps.length < 4 ? { tickvals: grid.steps } : {}) }),
        yaxis: axis({ autorange: "reversed", showgrid: false, zeroline: false, ...rowTicks(height) }),
        shapes: [{ type: "line", xref: "x", yref: "paper", x0: grid.steps[state.at], x1: grid.steps[state.at], y0: 0, y1: 1, line: { color: css("--text"), width: 1.2, dash: "dot" } }],
      },
      onclick: (event) => {
        const step = event.points[0].x;
        state.at = grid.steps.findIndex((s) => s >= step);
        moment.input.value = state.at;
        show();
      },
    };
  }, "Heat map of layers over steps");
  const profile = figure(260, () => {
    if (!grid) return { traces: [], layout: {} };
    const at = grid.rows.map((row) => row[state.at]);
    const first = grid.rows.map((row) => row[0]);
    const shown = state.log ? [...at, ...first].filter((v) => v).map((v) => Math.log10(Math.abs(v))) : [];
    const trace = (y, name, ink, width, dash) => ({
      x: grid.names.map((_, i) => i), y: state.log ? y.map((v) => (v === null ? null : Math.abs(v))) : y, mode: "lines+markers", name, marker: { size: 5 }, line: { color: ink, width, dash },
      text: grid.names.map(plain), hovertemplate: "%{text}: %{y:.4g}<extra>" + name + "</extra>",
    });
    const every = Math.max(1, Math.ceil(grid.names.length / (isNarrow() ? 8 : 28)));
    const ticks = grid.names.map((_, i) => i).filter((i) => i % every === 0);
    return {
      traces: [trace(first, "step " + number(grid.steps[0]), css("--c8"), 1.2, "dot"), trace(at, "step " + number(grid.steps[state.at]), color(0), 2)],
      layout: {
        hovermode: "closest",
        xaxis: axis({ tickvals: ticks, ticktext: ticks.map((i) => plain(short(grid.names[i], isNarrow() ? 12 : 22))), tickangle: -38 }),
        yaxis: axis({ type: state.log ? "log" : "linear", title: { text: plain(measureName()), font: { size: 12 } }, exponentformat: "e", ...decades(shown) }),
      },
    };
  }, "Profile through the layers at one step");
  const heading = h("h3", {});
  const order = h("p", { className: "lead" });
  const show = () => {
    heading.textContent = grid ? `Layer by layer, at step ${number(grid.steps[state.at])}` : "This run has no such series.";
    redraw(map);
    redraw(profile);
  };
  const moment = slider("Step", 0, 0, 1, 1, (value) => { state.at = value; show(); });
  const change = (key) => (value) => { state[key] = value; read(); show(); };
  node.append(
    h("div", { className: "controls" },
      MANY ? choice(RUNS.map((run, i) => [String(i), runName(run)]), "0", (value) => change("run")(Number(value)), "Run") : null,
      choices.length > 1 ? choice(choices, state.key, change("key"), "Measure") : null,
      flag("Log scale", options.log, change("log"))),
    order, map, h("div", { className: "controls" }, moment.node), heading, profile);
  read();
  show();
}

// A log axis of several decades has one tick for each.
const decades = (logs) => (logs.length && Math.max(...logs) - Math.min(...logs) > 1.5 ? { dtick: 1, exponentformat: "power" } : {});

function measureChoices(isWanted) {
  const found = new Map();
  for (const run of RUNS) {
    for (const [group, measures] of Object.entries(run.layers)) {
      for (const measure of Object.keys(measures)) if (isWanted(group, measure)) found.set(JSON.stringify([group, measure]), `${group}: ${measure}`);
    }
  }
  return [...found];
}

function gradientSection() {
  const isGradient = (group) => group === "gradients" || group === "grad_norm";
  const rank = (key) => (key === '["gradients","norm"]' ? 0 : /"norm"\]$/.test(key) ? 1 : 2);
  const choices = measureChoices(isGradient).sort((a, b) => rank(a[0]) - rank(b[0]));
  if (!choices.length) return;
  const node = section("gradients", "Gradient flow", "The norm of each layer's gradient over the steps. Click on the map to choose the step of the profile below.");
  for (const run of RUNS) {
    const prefix = MANY ? runName(run) + ": " : "";
    for (const [tone, text] of run.gradients) node.append(h("p", { className: tone + "-text" }, prefix + text));
  }
  layerView(node, choices, { log: true });
}

function activationSection() {
  const choices = measureChoices((group) => group !== "gradients" && group !== "grad_norm");
  if (!choices.length) return;
  const node = section("layers", "Activation health", "Any measure of several layers: means and deviations, dead units, outliers, attention logits, ratios of the optimizer.");
  layerView(node, choices, { log: false });
}
