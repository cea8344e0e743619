"use strict";
// What is shown stands in the address behind the #, so that it can be kept and sent: #t=<table>&s=<table>:<f>.<n>.<a>,...
// Keys are text: a number of JavaScript has 53 bits, a key 64. No name becomes HTML: all text is set as text.

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const WORDS = [
  ["keep rows of any frequency", (label) => `cut rows seen fewer than ${label} times`],
  ["keep rows of any norm", (label) => `cut rows of norms below ${label}`],
  ["keep rows of any age", (label) => `cut rows last written more than ${label} ago`],
];
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const states = data.tables.map(() => [0, 0, 0]);
const cubes = new Map(); // decoded when a table is first looked at
let chosen = 0;
let sorted = { by: "bytes", down: true };
let marked = null;

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function draw(svg, tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  svg.append(element);
  return element;
}

const count = (number) => Math.round(number).toLocaleString("en");
const short = (number) => Number.isInteger(number) ? count(number) : Number.isFinite(number) ? String(Number(number.toPrecision(4))) : String(number);

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  let unit = 0;
  let amount = bytes / 1024;
  while (amount >= 1024 && unit < 3) { amount /= 1024; unit += 1; }
  return `${amount.toFixed(1)} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// A share that is not 0 is not shown as 0, nor one that is not all as all.
function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  if (part && percent < 0.01) return "<0.01%";
  if (part < whole && percent > 99.99) return ">99.99%";
  return `${Number(percent.toPrecision(percent >= 10 ? 4 : 3))}%`;
}

// ---- What thresholds keep

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// Of each cell that has rows: how many cells further on it is, its rows, and the sum of their frequencies; each a number of 7 bits a byte, the lowest first.
function cubeOf(number) {
  if (cubes.has(number)) return cubes.get(number);
  const table = data.tables[number];
  const shape = table.axes.map((axis) => axis.length + 1);
  const cells = shape[0] * shape[1] * shape[2];
  const rows = new Float64Array(cells);
  const lookups = new Float64Array(cells);
  const bytes = bytesOf(table.cells);
  let place = 0;
  const next = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[place++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  for (let cell = -1; place < bytes.length;) {
    cell += next();
    rows[cell] = next();
    if (table.lookups) lookups[cell] = next();
  }
  // From the rows of each cell to those of all cells from it on, along one axis after the other.
  for (const step of [1, shape[2], shape[1] * shape[2]]) {
    const length = step === 1 ? shape[2] : step === shape[2] ? shape[1] : shape[0];
    if (length === 1) continue;
    for (let cell = cells - 1; cell >= 0; cell--) {
      if (Math.floor(cell / step) % length === length - 1) continue;
      rows[cell] += rows[cell + step];
      lookups[cell] += lookups[cell + step];
    }
  }
  const cube = { shape, rows, lookups };
  cubes.set(number, cube);
  return cube;
}

function kept(number, state) {
  const cube = cubeOf(number);
  const cell = (state[0] * cube.shape[1] + state[1]) * cube.shape[2] + state[2];
  return { rows: cube.rows[cell], lookups: cube.lookups[cell] };
}

function effect(number) {
  const state = states[number];
  const all = kept(number, [0, 0, 0]);
  const left = state.some(Boolean) ? kept(number, state) : all;
  const table = data.tables[number];
  return {
    rows: all.rows, cut: all.rows - left.rows, kept: left.rows, saved: (all.rows - left.rows) * table.rowBytes,
    lookups: all.lookups, missed: all.lookups - left.lookups,
  };
}

// ---- The command

const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

function command() {
  const cut = states.map((state, number) => number).filter((number) => states[number].some(Boolean));
  if (!cut.length) return "";
  const thresholds = (number) => states[number].map((step, axis) => step && data.tables[number].axes[axis][step - 1]).filter(Boolean);
  const dry = at("dry").checked;
  const words = ["kvtools clip", data.command.path];
  if (!dry) words.push(quoted(at("output").value));
  words.push(...cut.map((number) => data.tables[number].option));
  const options = [...data.command.options, ...(dry ? ["--dry-run"] : [])];
  const same = new Set(cut.map((number) => thresholds(number).map((one) => one.options).join(" ")));
  if (same.size === 1) return [...words, [...same][0], ...options].join(" ");
  const lines = [[...words, ...options, "--policy /dev/stdin", "<<'POLICY'"].join(" ")];
  for (const number of cut) lines.push(data.tables[number].entry, ...thresholds(number).map((one) => one.policy));
  return [...lines, "POLICY"].join("\n");
}

async function copy() {
  const text = command();
  try {
    await navigator.clipboard.writeText(text);
  } catch { // of a page that was opened from a disk, or where nobody allowed it
    const area = make("textarea", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  at("copied").textContent = "copied";
  setTimeout(() => { at("copied").textContent = ""; }, 2000);
}

// ---- The list of tables

const lines = data.tables.map((table, number) => {
  const line = make("tr");
  const name = make("td");
  const button = make("button");
  button.append(make("bdi", table.name));
  name.append(button);
  line.append(name, make("td", count(table.rows), "n"), make("td", size(table.bytes), "n"), make("td", "", "n"));
  line.addEventListener("click", () => go(number));
  return line;
});

function list() {
  const wanted = at("filter").value.toLowerCase();
  const order = data.tables.map((_, number) => number).filter((number) => data.tables[number].name.toLowerCase().includes(wanted));
  const value = {
    name: (number) => data.tables[number].name, rows: (number) => data.tables[number].rows,
    bytes: (number) => data.tables[number].bytes, cut: (number) => states[number].some(Boolean) ? effect(number).saved : 0,
  }[sorted.by];
  const values = new Map(order.map((number) => [number, value(number)]));
  order.sort((a, b) => {
    const [left, right] = [values.get(a), values.get(b)];
    const way = typeof left === "string" ? left.localeCompare(right) : left - right;
    return (sorted.down ? -way : way) || a - b;
  });
  at("tables").tBodies[0].replaceChildren(...order.map((number) => lines[number]));
  for (const head of document.querySelectorAll("#tables th")) {
    head.removeAttribute("aria-sort");
    if (head.dataset.by === sorted.by) head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
  }
}

function showTotals() {
  let [cut, saved, lookups, missed] = [0, 0, 0, 0];
  states.forEach((state, number) => {
    if (!state.some(Boolean)) {
      lines[number].lastChild.textContent = "";
      return;
    }
    const found = effect(number);
    cut += found.cut;
    saved += found.saved;
    lookups += found.lookups;
    missed += found.missed;
    lines[number].lastChild.textContent = share(found.cut, found.rows);
  });
  at("all-cut").textContent = count(cut);
  at("all-saved").textContent = size(saved);
  at("all-missed").textContent = lookups ? share(missed, lookups) : "–";
}

// ---- One table

function fact(value, name) {
  const box = make("div");
  box.append(make("b", value), make("span", name));
  return box;
}

function showTable() {
  const table = data.tables[chosen];
  lines.forEach((line, number) => line.classList.toggle("chosen", number === chosen));
  at("one").hidden = false;
  at("name").textContent = table.name;
  at("form").textContent = table.form;
  at("facts").replaceChildren(...table.facts.map(([value, name]) => fact(value, name)));
  table.axes.forEach((axis, number) => {
    const box = at(`axis-${number}`);
    const input = box.querySelector("input");
    input.max = axis.length;
    input.disabled = !axis.length;
    const svg = box.querySelector("svg");
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${axis.length + 1} 1`);
    const ends = [0, ...axis.map((threshold) => threshold.rows), table.rows];
    const most = Math.max(1, ...ends.slice(1).map((end, i) => end - ends[i]));
    ends.slice(1).forEach((end, i) => {
      const height = (end - ends[i]) / most;
      draw(svg, "rect", { x: i + 0.05, width: 0.9, y: 1 - height, height });
    });
  });
  showSliders();
  showHot();
  showPlot();
  showNear(null);
}

function showSliders() {
  const table = data.tables[chosen];
  const state = states[chosen];
  table.axes.forEach((axis, number) => {
    const box = at(`axis-${number}`);
    const step = state[number];
    box.querySelector("input").value = step;
    const said = box.querySelector("p");
    if (!axis.length) said.textContent = table.why[number];
    else if (!step) said.textContent = WORDS[number][0];
    else said.textContent = `${WORDS[number][1](axis[step - 1].label)}: ${share(axis[step - 1].rows, table.rows)} of the rows by itself`;
    box.querySelector("input").setAttribute("aria-valuetext", said.textContent);
    [...box.querySelectorAll("rect")].forEach((bar, i) => bar.classList.toggle("cut", i < step));
  });
  const found = effect(chosen);
  const saved = at("saved");
  Object.assign(saved.dataset, { cut: found.cut, kept: found.kept, saved: found.saved, missed: table.lookups ? found.missed : "" });
  saved.textContent = found.cut
    ? `Cuts ${count(found.cut)} of ${count(found.rows)} rows (${share(found.cut, found.rows)}), and saves ${size(found.saved)}.` +
      (table.lookups ? ` These rows had ${share(found.missed, found.lookups)} of the table's lookups.` : "")
    : "Move a slider to the right: each step is a percentile of this table's rows.";
  showTotals();
  showCommand();
}

function showCommand() {
  const text = command();
  at("command").textContent = text || "nothing is cut yet";
  at("copy").disabled = !text;
  at("output").disabled = at("dry").checked;
}

function showHot() {
  const table = data.tables[chosen];
  const hot = table.hot;
  at("hot-title").textContent = hot.by === "freq" ? "Hot keys" : "Keys of the largest norms";
  const heads = ["key", ...(hot.freqs ? ["frequency"] : []), "norm", ...(hot.versions ? ["last written"] : [])];
  const head = make("tr");
  heads.forEach((name, i) => head.append(make("th", name, i ? "n" : "")));
  at("hot").tHead.replaceChildren(head);
  at("hot").tBodies[0].replaceChildren(...hot.keys.map((key, i) => {
    const line = make("tr");
    const cell = make("td");
    cell.append(keyButton(key));
    line.append(cell);
    if (hot.freqs) line.append(make("td", count(hot.freqs[i]), "n"));
    line.append(make("td", short(Number(hot.norms[i])), "n"));
    if (hot.versions) line.append(make("td", hot.versions[i], "n"));
    return line;
  }));
}

function keyButton(key) {
  const button = make("button", key);
  button.title = "its nearest neighbours";
  button.addEventListener("click", () => showNear(key));
  return button;
}

function showNear(key) {
  const table = data.tables[chosen];
  const found = key === null ? undefined : table.near[key];
  at("near").replaceChildren(...(found || []).map(([other, score]) => {
    const item = make("li");
    item.append(keyButton(other), make("span", score));
    return item;
  }));
  const ask = (which) => `kvtools neighbours ${data.command.path} ${which} ${table.option}`;
  const there = Object.keys(table.near).length;
  at("near-said").textContent = found ? `The rows nearest to that of key ${key}, by cosine, of all rows of the table.`
    : key !== null ? `Those of key ${key} are told by: ${ask(key)}`
    : there ? "Choose a key, or a point." : `Those of any key are told by: ${ask("KEY")}`;
  if (marked) marked.classList.remove("chosen");
  marked = key === null ? null : [...at("plot").children].find((circle) => circle.dataset.key === key) || null;
  if (marked) marked.classList.add("chosen");
}

// ---- The sample

function colourOf(part) {
  const place = Math.min(Math.max(part, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((value, i) => Math.round(value + (VIRIDIS[low + 1][i] - value) * (place - low)));
  return `rgb(${mixed.join(",")})`;
}

function samples(table) {
  if (table.sample.decoded) return table.sample.decoded;
  const sample = table.sample;
  const view = (text, Type) => text === null ? null : new Type(bytesOf(text).buffer);
  const keys = view(sample.keys, table.unsigned ? BigUint64Array : BigInt64Array);
  sample.decoded = {
    keys: Array.from(keys, String), x: view(sample.x, Uint16Array), y: view(sample.y, Uint16Array),
    norm: view(sample.norms, Float32Array), frequency: view(sample.freqs, Float64Array),
  };
  return sample.decoded;
}

function showPlot() {
  const table = data.tables[chosen];
  const sample = samples(table);
  const select = at("colour");
  const before = select.value;
  const names = ["norm", ...(sample.frequency ? ["frequency"] : [])];
  select.replaceChildren(...names.map((name) => make("option", name)));
  select.value = names.includes(before) ? before : sample.frequency ? "frequency" : "norm";
  const numbers = Array.from(sample[select.value], (number) => select.value === "frequency" ? Math.log1p(Math.max(number, 0)) : Math.log(Math.max(number, 1e-30)));
  const ordered = numbers.filter(Number.isFinite).sort((a, b) => a - b);
  const [low, high] = [0.02, 0.98].map((part) => ordered[Math.floor(part * (ordered.length - 1))]);
  const svg = at("plot");
  svg.replaceChildren();
  sample.keys.forEach((key, i) => {
    const circle = draw(svg, "circle", {
      cx: 12 + (sample.x[i] / 65535) * 616, cy: 428 - (sample.y[i] / 65535) * 416, r: 3.4, "fill-opacity": 0.8,
      fill: colourOf(high > low ? (numbers[i] - low) / (high - low) : 0.5),
    });
    circle.dataset.key = key;
    circle.dataset.index = i;
  });
  const told = (number) => number === undefined ? "" : short(select.value === "frequency" ? Math.round(Math.expm1(number)) : Math.exp(number));
  at("low").textContent = told(low);
  at("high").textContent = told(high);
  at("plot-said").textContent = sample.keys.length
    ? `${count(sample.keys.length)} of ${count(table.rows)} rows, evenly spaced, by their two principal components (${table.sample.explained})`
    : "There are no rows to show.";
}

function tip(event) {
  const circle = event.target.closest("circle");
  at("tip").hidden = !circle;
  if (!circle) return;
  const sample = samples(data.tables[chosen]);
  const i = Number(circle.dataset.index);
  at("tip").textContent = `key ${sample.keys[i]}, norm ${short(sample.norm[i])}` + (sample.frequency ? `, frequency ${count(sample.frequency[i])}` : "");
  at("tip").style.left = `${Math.min(event.clientX + 12, innerWidth - 240)}px`;
  at("tip").style.top = `${event.clientY + 14}px`;
}

// ---- The address

function remember() {
  const set = states.flatMap((state, number) => state.some(Boolean) ? [`${number}:${state.join(".")}`] : []);
  history.replaceState(null, "", `#t=${chosen}${set.length ? `&s=${set.join(",")}` : ""}`);
}

function go(number) {
  chosen = number;
  showTable();
  remember();
}

function recall() {
  const told = new URLSearchParams(location.hash.slice(1));
  states.forEach((state) => state.fill(0));
  for (const entry of (told.get("s") || "").split(",")) {
    const found = /^(\d+):(\d+)\.(\d+)\.(\d+)$/.exec(entry);
    if (!found || !states[found[1]]) continue;
    states[found[1]].forEach((_, axis) => {
      states[found[1]][axis] = Math.min(Number(found[axis + 2]), data.tables[found[1]].axes[axis].length);
    });
  }
  const wanted = Number(told.get("t"));
  chosen = data.tables[wanted] ? wanted : 0;
  if (data.tables.length) showTable();
}

at("all-tables").textContent = count(data.tables.length);
at("all-rows").textContent = count(data.tables.reduce((sum, table) => sum + table.rows, 0));
at("all-bytes").textContent = size(data.tables.reduce((sum, table) => sum + table.bytes, 0));
at("output").value = data.command.output;
for (let part = 0; part < 64; part++) draw(at("scale"), "rect", { x: part, width: 1.05, height: 1, fill: colourOf(part / 63) });
for (const head of document.querySelectorAll("#tables th")) {
  head.addEventListener("click", () => {
    sorted = { by: head.dataset.by, down: sorted.by === head.dataset.by ? !sorted.down : head.dataset.by !== "name" };
    list();
  });
}
at("filter").addEventListener("input", list);
[0, 1, 2].forEach((axis) => at(`axis-${axis}`).querySelector("input").addEventListener("input", (event) => {
  states[chosen][axis] = Number(event.target.value);
  showSliders();
  remember();
}));
at("reset").addEventListener("click", () => {
  states.forEach((state) => state.fill(0));
  showSliders();
  remember();
});
at("copy").addEventListener("click", copy);
at("output").addEventListener("input", showCommand);
at("dry").addEventListener("change", showCommand);
at("colour").addEventListener("change", showPlot);
at("plot").addEventListener("pointermove", tip);
at("plot").addEventListener("pointerleave", () => { at("tip").hidden = true; });
at("plot").addEventListener("click", (event) => {
  const circle = event.target.closest("circle");
  if (circle) showNear(circle.dataset.key);
});
window.addEventListener("hashchange", recall);
list();
recall();
document.body.dataset.ready = "yes";
