// What Lint has found, with the fix, and which checks were left out.
function findingsSection() {
  const linted = RUNS.filter((run) => run.lint);
  if (!linted.length) return;
  const node = section("findings", "Findings");
  for (const run of linted) {
    if (MANY) node.append(h("h3", {}, runName(run)));
    node.append(h("p", { className: "lead" }, run.lint.summary), ...run.lint.findings.map(finding));
    const more = run.lint.count - run.lint.findings.length;
    if (more > 0) node.append(h("p", {}, `… and ${number(more)} more`));
    leftOut(node, Object.entries(run.lint.left_out));
  }
}

function finding(one) {
  const rank = one.rank ? `, rank ${number(one.rank)}` : "";
  return h("div", { className: "finding " + one.severity },
    h("div", {}, h("span", { className: "pill " + (one.severity === "error" ? "bad" : "warn") }, one.severity), " ",
      h("b", {}, one.check), h("span", { className: "note" }, ` at step ${number(one.step)}${rank}: `), one.subject),
    h("p", {}, one.message),
    h("p", {}, h("b", {}, "Fix: "), one.fix),
    one.page ? h("details", {}, h("summary", {}, `What this means (docs/checks/${one.check}.md)`), h("pre", {}, one.page)) : null);
}

function leftOut(node, rows) {
  if (!rows.length) return;
  node.append(h("details", {}, h("summary", {}, `Checks that were left out: ${number(rows.length)}`), table(["check", "reason"], rows)));
}
