"use strict";
// Keys are text everywhere: a number of JavaScript has 53 bits, a key 64. What is shown and asked for stands in the
// address, after the #, so that it can be sent to somebody: #table=user_emb&keys=17,-3&near=17&metric=dot

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const POINTS = 60;
const MOST_KEYS = 200;
const EVERY = 2000;
let tables = [];
let chosen = null;
let model = ""; // that of the table, where there are several
let told = {};

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
}

function shown(number) {
  if (typeof number !== "number") return String(number);
  if (Math.abs(number) >= 1e15) return Number.isFinite(number) ? number.toExponential(4) : String(number);
  return Number.isInteger(number) ? number.toLocaleString("en") : Number(number.toPrecision(5)).toString();
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
}

async function ask(path, body) {
  const headers = {};
  const key = at("access").value;
  if (key) headers["X-API-Key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { headers, body, method: body === undefined ? "GET" : "POST" });
  const text = await answer.text();
  if (answer.ok) return text;
  let message = text.slice(0, 300);
  try {
    const error = JSON.parse(text).error;
    message = typeof error === "string" ? error : error.message;
  } catch { /* it is no JSON, and shown as it is */ }
  throw new Error(`${answer.status}: ${message}`);
}

const place = (name, what) =>
  `v1/tables/${name.split("/").map(encodeURIComponent).join("/")}:${what}` + (model && `?model=${encodeURIComponent(model)}`);

function keysIn(text) {
  const keys = text.split(/[\s,;]+/).filter(Boolean);
  const bad = keys.find((key) => !/^-?\d{1,20}$/.test(key));
  if (bad !== undefined) throw new Error(`${bad.slice(0, 40)} is no key; keys are whole numbers`);
  if (keys.length > MOST_KEYS) throw new Error(`${keys.length} keys are more than the ${MOST_KEYS} that are shown at a time`);
  return keys.map((key) => BigInt(key).toString());
}

// ---- Tables and versions

const isChosen = (line) => line.dataset.table === chosen && (!model || line.dataset.model === model);

async function showOverview() {
  const document = JSON.parse(await ask("v1/tables"));
  const models = document.models || [document];
  const said = models.map((each) => `model ${each.model}, ${each.version === null ? "no version" : `version ${each.version}`}`);
  tables = document.tables;
  at("model").textContent = said.join("; ");
  const body = at("tables").tBodies[0];
  body.replaceChildren();
  for (const table of tables) {
    const line = make("tr");
    const name = table.model ? `${table.model}: ${table.name}` : table.name;
    const button = make("button", name);
    const cell = make("td");
    cell.title = name;
    [line.dataset.table, line.dataset.model] = [table.name, table.model || ""];
    cell.append(button);
    line.append(cell, make("td", shown(table.rows), "number"), make("td", table.dim, "number"));
    line.append(make("td", table.key_dtype), make("td", table.value_dtype));
    line.addEventListener("click", () => go(table.model ? { table: table.name, model: table.model } : { table: table.name }));
    if (isChosen(line)) line.className = "chosen";
    body.append(line);
  }
  const versions = at("versions").tBodies[0];
  versions.replaceChildren();
  for (const each of models) {
    const status = JSON.parse(await ask(`v1/models/${encodeURIComponent(each.model)}`));
    for (const version of status.model_version_status) {
      const line = make("tr");
      const number = models.length > 1 ? `${each.model}: ${version.version}` : version.version;
      line.append(make("td", number, "number"), make("td", version.state));
      line.append(make("td", version.status.error_message || (version.version === String(each.version) ? "answers" : "")));
      versions.append(line);
    }
  }
}

async function showState() {
  const asked = await Promise.all(["readyz", "warmz"].map((path) => fetch(path).then((answer) => answer.ok, () => null)));
  const state = asked[0] === null ? "no answer" : !asked[0] ? "not ready" : asked[1] ? "warm" : "ready";
  at("state").textContent = state;
  at("state").className = `state ${{ warm: "warm", ready: "ready" }[state] || "bad"}`;
}

// ---- One table

function bars(values) {
  const svg = document.createElementNS(SVG, "svg");
  const numbers = values.map(Number);
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, numbers.length)} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  const most = Math.max(...numbers.filter(Number.isFinite).map(Math.abs), 1e-300);
  numbers.forEach((value, index) => {
    if (Number.isNaN(value)) {
      draw(svg, "rect", { x: index, width: 1, height: 20, y: 0, class: "nan" });
      return;
    }
    const height = Math.min(10, (10 * Math.abs(value)) / most);
    draw(svg, "rect", {
      x: index + 0.1, width: 0.8, height, y: value < 0 ? 10 : 10 - height, class: value < 0 ? "down" : "up",
    });
  });
  const title = document.createElementNS(SVG, "title");
  title.textContent = values.map(shown).join(", ");
  svg.append(title);
  return svg;
}

async function showRows(keys) {
  const found = JSON.parse(await ask(place(chosen, "lookup"), `{"keys":[${keys.join(",")}]}`));
  const rows = at("rows");
  rows.replaceChildren();
  keys.forEach((key, index) => {
    const row = make("div", undefined, found.found[index] ? "row" : "row missing");
    const button = make("button", key);
    button.title = "its nearest neighbours";
    button.addEventListener("click", () => go({ near: key }));
    const values = found.embeddings[index];
    const norm = Math.hypot(...values.map(Number));
    row.append(button, found.found[index] ? bars(values) : make("span", "no row"));
    const odd = values.map(Number).filter((value) => !Number.isFinite(value)).length;
    const said = odd ? `${odd} of ${values.length} not finite` : `norm ${shown(norm)}`;
    row.append(make("span", found.found[index] ? said : "", "number"));
    rows.append(row);
  });
}

async function showNear(key, metric) {
  at("neighbours").replaceChildren();
  const found = JSON.parse(await ask(place(chosen, "nearest"), JSON.stringify({ key, metric })));
  at("scanned").textContent = !found.neighbours.length ? found.reason :
    found.scanned < found.rows
      ? `of ${shown(found.scanned)} rows, spread over the ${shown(found.rows)} of the table`
      : `of all ${shown(found.rows)} rows`;
  for (const each of found.neighbours) {
    const line = make("li");
    const button = make("button", each.key);
    button.addEventListener("click", () => go({ keys: [key, each.key].join(","), near: key }));
    line.append(button, make("span", shown(each.score)));
    at("neighbours").append(line);
  }
}

function histogram(svg, range, data) {
  svg.replaceChildren();
  if (!data || !data.counts.length) {
    range.textContent = "none";
    return;
  }
  const most = Math.max(...data.counts, 1);
  const width = 240 / data.counts.length;
  data.counts.forEach((count, index) => {
    const height = (76 * count) / most;
    draw(svg, "rect", { x: index * width + 0.5, width: width - 1, y: 78 - height, height, class: "up" });
  });
  draw(svg, "line", { x1: 0, x2: 240, y1: 78.5, y2: 78.5, class: "axis" });
  range.textContent = `${shown(data.edges[0])} to ${shown(data.edges[data.edges.length - 1])}`;
}

async function showTable() {
  at("table").hidden = false;
  at("name").textContent = model ? `${model}: ${chosen}` : chosen;
  for (const id of ["rows", "neighbours", "norms", "frequencies"]) at(id).replaceChildren();
  for (const id of ["scanned", "examples", "norms-range", "frequencies-range"]) at(id).textContent = "";
  const about = JSON.parse(await ask(place(chosen, "rows")));
  at("examples").append(about.keys.length ? "some of its keys: " : "it has no rows");
  for (const key of about.keys) {
    const button = make("button", key);
    button.addEventListener("click", () => go({ keys: key, near: key }));
    at("examples").append(button, " ");
  }
  histogram(at("norms"), at("norms-range"), about.norms);
  at("frequencies-figure").hidden = about.frequencies === null;
  if (about.frequencies) histogram(at("frequencies"), at("frequencies-range"), about.frequencies);
}

function showInList(line) {
  const list = at("tables").parentElement; // not the window, which may be small
  const top = line.offsetTop, bottom = top + line.offsetHeight;
  if (top < list.scrollTop || bottom > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 2;
}

// ---- What the address says

function go(changes) {
  const now = new URLSearchParams(changes.table === undefined ? location.hash.slice(1) : "");
  for (const [name, value] of Object.entries(changes)) now.set(name, value);
  location.hash = now.toString();
}

async function show() {
  at("error").hidden = true;
  const now = new URLSearchParams(location.hash.slice(1));
  const before = `${model}:${chosen}`;
  const first = tables.length ? tables[0] : { name: null };
  chosen = now.get("table") || first.name;
  model = now.get("model") || (!now.get("table") && first.model) || "";
  const changed = `${model}:${chosen}` !== before;
  if (chosen === null) return;
  for (const line of at("tables").tBodies[0].rows) {
    const is = isChosen(line);
    line.className = is ? "chosen" : "";
    if (is && changed) showInList(line);
  }
  try {
    if (changed) {
      told = {};
      await showTable();
    }
    const keys = now.get("keys") || "";
    if (keys && keys !== told.keys) {
      at("wanted").value = keys;
      await showRows(keysIn(keys));
    }
    const near = [now.get("near") || "", now.get("metric") || "cosine"];
    if (near[0] && String(near) !== told.near) {
      [at("of").value, at("metric").value] = near;
      await showNear(keysIn(near[0])[0], near[1]);
    }
    told = { keys, near: String(near) };
    document.body.dataset.shown = location.hash;
  } catch (error) {
    fail(error);
  }
}

// ---- Rates

const lines = { requests: [], keys: [] };
let last = null;

function counted(text) {
  const sums = { kvtools_requests_total: 0, kvtools_keys_total: 0, kvtools_keys_missing_total: 0 };
  for (const line of text.split("\n")) {
    const end = line.search(/[{ ]/);
    const name = line.slice(0, end);
    if (name in sums) sums[name] += Number(line.slice(line.lastIndexOf(" ") + 1));
  }
  return { ...sums, at: performance.now() };
}

function curve(svg, values) {
  svg.replaceChildren();
  const most = Math.max(...values, 1);
  const points = values.map((value, index) => `${(240 * index) / (POINTS - 1)},${46 - (44 * value) / most}`);
  draw(svg, "line", { x1: 0, x2: 240, y1: 47, y2: 47, class: "axis" });
  draw(svg, "polyline", { points: points.join(" "), class: "rate" });
}

async function showRates() {
  const now = counted(await ask("metrics"));
  if (last) {
    const seconds = Math.max(0.001, (now.at - last.at) / 1000);
    const rate = (name) => Math.max(0, (now[name] - last[name]) / seconds);
    const [requests, keys] = [rate("kvtools_requests_total"), rate("kvtools_keys_total")];
    at("requests-rate").textContent = shown(Math.round(requests));
    at("keys-rate").textContent = shown(Math.round(keys));
    const missing = keys ? rate("kvtools_keys_missing_total") / keys : 0;
    at("missing-rate").textContent = `${(100 * missing).toFixed(1)}%`;
    for (const [name, value] of [["requests", requests], ["keys", keys]]) {
      lines[name] = [...lines[name], value].slice(-POINTS);
      curve(at(name), lines[name]);
    }
  }
  last = now;
}

async function again() {
  try {
    if (!document.hidden) {
      await showState();
      await showRates();
    }
  } catch { /* the state says that there is no answer */ }
  setTimeout(again, EVERY);
}

async function begin() {
  at("error").hidden = true;
  try {
    await showOverview();
  } catch (error) {
    fail(error);
    return;
  }
  chosen = null;
  await show();
}

at("look").addEventListener("submit", (event) => {
  event.preventDefault();
  told.keys = "";
  go({ keys: at("wanted").value });
  show();
});
at("near").addEventListener("submit", (event) => {
  event.preventDefault();
  told.near = "";
  go({ near: at("of").value, metric: at("metric").value });
  show();
});
at("access").value = sessionStorage.getItem("access") || "";
at("access").addEventListener("change", () => {
  sessionStorage.setItem("access", at("access").value);
  begin();
});
window.addEventListener("hashchange", show);
begin();
again();
