// Histograms over steps, texts and images.
function mediaSection() {
  const kinds = ["histograms", "images", "texts"].filter((kind) => RUNS.some((run) => Object.keys(run.media[kind]).length));
  if (!kinds.length) return;
  const words = kinds.join(", ").replace(/, (\w+)$/, " and $1");
  const node = section("media", words[0].toUpperCase() + words.slice(1));
  for (const run of RUNS) {
    if (!kinds.some((kind) => Object.keys(run.media[kind]).length)) continue;
    if (MANY) node.append(h("h3", {}, runName(run)));
    histograms(node, run.media.histograms);
    for (const [name, { total, items }] of Object.entries(run.media.images)) {
      node.append(h("h4", {}, name, newest(items.length, total)), h("div", { className: "images" }, items.map(([step, data]) => h("figure", {},
        h("img", { src: "data:image/png;base64," + data, alt: `${name}, step ${number(step)}` }), h("figcaption", {}, "step " + number(step))))));
    }
    for (const [name, { total, items }] of Object.entries(run.media.texts)) {
      node.append(h("h4", {}, name, newest(items.length, total)), ...items.toReversed().map(([step, text]) => h("figure", {}, h("figcaption", {}, "step " + number(step)), h("pre", {}, text))));
    }
  }
}

const newest = (shown, total) => h("span", { className: "note" }, shown < total ? ` the newest ${shown} of ${number(total)}` : "");

function histograms(node, all) {
  const names = Object.keys(all);
  if (!names.length) return;
  let chosen = names[0];
  const heading = h("h4", {});
  const title = () => {
    const one = all[chosen];
    heading.replaceChildren(chosen, h("span", { className: "note" }, ` the share of the values in each range, over the steps${one.steps.length < one.total ? `; ${one.steps.length} of ${number(one.total)} histograms` : ""}`));
  };
  const chart = figure(300, () => {
    const { steps, edges, columns } = all[chosen];
    const z = edges.slice(1).map((_, row) => columns.map((column) => column[row]));
    return {
      traces: [{
        type: "heatmap", z, x: steps.map((_, i) => i), y: edges, colorscale: SCALE, hoverongaps: false, colorbar: { thickness: 10, outlinewidth: 0, tickformat: ".0%", tickfont: { size: 11 } },
        customdata: z.map((row, k) => row.map((_, i) => `step ${number(steps[i])}: ${number(edges[k])} to ${number(edges[k + 1])}`)), hovertemplate: "%{customdata}<br>%{z:.2%}<extra></extra>",
      }],
      layout: {
        hovermode: "closest", margin: { l: 52, r: 10, t: 30, b: 38 },
        xaxis: axis({ title: { text: "steps", font: { size: 12 } }, showgrid: false, ...stepTicks(steps) }), yaxis: axis({ showgrid: false, zeroline: false }),
      },
    };
  }, "Histograms over the steps");
  const change = (name) => { chosen = name; title(); redraw(chart); };
  if (names.length > 1) node.append(h("div", { className: "controls" }, choice(names.map((n) => [n, short(n, 60)]), chosen, change, "Histogram")));
  node.append(heading, chart);
  title();
}

function stepTicks(steps) {
  const every = Math.max(1, Math.ceil(steps.length / (isNarrow() ? 5 : 12)));
  const at = steps.map((_, i) => i).filter((i) => i % every === 0);
  return { tickvals: at, ticktext: at.map((i) => number(steps[i])) };
}
