"use strict";
// Draws the page from its block of JSON. Texts of a run become text nodes and attributes, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 6, DASHES = 4, HEIGHT = 230, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
const AXES = { step: "step", tokens: "tokens", hours: "hours in steps" };
const by = id => document.getElementById(id);
const state = { axis: data.axes[0], smoothing: 4, from: 0, logarithmic: false, shown: data.runs.map(() => true) };
const charts = [];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const colour = run => `run${run % COLOURS}`;
const look = run => `${colour(run)} dash${run % DASHES}`;

// ---- numbers ----

function shown(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) if (size >= unit) return trimmed(value / unit) + name;
  return size !== 0 && size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : trimmed(value);
}

const trimmed = value => String(Number(value.toPrecision(5)));
const whole = value => Number.isInteger(value) ? value.toLocaleString("en") : shown(value);

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(factor => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Powers of ten from low to high, or round numbers where there is at most one. */
function logarithmicTicks(low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  if (last - first < 1) return ticks(low, high, 4);
  const every = Math.ceil((last - first + 1) / 6), found = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found;
}

/** Mean of what is within half a width of each point, weighted towards it (Hann); what is not finite is left out. */
function smoothed(places, values, width) {
  const result = [];
  for (let i = 0, first = 0; i < places.length; i++) {
    while (places[first] < places[i] - width / 2) first++;
    let sum = 0, total = 0;
    for (let j = first; j < places.length && places[j] <= places[i] + width / 2; j++) {
      if (!Number.isFinite(values[j])) continue;
      const weight = width ? 0.5 + 0.5 * Math.cos(2 * Math.PI * (places[j] - places[i]) / width) + 1e-9 : 1;
      sum += weight * values[j];
      total += weight;
    }
    result.push(total ? sum / total : NaN);
  }
  return result;
}

/** Index of the place that is nearest to x; places ascend. */
function nearest(places, x) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(places[high] - x) < Math.abs(places[low] - x) ? high : low;
}

// ---- charts ----

/** The lines of the runs that are shown, from where the axis begins, each with its smooth one. */
function lines(chart) {
  const found = [];
  const width = state.smoothing / 100 * state.longest;
  chart.lines.forEach((line, run) => {
    if (!line || !state.shown[run]) return;
    const cut = points => {
      const first = points[state.axis].findIndex(place => place >= state.from);
      return first < 0 ? null : { places: points[state.axis].slice(first), values: points.values.slice(first) };
    };
    const raw = cut(line.drawn), means = cut(line.smooth || line.drawn);
    if (!raw) return;
    const smooth = means && state.smoothing && !chart.exact ? smoothed(means.places, means.values, width) : null;
    found.push({ run, ...raw, smooth: smooth && { places: means.places, values: smooth } });
  });
  return found;
}

function path(places, values, x, y) {
  let text = "", pen = "M";
  places.forEach((place, i) => {
    if (Number.isFinite(values[i])) text += `${pen}${x(place).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    pen = Number.isFinite(values[i]) ? "L" : "M";
  });
  return text;
}

function addChart(chart, grid) {
  const plot = element("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${chart.metric}: arrow keys read the values` });
  const readout = element("div", { class: "readout" }), note = element("p", { class: "note" });
  grid.append(element("figure", { class: "chart" }, element("h3", {}, chart.metric), plot, readout, note));
  const view = { chart, plot, readout, note, at: null };
  charts.push(view);
  const move = event => {
    const box = plot.getBoundingClientRect();
    if (view.scale) read(view, view.scale.back(event.clientX - box.left));
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", () => read(view, null));
  plot.addEventListener("blur", () => read(view, null));
  plot.addEventListener("keydown", event => {
    const places = view.places || [];
    if (!places.length) return;
    const now = view.at === null ? places.length - 1 : nearest(places, view.at), page = Math.ceil(places.length / 10);
    const to = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - page, PageUp: now + page, Home: 0, End: places.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(view, places[Math.min(Math.max(to, 0), places.length - 1)]);
  });
}

function draw(view) {
  const width = Math.max(view.plot.clientWidth, 160);
  view.lines = lines(view.chart);
  view.places = [...new Set(view.lines.flatMap(line => line.places))].sort((a, b) => a - b);
  const values = view.lines.flatMap(line => line.values).filter(Number.isFinite);
  const notes = [], svg = drawn("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  view.plot.replaceChildren(svg);
  view.svg = svg;
  view.scale = null;
  if (values.length) {
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const logarithmic = state.logarithmic && low > 0;
    if (state.logarithmic && !logarithmic) notes.push("Linear scale, because not all values are positive.");
    const flat = Math.abs(high - low) <= 1e-12 * Math.abs(high);
    const room = flat ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.05;
    if (logarithmic) [low, high] = flat ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
    else [low, high] = [low >= 0 ? Math.max(low - room, 0) : low - room, high + room];
    const left = view.places[0], right = view.places.at(-1) > left ? view.places.at(-1) : left + 1;
    const f = logarithmic ? Math.log : value => value;
    const x = place => LEFT + (place - left) / (right - left) * (width - LEFT - RIGHT);
    const y = value => TOP + (f(high) - f(value)) / (f(high) - f(low)) * (HEIGHT - TOP - BOTTOM);
    view.scale = { x, y, back: at => left + (at - LEFT) / (width - LEFT - RIGHT) * (right - left) };
    for (const tick of logarithmic ? logarithmicTicks(low, high) : ticks(low, high, 5)) {
      svg.append(drawn("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(drawn("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, shown(tick)));
    }
    for (const tick of ticks(left, right, Math.max(width / 110, 3))) {
      const anchor = x(tick) > width - 30 ? "end" : "middle";
      svg.append(drawn("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": anchor }, shown(tick)));
    }
    for (const line of view.lines) {
      const raw = path(line.places, line.values, x, y);
      svg.append(drawn("path", { class: line.smooth ? `line raw ${colour(line.run)}` : `line ${look(line.run)}`, d: raw }));
      if (line.smooth) svg.append(drawn("path", { class: `line ${look(line.run)}`, d: path(line.smooth.places, line.smooth.values, x, y) }));
      line.places.forEach((place, i) => {
        const finite = Number.isFinite(line.values[i]);
        if (finite && line.places.length <= 40) svg.append(drawn("circle", { class: `point ${colour(line.run)}`, cx: x(place), cy: y(line.values[i]), r: 2.5 }));
        if (!finite) svg.append(drawn("text", { x: x(place), y: TOP + 8, "text-anchor": "middle" }, "×"));
      });
    }
  }
  const counts = view.lines.map(line => view.chart.lines[line.run].summary);
  const missing = counts.reduce((sum, each) => sum + each.not_finite, 0), all = counts.reduce((sum, each) => sum + each.count, 0);
  if (missing) notes.push(`${missing} of ${all} values are not finite (×).`);
  if (view.lines.some(line => view.chart.lines[line.run].smooth)) {
    notes.push(`There are ${all.toLocaleString("en")} values: the lowest and highest of each stretch are drawn, and smooth lines use means.`);
  }
  view.note.textContent = notes.join(" ");
  read(view, null);
}

/** Shows the values at a place of the axis, or the last ones. */
function read(view, at) {
  view.svg.querySelectorAll(".cursor, .read").forEach(each => each.remove());
  const ends = view.lines.map(line => line.places.at(-1)), end = ends.length ? Math.max(...ends) : 0;
  const place = at === null || !view.places.length ? null : view.places[nearest(view.places, at)];
  view.at = place;
  const parts = view.lines.map(line => {
    const i = place === null ? line.places.length - 1 : nearest(line.places, place), own = line.places[i], value = line.values[i];
    if (place !== null && view.scale && Number.isFinite(value)) {
      view.svg.append(drawn("circle", { class: `read ${colour(line.run)}`, cx: view.scale.x(own), cy: view.scale.y(value), r: 3.5 }));
    }
    const smooth = line.smooth ? line.smooth.values[nearest(line.smooth.places, own)] : null;
    const elsewhere = own === (place ?? end) ? "" : ` at ${AXES[state.axis]} ${whole(own)}`;
    return [line.run, `${data.runs[line.run]}: ${shown(value)}${smooth === null || shown(smooth) === shown(value) ? "" : `, smooth ${shown(smooth)}`}${elsewhere}`];
  });
  if (place !== null && view.scale) {
    const x = view.scale.x(place);
    view.svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  const where = view.lines.length ? `${AXES[state.axis]} ${whole(place ?? end)}` : "no run with this metric is shown";
  view.readout.replaceChildren(element("p", {}, where), ...parts.map(([run, text]) => element("p", {}, swatch(run), ` ${text}`)));
  view.plot.setAttribute("aria-valuemin", view.places[0] ?? 0);
  view.plot.setAttribute("aria-valuemax", view.places.at(-1) ?? 0);
  view.plot.setAttribute("aria-valuenow", place ?? end);
  view.plot.setAttribute("aria-valuetext", [where, ...parts.map(([, text]) => text)].join("; "));
}

function swatch(run) {
  return drawn("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, drawn("path", { class: `line ${look(run)}`, d: "M0 6H26" }));
}

// ---- tables and texts ----

function table(columns, rows) {
  const head = element("tr", {}, ...columns.map(column => element("th", { scope: "col" }, column)));
  const body = rows.map(row => element("tr", {}, ...row.map((cell, i) =>
    i ? element("td", { "data-column": columns[i] }, cell) : element("th", { scope: "row" }, cell))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function fill(id, ...content) {
  if (content.length) by(id).append(...content); else by(id).parentElement.classList.add("empty");
}

function numbers() {
  const several = data.runs.length > 1;
  const at = found => found ? `${shown(found[0])} at ${whole(found[1])}` : "-";
  const rows = data.charts.flatMap(chart => chart.lines.flatMap((line, run) => line ? [[
    chart.metric, ...(several ? [data.runs[run]] : []), at(line.summary.last), at(line.summary.lowest), at(line.summary.highest),
    line.summary.count.toLocaleString("en") + (line.summary.not_finite ? `, ${line.summary.not_finite} not finite` : ""),
  ]] : []));
  return table(["metric", ...(several ? ["run"] : []), "last, at step", "lowest, at step", "highest, at step", "values"], rows);
}

function stepTime({ run, rows: [columns, ...rows], said }) {
  return [table(columns, rows), element("p", { class: "note" }, data.runs.length > 1 ? `${data.runs[run]}: ${said}` : said)];
}

function sample({ run, step, prompt, text, reward }) {
  const whose = data.runs.length > 1 ? `${data.runs[run]}, ` : "", rest = text.startsWith(prompt) ? text.slice(prompt.length) : `\n${text}`;
  const rewarded = reward === undefined ? "" : `, reward ${shown(Number(reward))}`;
  const head = `${whose}step ${step.toLocaleString("en")}${rewarded}`;
  return element("figure", {}, element("figcaption", {}, head), element("pre", {}, element("b", {}, prompt), rest));
}

function completions({ step, prompt, columns, rows }) {
  const cells = rows.map((texts, rank) => [`${rank + 1}`, ...texts.map(text => element("pre", {}, text))]);
  const head = `step ${step.toLocaleString("en")}, the same prompt, highest reward first`;
  const asked = element("pre", {}, element("b", {}, prompt));
  return element("figure", {}, element("figcaption", {}, head), asked, table(["", ...columns], cells));
}

function start() {
  const series = data.charts.flatMap(chart => chart.lines).filter(Boolean);
  for (const { drawn, summary } of series) {
    drawn.values = drawn.values.map(Number);
    summary.last[0] = Number(summary.last[0]);
  }
  document.title = `${data.runs.join(", ")}: jaxtune report`;
  document.querySelector("h1").textContent = data.runs.join(", ");
  by("options-heading").textContent = data.runs.length > 1 ? "Options that differ" : "Options that are not the default";

  data.runs.forEach((name, run) => {
    const box = element("input", { type: "checkbox" });
    box.checked = true;
    box.addEventListener("change", () => { state.shown[run] = box.checked; charts.forEach(draw); });
    by("runs").append(element("label", {}, box, swatch(run), name));
  });
  for (const axis of data.axes) by("axis").append(element("option", { value: axis }, AXES[axis]));
  const update = () => {
    const axis = by("axis").value;
    if (axis !== state.axis) by("from").value = 0;
    Object.assign(state, { axis, smoothing: Number(by("smoothing").value), from: Number(by("from").value) || 0, logarithmic: by("logarithmic").checked });
    state.longest = Math.max(...series.map(line => line.drawn[axis].at(-1)));
    by("window").textContent = state.smoothing ? `${state.smoothing}% of the run` : "none";
    charts.forEach(draw);
  };
  by("controls").addEventListener("input", update);
  by("controls").addEventListener("submit", event => event.preventDefault());

  let grid, group;
  for (const chart of data.charts) {
    if (chart.group !== group) {
      group = chart.group;
      grid = element("div", { class: "grid" });
      by("charts").append(element("h2", {}, group), grid);
    }
    addChart(chart, grid);
  }
  fill("totals", table(["", ...data.runs], data.totals));
  fill("numbers", numbers());
  fill("step-times", ...data.step_times.flatMap(stepTime));
  fill("completions", ...(data.completions.rows ? [completions(data.completions)] : []));
  fill("samples", ...data.samples.map(sample));
  fill("options", ...(data.options.rows.length ? [table(["option", ...data.options.columns], data.options.rows)] : []));
  fill("counts", ...(data.counts.length ? [table(["", ...data.runs], data.counts)] : []));
  update();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; charts.forEach(draw); } });
}

start();
