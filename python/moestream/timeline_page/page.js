"use strict";
/* Draws a timeline: two lanes, computing above reading, over one axis of time. Times are in nanoseconds from the first event. */

const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["attention", "router", "experts", "wait", "read", "predict", "other"];
const OUTCOMES = ["demand", "pending", "useful", "late", "wasted"];
const MEANING = {
  attention: "attention", router: "router", experts: "experts", wait: "waiting for experts", predict: "guessing", other: "other (logits, sampling)", rest: "rest",
  demand: "on demand", pending: "ahead, not used yet", useful: "ahead, in time", late: "ahead, late", wasted: "ahead, for nothing",
};
const READ = 4, WAIT = 3, EXPERTS = 2, PREDICT = 5;

/* ---------------------------------------------------------------- data */

function column(name, type) {
  const bytes = Uint8Array.from(atob(data.columns[name]), (c) => c.charCodeAt(0));
  return new type(bytes.buffer);
}
const n = data.n_events;
const begin = Float64Array.from(column("begin", Uint32Array), (t) => t * data.tick_ns);
const end = Float64Array.from(column("duration", Uint32Array), (t, i) => begin[i] + t * data.tick_ns);
const evaluation = column("evaluation", Int32Array), bytes = column("bytes", Uint32Array);
const block = column("block", Int32Array), expert = column("expert", Int32Array), windowOf = column("window", Int32Array);
const kind = column("kind", Uint8Array), outcome = column("outcome", Uint8Array);
const windows = data.windows, evaluations = data.evaluations, span = Math.max(1, data.span_ns);
const nWindows = windows.evaluation.length;

/* A row: things of which none begins before the one before has ended, so that a view of it is found by bisection. */
function row() { return { begin: [], end: [], key: [], event: [] }; }
function push(to, from, until, key, event) { if (until > from) { to.begin.push(from); to.end.push(until); to.key.push(key); to.event.push(event); } }

/* Computing as one row: experts are cut where they wait. */
const compute = row(), predict = row(), reads = [];
{
  const waits = new Map();
  for (let i = 0; i < n; i++) {
    if (kind[i] !== WAIT) continue;
    const key = evaluation[i] + ":" + block[i];
    if (!waits.has(key)) waits.set(key, []);
    waits.get(key).push(i);
  }
  for (let i = 0; i < n; i++) {
    if (kind[i] === READ) {
      let r = reads.find((r) => r.end[r.end.length - 1] <= begin[i]);
      if (!r) reads.push(r = row());
      push(r, begin[i], Math.max(end[i], begin[i] + 1), OUTCOMES[outcome[i]], i);
    } else if (kind[i] === PREDICT) {
      push(predict, begin[i], end[i], "predict", i);
    } else if (kind[i] === EXPERTS) {
      let at = begin[i];
      for (const w of waits.get(evaluation[i] + ":" + block[i]) || []) {
        if (begin[w] < at || end[w] > end[i]) continue;
        push(compute, at, begin[w], "experts", i);
        push(compute, begin[w], end[w], "wait", w);
        at = end[w];
      }
      push(compute, at, end[i], "experts", i);
    } else if (kind[i] !== WAIT) {
      push(compute, begin[i], end[i], KINDS[kind[i]], i);
    }
  }
}
/* Guessing is part of something else, or comes between two parts: then it is one of its own. */
{
  const between = predict.event.map((event, i) => ({ event, i })).filter(({ i }) => {
    const next = first(compute.end, predict.begin[i] + 1);
    return next === compute.begin.length || compute.begin[next] >= predict.end[i];
  });
  for (const { event, i } of between) push(compute, predict.begin[i], predict.end[i], "predict", event);
  const order = compute.begin.map((_, i) => i).sort((a, b) => compute.begin[a] - compute.begin[b]);
  for (const name of ["begin", "end", "key", "event"]) compute[name] = order.map((i) => compute[name][i]);
}
/* Brackets, from the first read ahead of a window to its last arrival, in as few rows as keep them apart. */
const brackets = [];
for (let w = 0; w < nWindows; w++) {
  if (!windows.prefetch[w]) continue;
  let r = brackets.find((r) => r.end[r.end.length - 1] <= windows.prefetch_begin[w]);
  if (!r && brackets.length < 4) brackets.push(r = row());
  if (!r) r = brackets.reduce((a, b) => (a.end[a.end.length - 1] < b.end[b.end.length - 1] ? a : b));
  push(r, windows.prefetch_begin[w], windows.prefetch_end[w], "bracket", w);
}
const largestBubble = windows.bubble.reduce((a, b) => Math.max(a, b), 0);

/* ---------------------------------------------------------------- words */

function time(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  const [unit, by] = ns < 1e3 ? ["ns", 1] : ns < 1e6 ? ["µs", 1e3] : ns < 1e9 ? ["ms", 1e6] : ["s", 1e9];
  const value = ns / by;
  return (value >= 100 || by === 1 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)) + " " + unit;
}
function size(b) {
  for (const [unit, by] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (b >= by) return (b / by).toFixed(b / by < 10 ? 2 : 1) + " " + unit;
  return b.toFixed(0) + " B";
}
function make(name, text, attributes) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  return element;
}
const byId = (id) => document.getElementById(id);
const shown = (text) => text.replace(/\n/g, "⏎");

/* ---------------------------------------------------------------- above the lanes */

function fillHeader() {
  const s = data.summary, t = s.total, per = (x) => (t.windows ? x / t.windows : NaN), perToken = (x) => (s.tokens ? x / s.tokens : NaN);
  byId("model").textContent = data.model;
  const set = Object.entries(data.settings).map(([k, v]) => k + " " + (k === "cache" && typeof v === "number" ? size(v) : v === true ? "on" : v === false ? "off" : v));
  const sizes = [...new Set(data.expert_bytes)].sort((a, b) => a - b);
  byId("conditions").textContent = [
    data.layers.length + " layers with experts" + (sizes.length ? " of " + size(sizes[0]) + (sizes.length > 1 ? " to " + size(sizes[sizes.length - 1]) : "") : ""),
    ...set, data.threads + (data.threads === 1 ? " thread" : " threads"), data.machine.cpu + ", " + data.machine.cores + " cores, " + size(data.machine.memory_bytes) + " of memory",
    data.date.replace("T", " "), data.tool,
  ].join(" · ");
  if (data.dropped) {
    byId("warning").hidden = false;
    byId("warning").textContent = "The first " + data.dropped.toLocaleString("en") + " events are missing: the recording had no room for them.";
  }
  const card = (value, label, title, cls) => {
    const div = make("div", undefined, { title, class: cls || "" });
    div.append(make("b", value), make("span", label));
    byId("totals").append(div);
  };
  const speed = s.tokens_per_s === null ? "–" : s.tokens_per_s.toFixed(s.tokens_per_s < 10 ? 2 : 1) + " tok/s";
  card(speed, data.phase + ", " + s.tokens + " tokens", "tokens by the time from the first event of each evaluation to its last");
  card(time(per(t.attention_s) * 1e9), "t_attention, a layer", "from one layer's experts to the next one's router: what reads can hide behind");
  card(t.prefetch_s ? time(per(t.prefetch_s) * 1e9) : "–", t.prefetch_s ? "t_prefetch, a layer" : "nothing was read ahead", "from the first read ahead submitted to the last arrived");
  card(t.prefetch_s ? time(per(t.bubble_s) * 1e9) : "–", "bubble, a layer", "what of the reads attention does not hide: max(0, t_prefetch - t_attention) where they are submitted just before it", "bubble");
  card(time(per(t.wait_s) * 1e9), "waited, a layer", "without anything to compute, since experts were not there", "bubble");
  card(t.windows ? per(t.hidden).toFixed(2) : "–", "experts hidden, a layer", "read ahead, complete before the layer's experts began, and used");
  const total = Object.values(t.read_bytes).reduce((a, b) => a + b, 0);
  card(size(perToken(total) || 0), "read, a token", "bytes of all reads");
  card(s.reading_s ? size(total / s.reading_s) + "/s" : "–", "while reading", "bytes by the time with at least one read in flight");
  stacked("time of a token", { attention: t.attention_s, router: t.router_s, experts: t.experts_s, wait: t.wait_s, predict: s.predict_s, other: s.other_s, rest: s.rest_s }, (v) => time(perToken(v) * 1e9));
  stacked("bytes of a token", t.read_bytes, (v) => size(perToken(v)), ["useful", "late", "wasted", "pending", "demand"]);
  table(s.layers);
  for (const [title, keys] of [["compute", ["attention", "router", "experts", "wait", "predict", "other"]], ["reads", ["useful", "late", "wasted", "pending", "demand"]]]) {
    byId("legend").append(make("em", title));
    for (const key of keys) {
      if (!compute.key.includes(key) && key !== "wait" && !(key === "predict" && predict.key.length) && title === "compute") continue;
      const item = make("span");
      item.append(make("i", "", { style: swatch(key) }), MEANING[key]);
      byId("legend").append(item);
    }
  }
}
function swatch(key) {
  const colour = "var(--" + key + ")";
  if (key === "wait") return "background: repeating-linear-gradient(135deg, " + colour + " 0 2px, transparent 2px 5px); border: 1px solid " + colour;
  return key === "pending" ? "border: 1.5px solid " + colour : "background: " + colour;
}
function stacked(label, parts, format, order) {
  const keys = order || Object.keys(parts), sum = keys.reduce((a, k) => a + parts[k], 0);
  if (!sum) return;
  const bar = make("div", undefined, { class: "bar" });
  for (const key of keys) {
    if (!parts[key]) continue;
    const share = parts[key] / sum, text = MEANING[key] + " " + format(parts[key]) + ", " + (share * 100).toFixed(0) + "%";
    bar.append(make("i", text, { title: text, class: share < 0.025 ? "narrow" : "", style: "flex: 0 0 " + share * 100 + "%; background: var(--" + key + ")" + (key === "other" || key === "rest" ? "; color: var(--ink)" : "") }));
  }
  byId("bars").append(make("span", label), bar);
}
function table(layers) {
  const rows = make("table"), head = make("tr");
  for (const name of ["layer", "t_attention", "t_prefetch", "bubble", "t_experts", "waited", "hidden", ...OUTCOMES.map((o) => o + " reads")]) head.append(make("th", name));
  rows.append(head);
  for (const l of layers) {
    const tr = make("tr"), mean = (v) => (l.windows ? v / l.windows : NaN);
    const cells = [l.layer, ...["attention_s", "prefetch_s", "bubble_s", "experts_s", "wait_s"].map((k) => time(mean(l[k]) * 1e9)), mean(l.hidden).toFixed(2)];
    for (const cell of [...cells, ...OUTCOMES.map((o) => mean(l.reads[o]).toFixed(2))]) tr.append(make("td", cell));
    rows.append(tr);
  }
  byId("table").append(rows);
}

/* ---------------------------------------------------------------- the view */

const canvas = byId("canvas"), g = canvas.getContext("2d"), tip = byId("tip");
const view = { from: 0, to: span };
let selected = null, width = 0, height = 0, colours = {}, hatch = null, asked = false, settled = 0;
const SHORTEST = 2e3;

function look(from, to) {
  const whole = span * 1.04, length = Math.min(whole, Math.max(SHORTEST, to - from));
  const middle = (from + to) / 2, margin = span * 0.02;
  view.from = Math.min(Math.max(middle - length / 2, -margin), span + margin - length);
  view.to = view.from + length;
  draw();
  clearTimeout(settled);
  settled = setTimeout(remember, 300);
}
function remember() {
  const theme = document.documentElement.dataset.theme, ms = (t) => (t / 1e6).toFixed(4);
  const whole = view.to - view.from > span;
  const parts = [whole ? "" : "from=" + ms(view.from) + "&to=" + ms(view.to), given.theme ? "theme=" + theme : ""].filter(Boolean);
  history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search);
}
function lookAtToken(i) {
  const e = evaluations[Math.min(Math.max(i, 0), evaluations.length - 1)];
  if (!e) return;
  const margin = (e.end - e.begin) * 0.03;
  look(e.begin - margin, e.end + margin);
}
function lookAtLayer(i, layer) {
  const w = windows.evaluation.findIndex((of, w) => of === i && windows.block[w] === layer);
  if (w < 0) return lookAtToken(i);
  const from = Math.min(windows.attention_begin[w] ?? windows.experts_begin[w], windows.prefetch_begin[w] ?? Infinity), to = windows.experts_end[w];
  look(from - (to - from) * 0.15, to + (to - from) * 0.15);
}
let given = {};
function follow() {
  given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (given.theme) document.documentElement.dataset.theme = given.theme === "dark" ? "dark" : "light";
  readColours();
  if (given.t !== undefined && given.l !== undefined) lookAtLayer(+given.t, +given.l);
  else if (given.t !== undefined) lookAtToken(+given.t);
  else if (given.from !== undefined && given.to !== undefined) look(+given.from * 1e6, +given.to * 1e6);
  else look(0 - span, span * 2);
}
const x = (t) => ((t - view.from) / (view.to - view.from)) * width;
const at = (px) => view.from + (px / width) * (view.to - view.from);
function currentToken() {
  const middle = (view.from + view.to) / 2;
  const i = evaluations.findIndex((e) => e.end > middle);
  return i < 0 ? evaluations.length - 1 : i;
}

/* ---------------------------------------------------------------- drawing */

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "panel", "ink", "soft", "line", "band", "on-bar", ...Object.keys(MEANING)]) colours[name] = style.getPropertyValue("--" + name).trim();
  const tile = make("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.fillStyle = colours.paper;
  t.fillRect(0, 0, 8, 8);
  t.strokeStyle = colours.wait;
  t.lineWidth = 2;
  for (const d of [-8, 0, 8]) { t.beginPath(); t.moveTo(d - 1, 9); t.lineTo(d + 9, -1); t.stroke(); }
  hatch = g.createPattern(tile, "repeat");
}
const layout = {};
function measure() {
  const free = Math.max(190, window.innerHeight - byId("stage").offsetTop - 316);
  let y = 0;
  const place = (name, h) => { layout[name] = { y, h }; y += h; };
  place("axis", 20); place("tokens", 20); place("layers", 17);
  place("computeTitle", 20); place("compute", 74);
  place("bracketTitle", 20); place("brackets", brackets.length ? Math.max(30, 15 * brackets.length) : 0);
  place("readsTitle", 20); place("reads", Math.min(free, Math.max(1, reads.length) * 24) + 6);
  place("gap", 8); place("map", 40);
  height = y;
  width = canvas.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
}
function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; paint(); });
}
function paint() {
  g.fillStyle = colours.paper;
  g.fillRect(0, 0, width, height);
  g.textBaseline = "middle";
  drawBands();
  drawAxis();
  drawCompute();
  drawBrackets();
  drawReads();
  drawMap();
}
function text(string, left, y, room, colour, align) {
  if (room < 8) return false;
  if (g.measureText(string).width > room) return false;
  g.fillStyle = colour;
  g.textAlign = align || "left";
  g.fillText(string, left, y);
  return true;
}
/* The part of a name that is in view, so that it stays readable while its owner is larger than the view. */
function within(from, to) {
  const left = Math.max(0, x(from)), right = Math.min(width, x(to));
  return { left, right, room: right - left };
}
function first(ends, t) {
  let low = 0, high = ends.length;
  while (low < high) { const middle = (low + high) >> 1; if (ends[middle] < t) low = middle + 1; else high = middle; }
  return low;
}
function laneTitle(string, lane, otherwise) {
  g.font = "600 11px " + FONT;
  const fits = g.measureText(string).width < width - 10 ? string : otherwise;
  g.fillStyle = colours.paper;
  g.fillRect(3, lane.y + 3, g.measureText(fits).width + 6, 16);
  text(fits, 6, lane.y + 12, width, colours.soft);
  g.font = "11px " + FONT;
}
const FONT = "system-ui, 'Segoe UI', Arial, sans-serif";
function drawBands() {
  const { tokens, layers } = layout;
  g.font = "11px " + FONT;
  for (let i = 0; i < evaluations.length; i++) {
    const e = evaluations[i];
    if (e.end < view.from || e.begin > view.to) continue;
    const { left, right, room } = within(e.begin, e.end);
    if (i % 2 === 0) { g.fillStyle = colours.band; g.fillRect(left, tokens.y, room, layout.gap.y - tokens.y); }
    g.fillStyle = colours.soft;
    if (x(e.begin) >= 0) g.fillRect(x(e.begin), tokens.y, 1, layout.gap.y - tokens.y);
    const label = shown(e.label);
    const short = label.startsWith("prompt") ? "prompt" : String(i);
    text(label, left + 5, tokens.y + 10, room - 8, colours.ink) || text(short, left + 3, tokens.y + 10, room - 4, colours.ink);
  }
  const layerWidth = ((windows.experts_end[nWindows - 1] - (windows.attention_begin[0] ?? 0)) / Math.max(1, nWindows) / (view.to - view.from)) * width;
  if (layerWidth < 12) { text("layers: zoom in", 5, layers.y + 8, width, colours.soft); return; }
  for (let w = first(windows.experts_end, view.from); w < nWindows; w++) {
    const from = windows.attention_begin[w] ?? windows.experts_begin[w];
    if (from > view.to) break;
    const { left, right, room } = within(from, windows.experts_end[w]);
    g.fillStyle = windows.block[w] % 2 ? colours.line : colours.panel;
    g.fillRect(left, layers.y, room, layers.h);
    if (layerWidth > 40) { g.fillStyle = colours.line; g.fillRect(x(from), layers.y, 1, layout.gap.y - layers.y); }
    const name = String(windows.block[w]);
    text("layer " + name, (left + right) / 2, layers.y + 9, room - 6, colours.ink, "center") || text(name, (left + right) / 2, layers.y + 9, room - 2, colours.ink, "center");
  }
}
function drawAxis() {
  const { axis } = layout, length = view.to - view.from;
  const rough = (length / width) * 110, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  g.font = "11px " + FONT;
  for (let t = Math.ceil(view.from / step) * step; t < view.to; t += step) {
    g.fillStyle = colours.line;
    g.fillRect(x(t), axis.y, 1, axis.h);
    g.fillStyle = colours.soft;
    g.textAlign = "left";
    const digits = Math.max(0, -Math.floor(Math.log10(step / 1e6) + 1e-9));
    g.fillText((t / 1e6).toFixed(Math.min(4, digits)) + " ms", x(t) + 4, axis.y + 10);
  }
}
/* What is narrower than a pixel is gathered into its column, and `column` draws what gathered there. */
function drawRow(r, one, column) {
  let current = -1, gathered = null;
  const flush = () => { if (gathered) column(current, gathered); gathered = null; };
  for (let i = first(r.end, view.from); i < r.begin.length && r.begin[i] < view.to; i++) {
    const left = x(r.begin[i]), right = x(r.end[i]);
    if (right - left >= 2) { flush(); one(i, left, right); continue; }
    const px = Math.floor(left);
    if (px !== current || !gathered) { flush(); current = px; gathered = {}; }
    gathered[r.key[i]] = (gathered[r.key[i]] || 0) + (right - left);
  }
  flush();
}
const dims = (w) => selected !== null && selected.window >= 0 && w !== selected.window;
function drawCompute() {
  const { compute: lane, computeTitle } = layout, top = lane.y, h = lane.h - 10;
  laneTitle("COMPUTE", computeTitle);
  drawRow(compute, (i, left, right) => {
    const key = compute.key[i], event = compute.event[i], isWait = key === "wait";
    g.globalAlpha = dims(windowOf[event]) ? 0.4 : 1;
    g.fillStyle = isWait ? hatch : colours[key];
    const visible = Math.max(left, -4), w = Math.min(right, width + 4) - visible;
    g.fillRect(visible, top, Math.max(1, w - (w > 5 ? 1 : 0)), h);
    if (isWait && w > 4) { g.strokeStyle = colours.wait; g.strokeRect(visible + 0.5, top + 0.5, w - 2, h - 1); }
    const l = Math.max(0, left), room = Math.min(width, right) - l;
    const took = time(compute.end[i] - compute.begin[i]), name = key;
    if (isWait && room > 34) {
      const string = g.measureText("waits " + took).width < room - 10 ? "waits " + took : took, tw = g.measureText(string).width;
      if (tw < room - 6) { g.fillStyle = colours.paper; g.fillRect((l + l + room) / 2 - tw / 2 - 3, top + h / 2 - 8, tw + 6, 16); text(string, l + room / 2, top + h / 2 + 1, room, colours.wait, "center"); }
    } else if (!isWait) {
      const ink = key === "other" ? colours.ink : colours["on-bar"];
      text(name + " " + took, l + 5, top + h / 2 + 1, room - 8, ink) || text(name, l + 4, top + h / 2 + 1, room - 6, ink);
    }
  }, (px, gathered) => {
    let sum = 0, y = top + h;
    for (const key in gathered) sum += gathered[key];
    for (const key of ["attention", "router", "experts", "predict", "other", "wait"]) {
      if (!gathered[key]) continue;
      const part = (gathered[key] / sum) * h;
      g.fillStyle = colours[key];
      g.fillRect(px, y - part, 1, part);
      y -= part;
    }
  });
  g.globalAlpha = 1;
  drawRow(predict, (i, left, right) => { g.fillStyle = colours.predict; g.fillRect(left, top + h + 2, right - left, 5); },
    (px) => { g.fillStyle = colours.predict; g.fillRect(px, top + h + 2, 1, 5); });
}
function drawBrackets() {
  const { bracketTitle, brackets: zone } = layout;
  if (!brackets.length) return;
  const mean = data.summary.total.windows ? (data.summary.total.prefetch_s * 1e9) / data.summary.total.windows : 0;
  const near = (Math.max(mean, 1) / (view.to - view.from)) * width > 8;
  const title = near ? "FROM HOOK TO LAST READ, A LAYER  (red: past the end of attention = bubble)" : "BUBBLE, A LAYER  (highest: " + time(largestBubble) + ")";
  laneTitle(title, bracketTitle, near ? "HOOK TO LAST READ" : "BUBBLE");
  if (!near) { drawBubbles(zone); return; }
  brackets.forEach((r, k) => {
    const y = zone.y + (k + 0.5) * (zone.h / brackets.length);
    drawRow(r, (i, left, right) => {
      const w = r.event[i], bubble = windows.bubble[w], red = x(r.end[i] - bubble);
      g.globalAlpha = dims(w) ? 0.3 : 1;
      g.strokeStyle = g.fillStyle = colours.soft;
      g.lineWidth = 1.5;
      g.beginPath(); g.moveTo(left + 0.75, y - 5); g.lineTo(left + 0.75, y + 5); g.moveTo(left, y); g.lineTo(Math.min(red, right), y); g.stroke();
      if (bubble > 0) { g.fillStyle = colours.wait; g.fillRect(red, y - 2.5, right - red, 5); }
      if (right - left > 24) { g.beginPath(); g.moveTo(right, y); g.lineTo(right - 7, y - 5); g.lineTo(right - 7, y + 5); g.fill(); }
      if (right - left > width * 0.25 || (selected && selected.window === w)) {
        g.strokeStyle = bubble > 0 ? colours.wait : colours.soft;
        g.lineWidth = 1;
        g.setLineDash([3, 3]);
        for (const px of bubble > 0 ? [red, right] : [right]) { g.beginPath(); g.moveTo(px, layout.compute.y); g.lineTo(px, layout.reads.y + layout.reads.h); g.stroke(); }
        g.strokeStyle = colours.soft;
        g.beginPath(); g.moveTo(left, layout.compute.y); g.lineTo(left, layout.reads.y); g.stroke();
        g.setLineDash([]);
      }
      const label = "layer " + windows.block[w] + ": " + time(windows.prefetch[w]) + (bubble > 0 ? ", bubble " + time(bubble) : ", hidden");
      const l = Math.max(0, left), room = Math.min(width, right) - l, tw = g.measureText(label).width;
      if (tw < room - 16) { g.fillStyle = colours.paper; g.fillRect(l + 8, y - 7, tw + 6, 14); text(label, l + 11, y + 0.5, room, bubble > 0 ? colours.wait : colours.ink); }
      g.globalAlpha = 1;
    }, (px) => { g.fillStyle = colours.soft; g.fillRect(px, y - 2, 1, 4); });
  });
}
function drawBubbles(zone) {
  const highest = new Float64Array(Math.ceil(width) + 1);
  for (let w = first(windows.experts_end, view.from); w < nWindows && windows.experts_begin[w] < view.to; w++) {
    const px = Math.floor(x(windows.experts_begin[w]));
    if (px >= 0 && px < highest.length) highest[px] = Math.max(highest[px], windows.bubble[w]);
  }
  g.fillStyle = colours.wait;
  highest.forEach((b, px) => { if (b) { const h = (b / largestBubble) * (zone.h - 2); g.fillRect(px, zone.y + zone.h - h, 1.5, h); } });
  g.fillStyle = colours.line;
  g.fillRect(0, zone.y + zone.h, width, 1);
}
/* Rows are as high as those in view allow; their number is rounded up, so that they do not change at every step. */
function readsRowHeight() {
  let used = reads.length;
  while (used > 1) {
    const r = reads[used - 1], i = first(r.end, view.from);
    if (i < r.begin.length && r.begin[i] < view.to) break;
    used--;
  }
  const steps = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];
  const rows = Math.min(reads.length || 1, steps.find((s) => s >= used) || used);
  return Math.min(24, (layout.reads.h - 6) / rows);
}
function drawReads() {
  const { readsTitle, reads: lane } = layout, h = layout.row = readsRowHeight();
  laneTitle("READS" + (reads.length > 1 ? "  (" + reads.length + " at a time at most)" : reads.length ? "" : "  none were recorded"), readsTitle, "READS");
  g.font = (h < 12 ? "9px " : "11px ") + FONT;
  reads.forEach((r, k) => {
    const y = lane.y + k * h, thick = h > 5 ? h - 2 : h > 3 ? h - 1 : h;
    if (y + thick > lane.y + lane.h) return;
    drawRow(r, (i, left, right) => {
      const key = r.key[i], event = r.event[i];
      g.globalAlpha = dims(windowOf[event]) ? 0.3 : 1;
      const visible = Math.max(left, -4), w = Math.min(right, width + 4) - visible;
      g.fillStyle = colours[key];
      if (key === "pending" && w > 4) { g.strokeStyle = colours[key]; g.lineWidth = 1.5; g.strokeRect(visible + 0.75, y + 0.75, w - 2.5, thick - 1.5); }
      else g.fillRect(visible, y, Math.max(1, w - (w > 5 ? 1 : 0)), thick);
      if (h >= 9) {
        const l = Math.max(0, left), room = Math.min(width, right) - l - 6, colour = key === "pending" ? colours.ink : colours["on-bar"];
        const name = "L" + block[event] + (expert[event] >= 0 ? " e" + expert[event] : "");
        text(name + "  " + key + "  " + time(r.end[i] - r.begin[i]), l + 4, y + thick / 2 + 1, room, colour) || text(name, l + 4, y + thick / 2 + 1, room, colour) || text("L" + block[event], l + 3, y + thick / 2 + 1, room, colour);
      }
    }, (px, gathered) => {
      let best = null, sum = 0;
      for (const key in gathered) { sum += gathered[key]; if (best === null || gathered[key] > gathered[best]) best = key; }
      g.globalAlpha = Math.min(1, 0.3 + sum);
      g.fillStyle = colours[best];
      g.fillRect(px, y, 1, thick);
    });
    g.globalAlpha = 1;
  });
}
/* The whole run in a strip: how much of each column was waited, and how much was read; made once for a width. */
let strip = null;
function drawMap() {
  const { map } = layout;
  if (!strip || strip.width !== width) {
    const share = (rows, wanted) => {
      const sums = new Float64Array(Math.ceil(width) + 1);
      for (const r of rows) for (let i = 0; i < r.begin.length; i++) {
        if (wanted && r.key[i] !== wanted) continue;
        let from = (r.begin[i] / span) * width;
        const to = (r.end[i] / span) * width;
        for (let px = Math.floor(from); from < to && px < sums.length; px++) { sums[px] += Math.min(to, px + 1) - from; from = px + 1; }
      }
      return sums;
    };
    strip = { width, wait: share([compute], "wait"), read: share(reads), most: Math.max(1, reads.length) };
  }
  g.fillStyle = colours.panel;
  g.fillRect(0, map.y, width, map.h);
  for (let px = 0; px < width; px++) {
    const wait = strip.wait[px] * 16, read = (strip.read[px] / strip.most) * 16;
    g.fillStyle = colours.experts; g.globalAlpha = 0.45; g.fillRect(px, map.y + 2, 1, 16 - wait);
    g.globalAlpha = 1; g.fillStyle = colours.wait; g.fillRect(px, map.y + 18 - wait, 1, wait);
    g.fillStyle = colours.demand; g.fillRect(px, map.y + 38 - read, 1, read);
  }
  const left = Math.max(0, (view.from / span) * width), right = Math.min(width, (view.to / span) * width);
  g.fillStyle = colours.paper; g.globalAlpha = 0.6;
  g.fillRect(0, map.y, left, map.h); g.fillRect(right, map.y, width - right, map.h);
  g.globalAlpha = 1; g.strokeStyle = colours.ink; g.lineWidth = 1.5;
  g.strokeRect(left + 0.75, map.y + 0.75, Math.max(3, right - left - 1.5), map.h - 1.5);
}

/* ---------------------------------------------------------------- what is where */

function find(px, py) {
  const t = at(px), slack = ((view.to - view.from) / width) * 2;
  const inRow = (r) => {
    const i = first(r.end, t - slack);
    return i < r.begin.length && r.begin[i] <= t + slack ? i : -1;
  };
  const inside = (zone) => py >= zone.y && py < zone.y + zone.h;
  if (inside(layout.compute)) {
    const r = py > layout.compute.y + layout.compute.h - 9 ? predict : compute, i = inRow(r);
    return i < 0 ? null : { event: r.event[i], key: r.key[i], from: r.begin[i], to: r.end[i], window: windowOf[r.event[i]] };
  }
  if (inside(layout.reads)) {
    const r = reads[Math.floor((py - layout.reads.y) / layout.row)], i = r ? inRow(r) : -1;
    return i < 0 ? null : { event: r.event[i], key: r.key[i], from: begin[r.event[i]], to: end[r.event[i]], window: windowOf[r.event[i]] };
  }
  if (brackets.length && inside(layout.brackets)) {
    const r = brackets[Math.min(brackets.length - 1, Math.floor(((py - layout.brackets.y) / layout.brackets.h) * brackets.length))], i = inRow(r);
    return i < 0 ? null : { event: -1, key: "bracket", from: r.begin[i], to: r.end[i], window: r.event[i] };
  }
  return null;
}
function title(found) {
  if (found.key === "bracket") return "layer " + windows.block[found.window] + ": reads ahead, from hook to last arrival";
  const e = found.event, layer = block[e] >= 0 ? "layer " + block[e] + ": " : "";
  return layer + (kind[e] === READ ? "read of expert " + expert[e] + ", " + MEANING[found.key] : MEANING[found.key]);
}
function describe(found) {
  const box = byId("details");
  box.textContent = "";
  box.append(make("h2", title(found) + "  (" + time(found.to - found.from) + ")"));
  const facts = [], e = found.event, w = found.window;
  const of = evaluations[e >= 0 ? evaluation[e] : windows.evaluation[w]];
  facts.push(["of", of ? shown(of.label) : "none"], ["from", (found.from / 1e6).toFixed(4) + " ms"], ["to", (found.to / 1e6).toFixed(4) + " ms"]);
  if (e >= 0 && kind[e] === READ) facts.push(["bytes", size(bytes[e])], ["rate", size((bytes[e] / (end[e] - begin[e])) * 1e9) + "/s"]);
  if (w >= 0) {
    facts.push(["layer's t_attention", time(windows.attention[w])], ["t_prefetch", windows.prefetch[w] ? time(windows.prefetch[w]) : "nothing was read ahead"], ["bubble", time(windows.bubble[w])],
      ["t_experts", time(windows.experts[w])], ["waited", time(windows.wait[w])], ["experts hidden", windows.hidden[w]]);
  }
  const list = make("dl");
  for (const [name, value] of facts) { const item = make("div"); item.append(make("dt", name), make("dd", value)); list.append(item); }
  box.append(list);
}

/* ---------------------------------------------------------------- hands */

function zoom(by, px) {
  const t = at(px);
  look(t - (t - view.from) * by, t + (view.to - t) * by);
}
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const pixels = e.deltaMode === 1 ? 30 : 1;
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    const by = (((e.deltaX || e.deltaY) * pixels) / width) * (view.to - view.from);
    look(view.from + by, view.to + by);
  } else zoom(Math.exp(e.deltaY * pixels * 0.002), e.offsetX);
}, { passive: false });
let grabbed = null;
canvas.addEventListener("pointerdown", (e) => {
  canvas.setPointerCapture(e.pointerId);
  canvas.focus({ preventScroll: true });
  grabbed = { px: e.offsetX, from: view.from, to: view.to, moved: false, map: e.offsetY >= layout.map.y };
  if (grabbed.map) toMap(e.offsetX);
});
function toMap(px) {
  const half = (view.to - view.from) / 2, t = (px / width) * span;
  look(t - half, t + half);
}
canvas.addEventListener("pointermove", (e) => {
  if (!grabbed) { hover(e.offsetX, e.offsetY); return; }
  if (grabbed.map) { toMap(e.offsetX); return; }
  const by = ((grabbed.px - e.offsetX) / width) * (grabbed.to - grabbed.from);
  if (Math.abs(grabbed.px - e.offsetX) > 3) { grabbed.moved = true; tip.hidden = true; }
  if (grabbed.moved) look(grabbed.from + by, grabbed.to + by);
});
canvas.addEventListener("pointerup", (e) => {
  const click = grabbed && !grabbed.moved && !grabbed.map;
  grabbed = null;
  if (!click) return;
  selected = find(e.offsetX, e.offsetY);
  if (selected) describe(selected);
  draw();
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("dblclick", (e) => {
  const found = find(e.offsetX, e.offsetY);
  if (found && found.window >= 0) lookAtLayer(windows.evaluation[found.window], windows.block[found.window]);
});
function hover(px, py) {
  const found = find(px, py);
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = title(found) + "\n" + time(found.to - found.from) + (found.event >= 0 && kind[found.event] === READ ? ", " + size(bytes[found.event]) : "");
  tip.style.left = Math.min(px + 14, width - tip.offsetWidth - 4) + "px";
  tip.style.top = py + 18 + "px";
}
const KEYS = {
  f: () => look(-span, 2 * span),
  "+": () => zoom(1 / 1.5, width / 2), "=": () => zoom(1 / 1.5, width / 2), "-": () => zoom(1.5, width / 2),
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(1 / 1.5, width / 2), ArrowDown: () => zoom(1.5, width / 2),
  t: () => lookAtToken(selected && selected.window >= 0 ? windows.evaluation[selected.window] : Math.floor(evaluations.length / 2)), l: aLayer,
  Home: () => lookAtToken(0), End: () => lookAtToken(evaluations.length - 1),
  "[": () => lookAtToken(currentToken() - 1), "]": () => lookAtToken(view.to - view.from > span ? 0 : currentToken() + 1),
  Escape: () => { selected = null; draw(); },
};
/* One whose bubble is in the middle of those that have one, else of a token in the middle. */
function aLayer() {
  const some = Array.from(windows.bubble, (bubble, w) => ({ bubble, w })).filter((o) => o.bubble > 0 && evaluations[windows.evaluation[o.w]].label.startsWith("token")).sort((a, b) => a.bubble - b.bubble);
  const w = selected && selected.window >= 0 ? selected.window : some.length ? some[some.length >> 1].w : nWindows >> 1;
  if (w < nWindows) lookAtLayer(windows.evaluation[w], windows.block[w]);
}
function pan(by) { const d = by * (view.to - view.from); look(view.from + d, view.to + d); }
window.addEventListener("keydown", (e) => {
  if (e.target.tagName === "INPUT" || e.ctrlKey || e.metaKey || e.altKey || !KEYS[e.key]) return;
  e.preventDefault();
  KEYS[e.key]();
});
for (const button of document.querySelectorAll("[data-key]")) button.addEventListener("click", () => KEYS[button.dataset.key]());
byId("jump").max = Math.max(0, evaluations.length - 1);
byId("jump").addEventListener("input", (e) => { if (e.target.value !== "") lookAtToken(+e.target.value); });
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark";
  document.documentElement.dataset.theme = given.theme = dark ? "light" : "dark";
  readColours();
  draw();
  remember();
});
window.addEventListener("hashchange", follow);
new ResizeObserver(() => requestAnimationFrame(() => { measure(); paint(); })).observe(byId("stage"));

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
fillHeader();
measure();
follow();
paint();
