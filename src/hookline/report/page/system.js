// Where the time went, the machine, and all other series.
function smallChart(names, run, title) {
  const shown = RUNS.filter((one) => names.some((name) => values(one, name)));
  const chart = figure(190, () => {
    const unit = timeUnit(RUNS);
    const traces = (run ? [run] : shown).flatMap((one) => names.flatMap((name, k) => {
      const i = MANY ? RUNS.indexOf(one) : k;
      return curve(one, name, { color: color(i), yaxis: "y" }, { by: "steps", smoothing: 0 }, unit);
    }));
    return { small: true, traces, layout: { margin: { l: 44, r: 8, t: 6, b: 26 }, showlegend: false, xaxis: axis({}), yaxis: axis(flatRange(traces)) } };
  }, title);
  return h("figure", {}, h("figcaption", {}, title), chart);
}

function timeSection() {
  const timed = RUNS.filter((run) => Object.keys(run.phases).length);
  const isProfile = (name) => /^profile\/.*time_.*_ms$/.test(name);
  const profiled = RUNS.filter((run) => Object.keys(run.series).some(isProfile));
  if (!timed.length && !profiled.length) return;
  const node = section("time", "Where the time went", "Wall time of the training process. Long batches are all timed; of short ones some are, and count for the others. Hooks are not part of the phase in which they are called. An accelerator times forward, backward and optimizer itself.");
  if (timed.length) {
    const phases = [...new Set(timed.flatMap((run) => Object.keys(run.phases)))];
    node.append(figure(120 + 46 * timed.length, () => ({
      traces: phases.map((phase, i) => {
        const share = timed.map((run) => (run.phases[phase] || 0) / Object.values(run.phases).reduce((a, b) => a + b, 0));
        return {
          type: "bar", orientation: "h", name: plain(phase), y: timed.map((_, k) => k), x: share, marker: { color: color(i) },
          text: share.map((s) => (s > 0.06 ? Math.round(100 * s) + " %" : "")), textposition: "inside", insidetextanchor: "middle", textfont: { color: root.dataset.theme === "dark" ? "#101318" : "#fff" },
          customdata: timed.map((run) => duration(run.phases[phase] || 0)), hovertemplate: `${plain(phase)}: %{x:.1%}, %{customdata}<extra></extra>`,
        };
      }),
      layout: {
        barmode: "stack", hovermode: "closest", bargap: 0.3, legend: { ...LEGEND, traceorder: "normal" }, xaxis: axis({ tickformat: ".0%", range: [0, 1], showgrid: false }),
        yaxis: axis({ tickvals: timed.map((_, k) => k), ticktext: timed.map((run) => (MANY ? plain(short(runName(run), 26)) : "")), showgrid: false }),
      },
    }), "Share of the time by phase"));
    for (const run of timed) node.append(table(MANY ? [runName(run), "time", "share"] : ["phase", "time", "share"], Object.entries(run.phases).map(([phase, s]) => [phase, duration(s), (100 * s / Object.values(run.phases).reduce((a, b) => a + b, 0)).toFixed(1) + " %"]), [1, 2]));
    const names = [...new Set(timed.flatMap((run) => Object.keys(run.series).filter((n) => n.startsWith("time/"))))];
    node.append(h("details", {}, h("summary", {}, "Over the steps, in seconds since the report before"), h("div", { className: "small" }, names.map((name) => smallChart([name], null, name.slice(5))))));
  }
  if (profiled.length) {
    const names = [...new Set(profiled.flatMap((run) => Object.keys(run.series).filter(isProfile)))].slice(0, 40);
    node.append(h("h3", {}, "Mean milliseconds of each phase"), h("div", { className: "small" }, names.map((name) => smallChart([name], null, name.replace("profile/", "")))));
  }
}

function systemSection() {
  const isSystem = (name) => name.startsWith("system/") || (name.startsWith("profile/") && !/time_.*_ms$/.test(name));
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.series).filter(isSystem)))].slice(0, 60);
  if (!names.length) return;
  const node = section("system", "System", "CPU, memory, disk and GPU over the steps.");
  node.append(h("div", { className: "small" }, names.map((name) => smallChart([name], null, name.replace(/^(system|profile)\//, "")))));
}

function seriesSection() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.series)))];
  if (!names.length) return;
  const node = section("series", "All series", `${names.length.toLocaleString("en")} series. Search, and choose which to draw.`);
  const list = h("div", { className: "list" });
  const charts = h("div", { className: "small" });
  const open = new Map();
  const note = h("span", {});
  const toggle = (name, button) => {
    if (open.has(name)) {
      const old = open.get(name);
      drop(old.querySelector(".chart"));
      old.remove();
      open.delete(name);
    } else {
      const s = RUNS.map((run) => values(run, name)).find(Boolean);
      const bad = s.bad ? `, ${number(s.bad[0])} not finite` : "";
      open.set(name, smallChart([name], null, `${name} (last ${number(s.last)}, ${number(s.n)} values${bad})`));
      charts.append(open.get(name));
    }
    button.setAttribute("aria-pressed", String(open.has(name)));
  };
  const fill = (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    note.textContent = found.length > 300 ? `the first 300 of ${number(found.length)}` : `${found.length} found`;
    list.replaceChildren(...found.slice(0, 300).map((name) => {
      const button = h("button", { type: "button", "aria-pressed": String(open.has(name)), onclick: () => toggle(name, button) }, name);
      return button;
    }));
  };
  const search = h("input", { type: "search", placeholder: "Search, for example: blocks.0 norm", "aria-label": "Search series" });
  search.addEventListener("input", () => fill(search.value));
  node.append(h("div", { className: "controls" }, h("label", { className: "grow" }, search), note), list, charts);
  fill("");
}
