// What the hooks cost, when each was on, and how they failed.
function hooksSection() {
  if (!RUNS.some((run) => run.hooks.length || run.failures.length || Object.keys(run.switches).length)) return;
  const node = section("hooks", "Hooks", "The time that each hook took in each event, estimated from sampled clocks.");
  for (const run of RUNS) {
    if (MANY) node.append(h("h3", {}, runName(run)));
    if (run.hooks.length) costs(node, run);
    else node.append(h("p", { className: "lead" }, "The costs of hooks are written when a run ends."));
    switches(node, run);
    failures(node, run);
  }
}

function costs(node, run) {
  const hooks = run.hooks.filter((hook) => hook.calls || hook.failures).sort((a, b) => a.seconds - b.seconds);
  if (hooks.length) {
    const events = [...new Set(hooks.flatMap((hook) => Object.keys(hook.events)))];
    const unit = Math.max(...hooks.map((hook) => hook.seconds)) < 1 ? [1000, "ms"] : [1, "s"];
    const names = hooks.map((hook) => plain(short(hook.name, 30)));
    const bar = (label, seconds, i) => ({
      type: "bar", orientation: "h", y: hooks.map((_, k) => k), x: seconds.map((s) => s * unit[0]), name: plain(label), marker: { color: color(i) },
      hovertemplate: `%{x:.4g} ${unit[1]}<extra>${plain(label)}</extra>`,
    });
    const traces = () => (events.length
      ? events.map((event, i) => bar(event, hooks.map((hook) => hook.events[event]?.seconds || 0), i))
      : [bar("all events", hooks.map((hook) => hook.seconds), 0)]);
    node.append(figure(110 + hooks.length * 26 + (isNarrow() ? 17 * events.length : 0), () => ({
      traces: traces(),
      layout: {
        barmode: "stack", hovermode: "closest", bargap: 0.35, showlegend: true, legend: { ...LEGEND, traceorder: "normal" },
        xaxis: axis({ title: { text: unit[1] === "ms" ? "milliseconds in the run" : "seconds in the run", font: { size: 12 } } }),
        yaxis: axis({ tickvals: hooks.map((_, k) => k), ticktext: names, showgrid: false }),
      },
    }), "Time of each hook by event"));
  }
  const rows = [...run.hooks].sort((a, b) => b.seconds - a.seconds).map((hook) => [
    hook.name, hook.cls.split(".").pop(), hook.schedule, number(hook.calls), duration(hook.seconds), (100 * hook.share).toFixed(2) + " %", hook.status, number(hook.failures),
  ]);
  node.append(table(["hook", "class", "schedule", "calls", "time", "share", "status", "failures"], rows, [3, 4, 5, 7]));
}

function switches(node, run) {
  const entries = Object.entries(run.switches).filter(([, list]) => list.length > 1 || list[0][1] !== "enabled");
  if (!entries.length) return;
  const end = run.facts.steps || 1;
  const inks = { enabled: "--good", disabled: "--c8", failed: "--bad", removed: "--line" };
  node.append(h("h3", {}, "When hooks were on or off"), figure(120 + entries.length * 26, () => {
    const traces = Object.keys(inks).map((status) => {
      const spans = entries.flatMap(([, list], k) => list.map(([step, now], i) => [k, step || 0, list[i + 1] ? list[i + 1][0] : end, now]).filter((span) => span[3] === status));
      return {
        type: "bar", orientation: "h", name: status, y: spans.map((s) => s[0]), base: spans.map((s) => s[1]), x: spans.map((s) => s[2] - s[1]),
        marker: { color: css(inks[status]) }, customdata: spans.map((s) => [s[1], s[2]]), hovertemplate: `${status}: step %{customdata[0]} to %{customdata[1]}<extra></extra>`, showlegend: spans.length > 0,
      };
    });
    return {
      traces, layout: {
        barmode: "overlay", hovermode: "closest", bargap: 0.4, xaxis: axis({ title: { text: "steps", font: { size: 12 } } }),
        yaxis: axis({ tickvals: entries.map((_, k) => k), ticktext: entries.map(([name]) => plain(short(name, 30))), showgrid: false }),
      },
    };
  }, "When each hook was on or off"));
}

function failures(node, run) {
  if (!run.failures.length) return;
  node.append(h("h3", {}, "Failures"), ...run.failures.map((one) => h("details", {},
    h("summary", {}, `${one.hook}${one.event ? " in " + one.event : ""}${one.step === null || one.step === undefined ? "" : ", step " + number(one.step)}: ${one.error}`),
    h("pre", {}, one.traceback || one.error))));
}
