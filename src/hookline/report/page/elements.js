// Elements are made with text only: nothing from a run is ever parsed as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const MANY = RUNS.length > 1;

function h(tag, options, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "className") node[key] = value;
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child.nodeType ? child : String(child));
  }
  return node;
}

const navigation = h("div", {});
document.getElementById("nav").append(navigation);

function section(id, title, lead) {
  const node = h("section", { id }, h("h2", {}, title), lead ? h("p", { className: "lead" }, lead) : null);
  document.getElementById("main").append(node);
  navigation.append(h("a", { href: "#" + id }, title));
  return node;
}

function table(headers, rows, numeric = []) {
  const kind = (i) => (numeric.includes(i) ? "n" : i === 0 && !headers.length ? "key" : "");
  const head = headers.length ? h("thead", {}, h("tr", {}, headers.map((x, i) => h("th", { className: kind(i) }, x)))) : null;
  const body = h("tbody", {}, rows.map((row) => h("tr", {}, row.map((x, i) => h("td", { className: kind(i) }, x)))));
  return h("div", { className: "scroll" }, h("table", {}, head, body));
}

function choice(options, chosen, onchange, label) {
  const select = h("select", { "aria-label": label }, options.map(([value, text]) => h("option", { value }, text)));
  select.value = chosen;
  select.addEventListener("change", () => onchange(select.value));
  return h("label", {}, label, select);
}

function buttons(options, chosen, onchange, label) {
  const group = h("span", { className: "group", role: "group", "aria-label": label });
  const set = (value) => { for (const b of group.children) b.setAttribute("aria-pressed", String(b.dataset.value === value)); };
  for (const [value, text] of options) {
    group.append(h("button", { type: "button", "data-value": value, onclick: () => { set(value); onchange(value); } }, text));
  }
  set(chosen);
  return h("label", {}, label, group);
}

function flag(text, checked, onchange) {
  const box = h("input", { type: "checkbox", checked });
  box.addEventListener("change", () => onchange(box.checked));
  return h("label", {}, box, text);
}

function slider(text, value, min, max, step, onchange) {
  const input = h("input", { type: "range", min, max, step, "aria-label": text });
  input.value = value;
  input.addEventListener("input", () => onchange(Number(input.value)));
  return { node: h("label", { className: "grow" }, text, input), input };
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 1) return number(seconds * 1000) + " ms";
  if (seconds < 60) return seconds.toFixed(1) + " s";
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

const runName = (run) => run.label;
