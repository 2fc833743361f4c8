"use strict";
// Draws the page from the JSON in #data. Text of runs and samples is only ever put into text nodes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const DASHES = ["", "7 4", "2 3"]; // with six colours: 18 distinguishable runs
const PHASE_COLOURS = ["#77aadd", "#ee8866", "#44bb99", "#ffaabb", "#aaaa00", "#eedd88", "#99ddff", "#bbcc33", "#9a9a9a"];
const PHASE_ORDER = ["rollout", "update", "eval", "reward", "pack", "publish", "load", "checkpoint", "report"];
const hidden = new Set();
const charts = [];
let smoothing = 0;
let view = null; // the steps that all curves show, [from, to]; null: all of them

const $ = (id) => document.getElementById(id);
function el(name, props = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key === "style") node.style.cssText = value; else if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const colour = (run) => `var(--s${run % 6})`;
const dash = (run) => DASHES[Math.floor(run / 6) % 3];
const swatch = (run) => el("i", { className: "swatch", style: `border-top: 3px ${["solid", "dashed", "dotted"][Math.floor(run / 6) % 3]} ${colour(run)}` });

function number(value, percent, digits = 4) { // more digits where four do not tell values apart
  if (value === null || value === undefined) return "not a number";
  if (percent) return digits > 4 ? `${Number((100 * value).toPrecision(digits))}%` : `${(100 * value).toFixed(1)}%`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(digits - 2);
  if (size >= 1000) return value.toLocaleString("en-US", digits > 4 ? { maximumSignificantDigits: digits } : { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits)));
}
function seconds(value) {
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 90) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
  return h ? `${h} h ${m} min` : `${m} min ${whole % 60} s`;
}

// ---- read-out -------------------------------------------------------------------------------------------------------
const tip = $("tip");
function showTip(event, ...rows) {
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16;
  tip.style.left = `${Math.max(x, 4)}px`;
  tip.style.top = `${Math.max(y, 4)}px`;
}
const hideTip = () => { tip.hidden = true; };

// ---- files ----------------------------------------------------------------------------------------------------------
function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name.replace(/[^\w.@-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
const csvCell = (value) => value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
function svgFile(picture) { // a picture without this page: its colours and fonts go along
  const copy = picture.cloneNode(true), style = getComputedStyle(document.documentElement);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", picture.clientWidth || 500);
  copy.setAttribute("font-family", "sans-serif");
  copy.prepend(svg("style", {}, "text { fill: var(--soft); font-size: 11.5px; } text.exact { fill: var(--good); font-size: 19px; }"),
    svg("rect", { width: "100%", height: "100%", fill: "var(--card)" }));
  return copy.outerHTML.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
}
function exports(head, name, rows, picture) {
  const one = (kind, make) => {
    const node = el("button", { type: "button", textContent: kind, title: `save this curve as ${kind}`, "aria-label": `${name}: save as ${kind}` });
    node.addEventListener("click", make);
    return node;
  };
  head.append(el("span", { className: "exports" }, one("CSV", () => download(`${name}.csv`, "text/csv", csv(rows()))),
    one("SVG", () => download(`${name}.svg`, "image/svg+xml", svgFile(picture)))));
}

// ---- scales ---------------------------------------------------------------------------------------------------------
function niceTicks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}
function linearScale(values, fixed) {
  let low = Math.min(...values), high = Math.max(...values);
  if (fixed) [low, high] = fixed;
  else {
    if (low >= 0 && low < 0.4 * high) low = 0;
    if (low === 0 && high === 0) high = 1;
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const pad = 0.06 * (high - low);
    high += pad; if (low !== 0) low -= pad;
  }
  return { at: (v) => (v - low) / (high - low), ticks: niceTicks(low, high, 4) };
}
function symlogScale(values) { // zero at the bottom, then one grid line per decade from the smallest gap on
  const gaps = values.map(Math.abs).filter((v) => v > 0);
  if (!gaps.length) return { at: () => 0.02, ticks: [0] };
  const first = Math.floor(Math.log10(Math.min(...gaps))), last = Math.max(Math.ceil(Math.log10(Math.max(...gaps))), first + 1);
  const span = last - first + 1;
  const at = (v) => v <= 0 ? 0 : Math.max(Math.log10(v) - first + 1, 0.02) / span;
  const every = Math.ceil((last - first + 1) / 5), ticks = [0];
  for (let d = last; d >= first; d -= every) ticks.push(10 ** d);
  return { at, ticks };
}
function smooth(values, alpha) { // exponential mean without the bias of its start; gaps stay gaps
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = alpha * sum + (1 - alpha) * v; weight = alpha * weight + (1 - alpha);
    return sum / weight;
  });
}

// ---- charts ---------------------------------------------------------------------------------------------------------
function card(title, sub, wide) {
  const head = el("div", { className: "top" }, el("h3", { textContent: title }));
  const note = el("p", { className: "sub" });
  note.append(...[].concat(sub ?? []));
  const node = el("div", { className: `card chart${wide ? " wide" : ""}` }, head, note);
  return { node, head, note };
}
function frame(node, height, label) {
  const picture = svg("svg", { height, role: "img", "aria-label": label, tabindex: 0 });
  node.append(picture);
  return picture;
}
// The labels of ticks, with as many digits as it takes that no two are the same; `format` gets value and digits.
function tickLabels(ticks, format) {
  for (let digits = 4; ; digits++) {
    const labels = ticks.map((tick) => format(tick, digits));
    if (digits === 12 || new Set(labels).size === labels.length) return { labels, digits };
  }
}
// Grid and axes with their names; returns the two scales in pixels, and the digits that its numbers need.
function axes(picture, height, xMax, xMin, scale, format, unit = "") {
  const width = picture.clientWidth || 500, { labels, digits } = tickLabels(scale.ticks, format);
  const left = 14 + 6.7 * Math.max(...labels.map((t) => t.length)), right = width - 12, top = 22, foot = height - 38;
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.replaceChildren();
  const x = (v) => left + (xMax === xMin ? 0.5 : (v - xMin) / (xMax - xMin)) * (right - left);
  const y = (v) => foot - scale.at(v) * (foot - top);
  scale.ticks.forEach((tick, i) => {
    picture.append(svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }));
    picture.append(svg("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, labels[i]));
  });
  const steps = xMax === xMin ? [xMin] : niceTicks(xMin, xMax, Math.max(2, Math.min(8, (right - left) / 75))).filter(Number.isInteger);
  steps.forEach((tick) => picture.append(svg("text", { x: x(tick), y: height - 21, "text-anchor": "middle" }, tick.toLocaleString("en-US"))));
  picture.append(svg("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle", class: "axis" }, "step"));
  picture.append(svg("text", { x: 0, y: 11, class: "axis" }, unit));
  picture.append(svg("line", { x1: left, x2: right, y1: foot, y2: foot, stroke: "var(--line)" }));
  return { x, y, left, right, top, foot, digits: digits > 4 ? digits + 1 : 4, invert: (px) => xMin + (px - left) / (right - left) * (xMax - xMin) };
}
function path(steps, values, x, y) {
  let d = "", open = false;
  steps.forEach((step, i) => {
    if (values[i] === null) { open = false; return; }
    d += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    open = true;
  });
  return d;
}
function nearest(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
  return best;
}
const lastStep = Math.max(...RUNS.map((run) => run.steps));
const range = () => view ?? [0, lastStep];
function zoom(from, to) { // to these steps; without arguments to all
  view = null;
  if (from !== undefined) {
    let low = Math.max(0, Math.round(Math.min(from, to))), high = Math.min(lastStep, Math.round(Math.max(from, to)));
    if (high - low < 2) { low = Math.max(0, Math.min(low, lastStep - 2)); high = Math.min(lastStep, low + 2); }
    if (low > 0 || high < lastStep) view = [low, high];
  }
  const node = $("zoom-reset");
  node.hidden = view === null;
  node.textContent = view ? `steps ${view[0]} to ${view[1]} · show all` : "";
  charts.forEach((chart) => chart.draw());
}
let clips = 0;
const hoverAll = (step) => charts.forEach((chart) => chart.mark(step));

function lineChart(key, title, { sub, unit, symlog = false, smoothable = true, height = 232, wide = false } = {}) {
  const present = RUNS.map((run, i) => ({ i, run, data: run.series[key] })).filter((one) => one.data && one.data[0].length);
  if (!present.length) return null;
  const about = DATA.metrics[key] ?? {}; // nothing is known of what an engine of the user's logs
  title ??= about.title ?? key; unit ??= about.unit ?? "";
  const box = card(title, sub ?? about.meaning, wide), picture = frame(box.node, height, title);
  if (about.healthy) box.note.title = `Healthy: ${about.healthy}`;
  const kind = DATA.heldOut.endsWith("accuracy") ? /\/avg@|\/pass@|frac_/ : /\/pass@|frac_/; // a reward is a plain number
  const share = kind.test(key) && present.every((one) => one.data[1].every((v) => v === null || (v >= 0 && v <= 1)));
  let geometry = null, marks = null;
  const clip = `clip${clips++}`;
  const all = () => {
    const steps = [...new Set(present.flatMap((one) => one.data[0]))].sort((a, b) => a - b);
    const at = present.map(({ data: [xs, ys] }) => new Map(xs.map((x, k) => [x, ys[k]])));
    return [["step", ...present.map((one) => RUNS.length > 1 ? `${key} ${one.run.label}` : key)], ...steps.map((x) => [x, ...at.map((one) => one.get(x))])];
  };
  exports(box.head, key, all, picture);
  function draw() {
    const seen = present.filter((one) => !hidden.has(one.i)), [from, to] = range();
    const within = ({ data: [xs, ys] }) => ys.filter((v, k) => v !== null && xs[k] >= from && xs[k] <= to);
    const values = seen.flatMap(within);
    const fixed = share && Math.max(...values) > 0.3 ? [0, 1] : null;
    const scale = symlog ? symlogScale(values) : linearScale(values.length ? values : [0, 1], fixed);
    const format = symlog ? (v) => v === 0 ? "0" : v.toExponential(0).replace("e+0", "") : (v, digits) => share ? `${Number((100 * v).toPrecision(digits))}%` : number(v, false, digits);
    geometry = axes(picture, height, to, from, scale, format, unit);
    const { left, right, top, foot } = geometry, curves = svg("g", { "clip-path": `url(#${clip})` });
    const clipping = svg("clipPath", { id: clip });
    clipping.append(svg("rect", { x: left - 4, y: top - 6, width: right - left + 8, height: foot - top + 12 }));
    picture.append(clipping, curves);
    const zeros = symlog ? seen.filter((one) => one.data[1].every((v) => v === 0)) : [];
    for (const { i, data: [steps, ys] } of seen) {
      const turn = zeros.findIndex((one) => one.i === i);
      const stroke = { fill: "none", stroke: colour(i), "stroke-linejoin": "round", "stroke-dasharray": dash(i) };
      if (turn >= 0 && zeros.length > 1) { // runs that share the zero line take turns on it
        stroke["stroke-dasharray"] = `12 ${12 * (zeros.length - 1)}`;
        stroke["stroke-dashoffset"] = -12 * turn;
      }
      const alpha = smoothable && !symlog && steps.length > 20 ? smoothing : 0;
      if (alpha) curves.append(svg("path", { ...stroke, d: path(steps, ys, geometry.x, geometry.y), "stroke-width": 1, opacity: 0.28 }));
      const shown = alpha ? smooth(ys, alpha) : ys;
      curves.append(svg("path", { ...stroke, d: path(steps, shown, geometry.x, geometry.y), "stroke-width": 2 }));
      if (steps.length <= 25 || steps.filter((x) => x >= from && x <= to).length <= 25) steps.forEach((step, k) => {
        if (ys[k] !== null) curves.append(svg("circle", { cx: geometry.x(step), cy: geometry.y(ys[k]), r: 2.8, fill: colour(i) }));
      });
    }
    if (symlog && zeros.length && zeros.length === seen.length) {
      const middle = { x: (geometry.left + geometry.right) / 2, "text-anchor": "middle" };
      picture.append(svg("text", { ...middle, y: height / 2 - 4, class: "exact" }, "exactly 0"));
      const most = Math.max(...zeros.map((one) => one.run.series[key][0].length));
      picture.append(svg("text", { ...middle, y: height / 2 + 16 }, key === DATA.parityKey ? "sampler and learner agree bit for bit" : most > 1 ? `in all ${most} rows` : "in its only row"));
    }
    marks = svg("g", {});
    picture.append(marks);
  }
  function mark(step) {
    marks?.replaceChildren();
    if (step === null || !geometry) return [];
    const rows = [];
    for (const { i, run, data: [steps, ys] } of present) {
      if (hidden.has(i)) continue;
      const k = nearest(steps, step);
      if (steps[k] < range()[0] || steps[k] > range()[1]) continue;
      rows.push({ i, run, step: steps[k], value: ys[k] });
      if (ys[k] !== null) marks.append(svg("circle", { cx: geometry.x(steps[k]), cy: geometry.y(ys[k]), r: 4, fill: colour(i), stroke: "var(--card)", "stroke-width": 1.5 }));
    }
    if (!rows.length) return [];
    const x = geometry.x(rows[0].step);
    marks.prepend(svg("line", { x1: x, x2: x, y1: geometry.top, y2: geometry.foot, stroke: "var(--soft)", "stroke-width": 1, "stroke-dasharray": "3 3" }));
    return rows;
  }
  const tell = (rows) => rows.map((row) => el("p", {}, el("span", {}, swatch(row.i), RUNS.length > 1 ? row.run.label : `step ${row.step}`),
    el("b", { textContent: symlog && row.value === 0 ? "exactly 0" : number(row.value, share, geometry.digits) })));
  interact(picture, () => geometry, mark, tell);
  const chart = { draw, mark, node: box.node };
  return chart;
}
// Pointer, touch and arrow keys move one read-out; the other charts show the same step. Dragging with a mouse or pen, and
// the keys + and -, show fewer steps; a double click, 0 and Escape show all again.
function interact(picture, geometry, mark, tell) {
  let at = null, start = null, frame = null;
  const inside = (step) => Math.max(range()[0], Math.min(range()[1], Math.round(step)));
  const px = (event) => event.clientX - picture.getBoundingClientRect().left;
  const show = (event, step) => {
    at = inside(step);
    hoverAll(at);
    const rows = mark(at);
    if (!rows.length) { hideTip(); return; }
    const head = RUNS.length > 1 ? [el("p", { textContent: `step ${rows[0].step}` })] : [];
    showTip(event, ...head, ...tell(rows));
  };
  const place = () => {
    const box = picture.getBoundingClientRect();
    return { clientX: box.left + geometry().x(at), clientY: box.top + 20 };
  };
  const move = (event) => {
    if (!geometry()) return;
    show(event, geometry().invert(px(event)));
    if (start === null || Math.abs(px(event) - start) < 6) return;
    frame?.remove();
    const { left, right, top, foot } = geometry(), [a, b] = [start, px(event)].map((x) => Math.max(left, Math.min(right, x))).sort((x, y) => x - y);
    frame = svg("rect", { x: a, width: b - a, y: top, height: foot - top, class: "frame" });
    picture.append(frame);
  };
  picture.addEventListener("pointermove", move);
  picture.addEventListener("pointerdown", (event) => {
    move(event);
    if (event.pointerType === "touch" || event.button !== 0) return;
    start = px(event);
    try { picture.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone already */ }
  });
  picture.addEventListener("pointerup", (event) => {
    const from = start, drawn = frame !== null;
    start = null; frame?.remove(); frame = null;
    if (from !== null && drawn) zoom(geometry().invert(from), geometry().invert(px(event)));
  });
  picture.addEventListener("pointercancel", () => { start = null; frame?.remove(); frame = null; });
  picture.addEventListener("dblclick", () => zoom());
  const leave = () => { at = null; hoverAll(null); hideTip(); };
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  picture.addEventListener("keydown", (event) => {
    const [from, to] = range(), middle = at ?? (from + to) / 2, half = { "+": 0.25, "=": 0.25, "-": 1 }[event.key];
    if (half || event.key === "0" || event.key === "Escape") {
      event.preventDefault();
      if (half) zoom(middle - half * (to - from), middle + half * (to - from)); else zoom();
      return;
    }
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (!by) return;
    event.preventDefault();
    at = inside((at ?? from) + by);
    show(place(), at);
  });
}

function timeChart() {
  const present = RUNS.map((run, i) => ({ i, run })).filter(({ run }) => run.phases.length);
  if (!present.length) return null;
  const height = 244, box = card("Time by phase", "of each step, in seconds", true), picture = frame(box.node, height, "Time by phase");
  const names = [...new Set(present.flatMap(({ run }) => run.phases))];
  const rank = (name) => PHASE_ORDER.includes(name) ? PHASE_ORDER.indexOf(name) : PHASE_ORDER.length;
  names.sort((a, b) => rank(a) - rank(b));
  const fill = (name) => PHASE_COLOURS[Math.min(names.indexOf(name), PHASE_COLOURS.length - 1)];
  const totals = el("div", { className: "phases" });
  box.note.after(totals);
  let shown = present[0], bins = [], geometry = null, marks = null;
  exports(box.head, "time by phase", () => [["from step", "to step", ...names], ...bins.map((bin) => [bin.from, bin.to, ...names.map((name) => bin.mean[name])])], picture);
  if (present.length > 1) {
    const choose = el("select", { "aria-label": "run" }, ...present.map(({ run }, k) => el("option", { value: k, textContent: run.label })));
    choose.addEventListener("change", () => { shown = present[choose.value]; draw(); });
    box.head.append(choose);
  }
  function binned() {
    const steps = new Map();
    for (const name of shown.run.phases) {
      const [xs, ys] = shown.run.series[`time/${name}`];
      xs.forEach((x, k) => {
        if (x < range()[0] || x > range()[1]) return;
        if (x === 0 && shown.run.steps > 0) return;  // the warm start would flatten the rest; its time is in the legend
        if (!steps.has(x)) steps.set(x, {});
        steps.get(x)[name] = ys[k] ?? 0;
      });
    }
    const all = [...steps.entries()].sort((a, b) => a[0] - b[0]), count = Math.min(all.length, 100), result = [];
    for (let b = 0; b < count; b++) {
      const part = all.slice(Math.floor(b * all.length / count), Math.floor((b + 1) * all.length / count)), mean = {};
      for (const name of names) mean[name] = part.reduce((sum, [, one]) => sum + (one[name] ?? 0), 0) / part.length;
      result.push({ from: part[0][0], to: part[part.length - 1][0], mean, n: part.length });
    }
    return result;
  }
  function draw() {
    bins = binned();
    if (!bins.length) { picture.replaceChildren(); geometry = null; marks = null; totals.replaceChildren(); return; }
    const sum = (bin) => names.reduce((s, name) => s + bin.mean[name], 0);
    const from = bins[0].from, to = bins[bins.length - 1].to;
    geometry = axes(picture, height, to + 0.5, from - 0.5, linearScale([0, ...bins.map(sum)]), (v, digits) => number(v, false, digits), "seconds per step");
    for (const bin of bins) {
      const x1 = geometry.x(bin.from - 0.5), width = Math.max(geometry.x(bin.to + 0.5) - x1 - 0.8, 0.8);
      let base = 0;
      for (const name of names) {
        const value = bin.mean[name];
        if (value > 0) picture.append(svg("rect", { x: x1, width, y: geometry.y(base + value), height: geometry.y(base) - geometry.y(base + value), fill: fill(name) }));
        base += value;
      }
    }
    marks = svg("g", {});
    picture.append(marks);
    const per = names.map((name) => bins.reduce((s, bin) => s + bin.mean[name] * bin.n, 0)), whole = per.reduce((a, b) => a + b, 0);
    totals.replaceChildren(...names.map((name, k) => [name, per[k]]).filter(([, total]) => total > 0).map(([name, total]) =>
      el("div", {}, el("i", { style: `background:${fill(name)}` }), `${name} `, el("span", { textContent: `${seconds(total)} (${(100 * total / whole).toFixed(total / whole < 0.1 ? 1 : 0)}%)` }))));
  }
  function mark(step) {
    marks?.replaceChildren();
    if (step === null || !geometry) return [];
    const bin = bins.find((one) => step <= one.to) ?? bins[bins.length - 1];
    const x1 = geometry.x(bin.from - 0.5), x2 = geometry.x(bin.to + 0.5);
    marks.append(svg("rect", { x: x1, width: x2 - x1, y: geometry.top, height: geometry.foot - geometry.top, fill: "var(--ink)", opacity: 0.09 }));
    return [{ step: bin.from, bin }];
  }
  const tell = ([{ bin }]) => [
    el("p", {}, el("span", { textContent: bin.from === bin.to ? `step ${bin.from}` : `steps ${bin.from} to ${bin.to}, mean` })),
    ...[...names].reverse().filter((name) => bin.mean[name] > 0).map((name) => el("p", {}, el("span", {}, el("i", { style: `background:${fill(name)}` }), name), el("b", { textContent: seconds(bin.mean[name]) })))];
  interact(picture, () => geometry, mark, tell);
  return { draw, mark, node: box.node };
}

function parityNote() {
  const parts = [];
  RUNS.forEach((run, i) => {
    const data = run.series[DATA.parityKey];
    if (!data) return;
    parts.push(el("br"));
    if (RUNS.length > 1) parts.push(swatch(i), `${run.label}: `);
    parts.push(el("b", { className: run.parity.startsWith("not 0") ? "bad" : "good", textContent: run.parity }));
  });
  return parts;
}
