"use strict";
// Rows are kept by actor and only cells whose text differs are written: two hundred actors change every second.

const $ = (id) => document.getElementById(id);
const number = (digits, unit = "") => (v) => (v === null || v === undefined ? "" : round(v, digits) + unit);
const round = (v, digits) => Math.abs(v) >= 1e5 ? compact.format(v) : v.toLocaleString("en", { maximumFractionDigits: digits });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const THROTTLE = ["under-voltage", "capped", "throttled", "soft limit"];
let clockOffset = 0; // seconds that the server is ahead of this browser

function throttling(bits) {
  if (bits === null || bits === undefined) return "";
  const now = THROTTLE.filter((_, bit) => bits >> bit & 1);
  if (now.length) return now.join(", ");
  return bits >> 16 & 15 ? "earlier" : "no";
}
function age(row) {
  if (row.heard_s === null || row.heard_s === undefined) return "";
  const s = Math.max(0, Date.now() / 1000 + clockOffset - row.heard_s);
  return s < 1.5 ? "now" : s < 100 ? Math.round(s) + " s" : s < 6000 ? Math.round(s / 60) + " min" : Math.round(s / 3600) + " h";
}
function energy(row) {
  if (row.step_energy_j === null || row.step_energy_j === undefined) return "";
  return round(row.step_energy_j * 1000, 2) + " mJ";
}

// key, heading, text of a row, class; what a column is sorted by is the row's key
const COLUMNS = [
  ["actor", "Actor", (r) => r.actor, "text"],
  ["alarmed", "Alarms", (r) => Object.keys(r.alarms || {}).join(", "), "text alarms"],
  ["heard_s", "Heard", age],
  ["steps_per_s", "Steps/s", (r) => number(1)(r.steps_per_s)],
  ["policy_lag", "Lag", (r) => number(0)(r.policy_lag)],
  ["policy", "Policy", (r) => r.policy || ""],
  ["return_mean", "Return", (r) => number(1)(r.return_mean)],
  ["latency_p50_us", "p50", (r) => number(1, " µs")(r.latency_p50_us)],
  ["latency_p99_us", "p99", (r) => number(1, " µs")(r.latency_p99_us)],
  ["deadlines_missed", "Late", (r) => number(0)(r.deadlines_missed)],
  ["temperature_c", "Temp.", (r) => number(1, " °C")(r.temperature_c)],
  ["throttled", "Throttled", (r) => throttling(r.throttled)],
  ["power_w", "Power", (r) => number(2, " W")(r.power_w) + (r.power_w != null && r.power_modelled ? " (model)" : "")],
  ["step_energy_j", "Per step", energy],
  ["spool_share", "Spool", (r) => r.spool_share == null ? "" : number(0, " %")(100 * r.spool_share)],
  ["steps_dropped", "Dropped", (r) => number(0)(r.steps_dropped)],
  ["refusals", "Refused", (r) => number(0)(r.refusals)],
  ["kernels", "Kernels", (r) => r.kernels || "", "text"],
  ["board", "Board", (r) => r.board || "", "text board"],
];

const state = { rows: new Map(), shown: new Map(), sort: "actor", down: false, curve: [], fleet: null, actor: "" };

function makeHead() {
  for (const [key, heading, , kind] of COLUMNS) {
    const th = document.createElement("th"), button = document.createElement("button");
    th.scope = "col"; th.className = kind || ""; th.dataset.key = key;
    button.type = "button"; button.textContent = heading;
    button.onclick = () => { state.down = state.sort === key ? !state.down : key !== "actor" && kind === undefined; state.sort = key; arrange(); };
    th.append(button); $("head").append(th);
    $("sort").add(new Option(heading, key));
  }
  $("sort").onchange = () => { state.sort = $("sort").value; state.down = !["actor", "kernels", "board"].includes(state.sort); arrange(); };
  $("filter").oninput = $("alarmed").onchange = arrange;
}

function makeRow(name) {
  const tr = document.createElement("tr");
  for (const [, heading, , kind] of COLUMNS) {
    const td = document.createElement("td");
    td.dataset.label = heading; td.className = kind || ""; tr.append(td);
  }
  const link = document.createElement("a");
  link.href = "#" + encodeURIComponent(name);
  tr.firstChild.append(link);
  state.shown.set(name, tr);
  $("rows").append(tr);
  return tr;
}

function draw(row) {
  const tr = state.shown.get(row.actor) || makeRow(row.actor);
  COLUMNS.forEach(([, , text], index) => {
    const cell = index ? tr.children[index] : tr.firstChild.firstChild, value = text(row);
    if (cell.textContent !== value) cell.textContent = value;
  });
  const about = Object.entries(row.alarms || {}).map(([kind, about]) => kind + ": " + about).join("\n");
  if (tr.children[1].title !== about) tr.children[1].title = about;
  const kind = (row.live === false ? "away " : "") + (tr.children[1].textContent ? "alarm" : "");
  if (tr.className !== kind) tr.className = kind;
  if (tr.dataset.createdS !== String(row.created_s)) tr.dataset.createdS = row.created_s;
}

function matches(row, words) {
  if ($("alarmed").checked && !Object.keys(row.alarms || {}).length) return false;
  const text = [row.actor, row.board, row.kernels, row.runtime, row.release, row.env_id, ...Object.keys(row.alarms || {})].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function arrange() {
  const value = (row) => state.sort === "alarmed" ? Object.keys(row.alarms || {}).length : row[state.sort];
  const compare = (a, b) => {
    const x = value(a), y = value(b);
    if (x === y) return 0;
    if (x === undefined || x === null) return 1;
    if (y === undefined || y === null) return -1;
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return state.down ? -order : order;
  };
  const rows = [...state.rows.values()].sort((a, b) => compare(a, b) || a.actor.localeCompare(b.actor, "en", { numeric: true }));
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0, before = null;
  for (const row of rows) {
    const tr = state.shown.get(row.actor);
    tr.hidden = !matches(row, words);
    count += !tr.hidden;
    const expected = before ? before.nextSibling : $("rows").firstChild;
    if (tr !== expected) $("rows").insertBefore(tr, expected);
    before = tr;
  }
  for (const th of $("head").children) {
    if (th.dataset.key === state.sort) th.ariaSort = state.down ? "descending" : "ascending";
    else th.removeAttribute("aria-sort");
  }
  $("sort").value = state.sort;
  $("count").textContent = count === rows.length ? rows.length + " actors" : count + " of " + rows.length + " actors";
}

function facts(list, pairs) {
  const wanted = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (list.children.length !== wanted.length) {
    list.replaceChildren(...wanted.map(() => {
      const div = document.createElement("div");
      div.append(document.createElement("dt"), document.createElement("dd"));
      return div;
    }));
  }
  wanted.forEach(([name, value], index) => {
    const [dt, dd] = list.children[index].children;
    if (dt.textContent !== name) dt.textContent = name;
    if (dd.textContent !== String(value)) dd.textContent = value;
  });
}

function chart(box, title, points, xKey, keys, unit, xText) {
  let figure = box.querySelector(`[data-title="${title}"]`);
  const known = points.filter((p) => keys.some((key) => Number.isFinite(p[key])));
  if (!known.length) { if (figure) figure.remove(); return; }
  if (!figure) {
    figure = document.createElement("figure");
    figure.dataset.title = title;
    figure.innerHTML = '<figcaption><span></span><b></b></figcaption><svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img"></svg><small><span></span><span></span></small>';
    box.append(figure);
  }
  const xs = known.map((p) => p[xKey]), values = known.flatMap((p) => keys.map((key) => p[key]).filter(Number.isFinite));
  const x0 = xs[0], x1 = xs[xs.length - 1], y0 = Math.min(...values), y1 = Math.max(...values);
  const paths = keys.map((key, index) => {
    const d = known.filter((p) => Number.isFinite(p[key])).map((p, i) =>
      (i ? "L" : "M") + (x1 > x0 ? 100 * (p[xKey] - x0) / (x1 - x0) : 50).toFixed(2) + " " + (y1 > y0 ? 39 - 38 * (p[key] - y0) / (y1 - y0) : 20).toFixed(2));
    if (d.length === 1) d.push("h.5");
    return `<path class="${index ? "second" : ""}" d="${d.join("")}"/>`;
  });
  const newest = keys.map((key) => { const last = known.findLast((p) => Number.isFinite(p[key])); return last ? round(last[key], 2) : "–"; });
  figure.querySelector("figcaption span").textContent = title;
  figure.querySelector("b").textContent = newest.join(" / ") + unit;
  const svg = figure.querySelector("svg");
  svg.innerHTML = paths.join("");
  svg.setAttribute("aria-label", `${title}: from ${round(y0, 2)} to ${round(y1, 2)}${unit}, now ${newest.join(" and ")}`);
  const ends = figure.querySelector("small").children;
  ends[0].textContent = `${round(y0, 2)} to ${round(y1, 2)}${unit}`;
  ends[1].textContent = xText(x0, x1);
}

const steps = (from, to) => compact.format(to) + " steps";
const span = (from, to) => "last " + (to - from < 100 ? Math.round(to - from) + " s" : Math.round((to - from) / 60) + " min");

function drawCurve() {
  const box = $("charts"), points = state.curve;
  chart(box, "Return: training / published", points, "env_steps", ["return_mean", "published_return_mean"], "", steps);
  chart(box, "Updates a second", points, "wall_s", ["updates_per_s"], "", span);
  chart(box, "Steps a second", points, "wall_s", ["env_steps_per_s"], "", span);
  chart(box, "Policy lag, versions", points, "wall_s", ["policy_lag_mean"], "", span);
  if (points.length) return;
  for (const [title, key] of [["Return, by the actors", "return_mean"], ["Steps a second, by the actors", "steps_per_s"], ["Policy lag, the most", "policy_lag"], ["Power", "power_w"]])
    chart(box, title, state.hour || [], "at_s", [key], key === "power_w" ? " W" : "", span);
}

function byPoint(series) {
  return series.at_s.map((at, i) => Object.fromEntries(Object.entries(series).map(([key, values]) => [key, values[i] === null ? NaN : values[i]])));
}

async function loadHour() {
  try {
    const where = state.actor ? `/actors/${encodeURIComponent(state.actor)}/history.json` : "/history.json";
    if (!state.actor && state.curve.length) return;
    const wanted = state.actor, answer = await fetch(where);
    if (!answer.ok || wanted !== state.actor) return;
    const points = byPoint(await answer.json());
    if (!wanted) { state.hour = points; drawCurve(); return; }
    const box = $("hour");
    for (const [title, keys, unit] of [
      ["Steps a second", ["steps_per_s"], ""], ["Return", ["return_mean"], ""], ["Policy lag, versions", ["policy_lag"], ""],
      ["Latency p50 / p99", ["latency_p50_us", "latency_p99_us"], " µs"], ["Temperature", ["temperature_c"], " °C"], ["Power", ["power_w"], " W"],
      ["Energy a step", ["step_energy_j"], " J"], ["Spool, share", ["spool_share"], ""], ["Processor", ["cpu_percent"], " %"],
    ]) chart(box, title, points, "at_s", keys, unit, span);
  } catch { /* the events say that the server is away */ }
}

function drawOne() {
  const row = state.rows.get(state.actor);
  $("name").textContent = state.actor;
  if (!row) { facts($("own-facts"), [["", "no such actor is known"]]); return; }
  const own = Object.entries(row.alarms || {}).map(([kind, about]) => { const li = document.createElement("li"); li.textContent = `${kind}: ${about}`; return li; });
  $("own-alarms").replaceChildren(...own);
  facts($("own-facts"), [
    ...COLUMNS.slice(2).map(([, heading, text]) => [heading, text(row)]),
    ["Environment", row.env_id], ["Environments", row.n_envs], ["Runtime", row.runtime], ["Python", row.python], ["Release", row.release],
    ["Rate", row.rate_hz ? row.rate_hz + " Hz" : ""], ["Steps", number(0)(row.steps)], ["Episodes", number(0)(row.episodes)],
    ["Messages held", number(0)(row.messages_held)], ["Power by", row.power_source],
    ["Refused, why", Object.entries(row.refused || {}).map(([reason, count]) => `${count} ${reason}`).join(", ")],
  ]);
}

function drawFleet(fleet) {
  state.fleet = fleet;
  clockOffset = fleet.now_s - Date.now() / 1000;
  document.title = $("title").textContent = fleet.title;
  const learner = fleet.learner, newest = state.curve[state.curve.length - 1] || {};
  facts($("facts"), [
    ["Learner", fleet.replay ? "" : learner ? (learner.live ? "here" : "away") : "none heard"],
    ["Task", learner && learner.env_id], ["Policy", learner ? `${learner.epoch}.${learner.version}` : number(0)(newest.policy_version)],
    ["Actors", fleet.replay ? state.rows.size : `${fleet.live} of ${fleet.actors}`],
    ["Steps/s", number(0)(fleet.replay ? newest.env_steps_per_s : fleet.steps_per_s)], ["Updates/s", number(0)(newest.updates_per_s)],
    ["Steps", number(0)(newest.env_steps)], ["Updates", number(0)(newest.updates)],
    ["Return", number(1)(newest.return_mean === undefined ? fleet.return_mean : newest.return_mean)],
    ["Power", number(1, " W")(fleet.power_w)],
    ["Not shown", Object.entries(fleet.refused || {}).map(([reason, count]) => `${count} ${reason}`).join(", ")],
  ]);
  const alarmed = [...state.rows.values()].filter((row) => Object.keys(row.alarms || {}).length);
  const items = alarmed.slice(0, 12).map((row) => {
    const li = document.createElement("li"), a = document.createElement("a"), [kind, about] = Object.entries(row.alarms)[0];
    a.href = "#" + encodeURIComponent(row.actor); a.textContent = row.actor;
    li.append(a, ` ${kind}: ${about}`);
    return li;
  });
  const last = document.createElement("li");
  last.className = alarmed.length ? "more" : "fine";
  last.textContent = alarmed.length > 12 ? `and ${alarmed.length - 12} more actors` : "no alarms";
  if (!alarmed.length || alarmed.length > 12) items.push(last);
  if (!$("alarms").contains(document.activeElement)) $("alarms").replaceChildren(...items);
  for (const row of state.rows.values()) draw(row); // ages
  arrange();
}

function route() {
  state.actor = decodeURIComponent(location.hash.slice(1));
  $("fleet").hidden = Boolean(state.actor);
  $("one").hidden = !state.actor;
  $("hour").replaceChildren();
  if (state.actor) drawOne();
  loadHour();
}

function take(news) {
  if (news.names) {
    const names = new Set(news.names);
    for (const [name, tr] of state.shown) if (!names.has(name)) { tr.remove(); state.shown.delete(name); state.rows.delete(name); }
  }
  for (const row of news.rows || []) { state.rows.set(row.actor, row); draw(row); }
  if (news.run) { state.curve = []; $("charts").replaceChildren(); }
  if (news.curve) { for (const point of news.curve) state.curve.push(point); }
  if (news.fleet) drawFleet(news.fleet);
  if (news.curve) drawCurve();
  if (state.actor) drawOne();
}

function listen() {
  const events = new EventSource("/events");
  events.onmessage = (event) => { $("status").className = ""; $("status").textContent = state.fleet && state.fleet.replay ? "replayed from its files" : "live"; take(JSON.parse(event.data)); };
  events.onopen = () => { state.rows.clear(); state.shown.clear(); $("rows").replaceChildren(); state.curve = []; };
  events.onerror = () => { $("status").className = "lost"; $("status").textContent = "the page's server is away; what is shown is old"; };
}

makeHead();
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); $("filter").focus(); }
  if (event.key === "Escape") { if (state.actor) location.hash = ""; else { $("filter").value = ""; arrange(); } }
});
route();
listen();
setInterval(loadHour, 10000);
