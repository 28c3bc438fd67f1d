// Power against the budget as SVG: rows are [at_s, low_w, mean_w, high_w, budget_w or null], one for each bin.

import { clock, figure, watts } from "./format.js";

const SPACE = "http://www.w3.org/2000/svg";
const EDGE = { left: 46, right: 12, top: 14, bottom: 26 };
const OVER = 1.02;

function element(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function niceStep(span, parts) {
  const rough = span / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

function timeStep(span, parts) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
  return steps.find((step) => span / step <= parts) ?? Math.ceil(span / parts / 86400) * 86400;
}

export class PowerChart {
  constructor(svg, readout) {
    this.svg = svg;
    this.readout = readout;
    this.rows = [];
    this.width_s = 1;
    this.budget_w = null;
    this.pointed = null;
    this.span = [0, 1]; // of the time that is shown
    new ResizeObserver(() => this.draw()).observe(svg);
    svg.addEventListener("pointermove", (event) => this.point(event.clientX));
    svg.addEventListener("pointerdown", (event) => this.point(event.clientX));
    svg.addEventListener("pointerleave", () => this.point(null));
  }

  show(rows, width_s, span_s, budget_w) {
    Object.assign(this, { rows, width_s, span_s, budget_w });
    const end = rows.length ? rows.at(-1)[0] + width_s : 1;
    this.span = [span_s ? Math.max(0, end - span_s) : 0, end];
    this.draw();
  }

  point(clientX) {
    this.pointed = clientX;
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width || !height) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!this.rows.length) {
      const words = element("text", { class: "empty", x: width / 2, y: height / 2 }, "No power was read yet");
      this.svg.replaceChildren(words);
      return;
    }
    const [begin, end] = this.span;
    const top = this.scaleTop();
    this.x = (at_s) => EDGE.left + ((at_s - begin) / (end - begin)) * (width - EDGE.left - EDGE.right);
    this.y = (w) => height - EDGE.bottom - (w / top) * (height - EDGE.top - EDGE.bottom);
    const parts = [...this.grid(begin, end, top, width, height)];
    for (const run of this.unbroken()) parts.push(...this.curves(run));
    parts.push(element("path", { class: "budget", d: this.budgetPath() }));
    parts.push(...this.cross(begin, end, width, height));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.words());
  }

  scaleTop() {
    let most = Math.max(1e-3, this.budget_w ?? 0);
    for (const row of this.rows) most = Math.max(most, row[3], row[4] ?? 0);
    const step = niceStep(most * 1.06, 4);
    return Math.ceil((most * 1.06) / step) * step;
  }

  *grid(begin, end, top, width, height) {
    const step = niceStep(top, 4);
    for (let w = 0; w <= top * 1.0001; w += step) {
      yield element("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(w), y2: this.y(w) });
      const words = `${Number(w.toPrecision(6))}${w + step > top * 1.0001 ? " W" : ""}`;
      yield element("text", { x: EDGE.left - 7, y: this.y(w) + 4, "text-anchor": "end" }, words);
    }
    const every = timeStep(end - begin, Math.max(2, width / 110));
    for (let at = Math.ceil(begin / every) * every; at <= end; at += every) {
      const x = this.x(at);
      const anchor = x > width - 40 ? "end" : x < EDGE.left + 18 ? "start" : "middle";
      yield element("text", { x, y: height - 7, "text-anchor": anchor }, clock(at));
    }
  }

  // Stretches without a gap: where no power was read, nothing is drawn.
  unbroken() {
    const runs = [];
    let last = -Infinity;
    for (const row of this.rows) {
      if (row[0] - last > 2.5 * this.width_s) runs.push([]);
      runs.at(-1).push(row);
      last = row[0];
    }
    return runs;
  }

  middle(row) {
    return this.x(row[0] + this.width_s / 2);
  }

  line(rows, column) {
    return rows.map((row) => `${this.middle(row).toFixed(1)} ${this.y(row[column]).toFixed(1)}`).join("L");
  }

  curves(run) {
    const made = [
      element("path", { class: "band", d: `M${this.line(run, 3)}L${this.line([...run].reverse(), 1)}Z` }),
      element("path", { class: "mean", d: `M${this.line(run, 2)}${run.length === 1 ? "h1" : ""}` }),
    ];
    const hot = run.filter((row) => row[4] !== null && row[2] > OVER * row[4]);
    const half = Math.max(0.5, (this.x(this.width_s) - this.x(0)) / 2);
    const left = (row) => (this.middle(row) - half).toFixed(1);
    const dashes = hot.map((row) => `M${left(row)} ${this.y(row[2]).toFixed(1)}h${2 * half}`);
    if (hot.length) made.push(element("path", { class: "hot", d: dashes.join("") }));
    return made;
  }

  budgetPath() {
    let path = "";
    let held = null;
    for (const row of this.rows) {
      const [at, allowed] = [row[0], row[4]];
      if (allowed === null) {
        held = null;
        continue;
      }
      const y = this.y(allowed).toFixed(1);
      if (held === null) path += `M${this.x(at).toFixed(1)} ${y}`;
      else if (held !== allowed) path += `H${this.x(at).toFixed(1)}V${y}`;
      held = allowed;
      if (row === this.rows.at(-1)) path += `H${this.x(at + this.width_s).toFixed(1)}`;
    }
    return path + this.inForce(held);
  }

  // A budget that holds since the last reading sticks out at the end.
  inForce(held) {
    if (this.budget_w === null || this.budget_w === held) return "";
    const [x, y] = [this.x(this.rows.at(-1)[0] + this.width_s).toFixed(1), this.y(this.budget_w).toFixed(1)];
    return `${held === null ? `M${x} ${y}` : `V${y}`}h${EDGE.right - 2}`;
  }

  *cross(begin, end, width, height) {
    this.readout.textContent = "";
    if (this.pointed === null) return;
    const share = (this.pointed - this.svg.getBoundingClientRect().left - EDGE.left) / (width - EDGE.left - EDGE.right);
    const at = begin + share * (end - begin) - this.width_s / 2;
    const near = this.rows.reduce((best, row) => (Math.abs(row[0] - at) < Math.abs(best[0] - at) ? row : best));
    const x = this.middle(near);
    yield element("line", { class: "cross", x1: x, x2: x, y1: EDGE.top, y2: height - EDGE.bottom });
    yield element("circle", { class: "dot", cx: x, cy: this.y(near[2]), r: 5 });
    const allowed = near[4] === null ? "" : `, budget ${watts(near[4])} W`;
    const [low, high] = [watts(near[1]), watts(near[3])];
    this.readout.textContent = `${clock(near[0])}: ${watts(near[2])} W (${low} to ${high})${allowed}`;
  }

  words() {
    const mean = this.rows.reduce((sum, row) => sum + row[2], 0) / this.rows.length;
    const most = this.rows.reduce((best, row) => Math.max(best, row[3]), 0);
    const allowed = this.rows.at(-1)[4];
    const until = allowed === null ? "" : `, against a budget of ${watts(allowed)} W`;
    return `Power over time: mean ${watts(mean)} W, at most ${watts(most)} W${until}`;
  }
}

// One curve over the time of the chart above it: rows are [at_s, value or null].
export class SmallChart {
  constructor(svg) {
    this.svg = svg;
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  show(rows, begin, end, { aim = null, zero = false } = {}) {
    const known = rows.filter((row) => row[1] !== null && row[0] <= end);
    const first = known.findLastIndex((row) => row[0] <= begin); // what held when this began
    Object.assign(this, { rows: known.slice(Math.max(0, first)), begin, end, aim, zero });
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    this.svg.closest(".small").hidden = !this.rows?.length;
    if (!width || !height || !this.rows?.length) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const values = this.rows.map((row) => row[1]).concat(this.aim ?? [], this.zero ? 0 : []);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
    const x = (at) => 2 + ((Math.max(at, this.begin) - this.begin) / (this.end - this.begin)) * (width - 6);
    const y = (value) => height - 4 - ((value - low + room) / (high - low + 2 * room)) * (height - 8);
    const spots = this.rows.map(([at, value]) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`);
    const parts = [element("path", { class: "mean", d: `M${spots.join("L")}${spots.length === 1 ? "h1" : ""}` })];
    if (this.aim !== null) {
      parts.push(element("path", { class: "budget", d: `M2 ${y(this.aim).toFixed(1)}H${width - 4}` }));
    }
    const [last, most] = [this.rows.at(-1), figure(high, 3)];
    parts.push(element("circle", { class: "dot", cx: x(last[0]), cy: y(last[1]), r: 3.5 }));
    this.svg.replaceChildren(...parts);
    const aim = this.aim === null ? "" : `, target ${figure(this.aim)}`;
    this.svg.setAttribute("aria-label", `Now ${figure(last[1], 3)}, from ${figure(low, 3)} to ${most}${aim}`);
    this.svg.previousElementSibling.lastElementChild.textContent = `${figure(last[1], 3)}${aim}`;
  }
}
