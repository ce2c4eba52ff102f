// The top of the page, the manifest in words, and what differs between runs.
const badge = (run) => h("span", { className: "pill " + run.badge[0] }, run.badge[1]);

function header() {
  const top = document.getElementById("top");
  const theme = h("button", { type: "button", className: "theme", id: "theme", onclick: () => setTheme(root.dataset.theme === "dark" ? "light" : "dark") }, "Light or dark");
  const first = RUNS[0];
  const title = MANY ? `${RUNS.length} runs` : runName(first);
  const pill = MANY ? null : badge(first);
  top.append(h("div", { className: "title" }, h("h1", {}, title), pill, theme));
  for (const [i, run] of RUNS.entries()) {
    if (MANY) {
      top.append(h("h3", {}, h("span", { className: "swatch", style: `background:var(--c${i % 12})` }), runName(run), " ", badge(run)));
    } else {
      if (run.facts.name) top.append(h("p", { className: "id" }, run.facts.id));
      top.append(tiles(run));
    }
    top.append(h("ul", { className: "facts" }, run.sentences.map((text) => h("li", {}, text))));
    if (run.facts.left_out.length) {
      top.append(h("div", { className: "notice" }, "Not in this report:", h("ul", {}, run.facts.left_out.slice(0, 20).map((line) => h("li", {}, line)))));
    }
  }
}

function tiles(run) {
  const facts = run.facts;
  const last = (name) => (values(run, name) ? number(values(run, name).last) : null);
  const all = [
    ["steps", number(facts.steps)], ["training time", duration(facts.seconds)],
    ["training loss", last("train/loss")], ["validation loss", last("val/loss")],
    ["tokens", facts.tokens ? number(facts.tokens) : null], ["parameters", facts.parameters ? number(facts.parameters) : null],
    ["spent in hooks", facts.hooks.share === null ? null : (100 * facts.hooks.share).toFixed(2) + " %"],
  ];
  return h("div", { className: "tiles" }, all.filter(([, value]) => value !== null).map(([name, value]) => h("div", { className: "tile" }, h("b", {}, value), h("span", {}, name))));
}

function differencesSection() {
  if (!MANY) return;
  const node = section("differences", "What differs", "Only what is not the same in all runs.");
  const sections = Object.entries(DATA.differences);
  if (!sections.length) node.append(h("p", {}, "Nothing that is recorded differs."));
  for (const [name, rows] of sections) {
    node.append(h("h3", {}, name), table(["", ...RUNS.map(runName)], rows));
  }
}

function manifestSection() {
  const node = section("manifest", "The run, in words");
  for (const run of RUNS) {
    if (MANY) node.append(h("h3", {}, runName(run)));
    node.append(table([], run.manifest));
    if (run.config.length) node.append(h("details", {}, h("summary", {}, "Configuration"), table([], run.config)));
    if (run.checkpoints.length) {
      const rows = run.checkpoints.map(([name, step, isLast, isBest, size]) => [name, number(step), [isLast ? "last" : "", isBest ? "best" : ""].filter(Boolean).join(", "), (size / 1e6).toFixed(1) + " MB"]);
      node.append(h("details", {}, h("summary", {}, "Checkpoints in the folder"), table(["checkpoint", "step", "", "size"], rows, [1, 3])));
    }
  }
}
