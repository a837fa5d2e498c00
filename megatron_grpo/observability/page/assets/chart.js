// Line and area charts that share one crosshair: what is under it is read off in all of them at once.

const MARGIN = { top: 10, right: 96, bottom: 24, left: 50 };
const CHART_HEIGHT = 190;

const cursor = {
  step: null,
  charts: new Set(),
  move(step) {
    this.step = step;
    for (const chart of this.charts) chart.showCursor();
  },
};

/** Round numbers across a range. */
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].find((one) => one * power >= raw * 0.72) * power;
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) found.push(at * size);
  return found;
}

/** Texts of ticks, with as few digits as tell them apart. */
function tickTexts(values) {
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => short(value, digits));
    if (digits > 8 || new Set(texts).size === texts.length) return texts;
  }
}

/** Powers of ten across a range, about `count` of them. */
function decades(low, high, count) {
  const [first, last] = [low, high].map((value) => Math.round(Math.log10(value)));
  const size = Math.max(1, Math.ceil((last - first) / count)), found = [];
  for (let power = first; power <= last; power += size) found.push(10 ** power);
  return found;
}

/** The point at a step, or the last one before it. */
function pointAt(points, step) {
  let low = 0, high = points.length - 1, found = null;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) { found = points[middle]; low = middle + 1; } else high = middle - 1;
  }
  return found;
}

/**
 * A chart: { title, note, lines, areas, marks, floor, ceiling, log, open }.
 * log: the axis is logarithmic, and values of 0 lie on its lower end.
 * lines: { name, points, colour, faint, dotted, dashed, marks }; areas: { name, points, colour } stacked from below;
 * marks: { step, title }, which stand at the upper edge; open(step): what a click or Enter does.
 */
class Chart {
  constructor(settings) {
    Object.assign(this, { lines: [], areas: [], marks: [], note: "", open: () => {} }, settings);
    this.readout = el("div", { class: "readout", "aria-hidden": "true" });
    this.drawing = svg("svg", { class: "drawing", height: CHART_HEIGHT, tabindex: 0, role: "img", "aria-label": this.summary() });
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, el("h3", { text: this.title, title: this.note }), this.readout), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.follow(event));
    this.drawing.addEventListener("pointerleave", () => { hideTip(); cursor.move(null); });
    this.drawing.addEventListener("click", () => cursor.step !== null && this.open(cursor.step));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    this.drawing.addEventListener("blur", () => cursor.move(null));
    cursor.charts.add(this);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
  }

  summary() {
    const parts = [...this.lines.filter((line) => !line.faint), ...this.areas].filter((one) => one.points.length);
    const told = parts.map(({ name, points }) => {
      const [first, last] = [points[0], points[points.length - 1]];
      return `${name} from ${short(first[1])} at step ${first[0]} to ${short(last[1])} at step ${last[0]}`;
    });
    return `${this.title}: ${told.join("; ")}. Arrow keys move the crosshair, Enter opens the trajectories of its step.`;
  }

  steps() {
    return [...this.lines, ...this.areas].flatMap((one) => one.points.map(([step]) => step));
  }

  draw() {
    const width = this.element.clientWidth - 2;
    if (width < 80 || width === this.width) return;
    this.width = width;
    const steps = this.range || [Math.min(...this.steps()), Math.max(...this.steps())];
    const [low, high] = this.domain();
    const inner = { x: width - MARGIN.left - MARGIN.right, y: CHART_HEIGHT - MARGIN.top - MARGIN.bottom };
    this.x = (step) => MARGIN.left + ((step - steps[0]) / (steps[1] - steps[0] || 1)) * inner.x;
    const scaled = this.log ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
    this.y = (value) => MARGIN.top + (1 - (scaled(value) - scaled(low)) / (scaled(high) - scaled(low))) * inner.y;
    this.stepAt = (x) => Math.round(steps[0] + ((x - MARGIN.left) / inner.x) * (steps[1] - steps[0]));
    this.limits = steps;
    this.rule = svg("line", { class: "rule", y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.dots = svg("g", {});
    this.drawing.setAttribute("width", width);
    this.drawing.replaceChildren(...this.axes(low, high, steps, width), ...this.stack(), ...this.linePaths(), ...this.markPaths(), this.rule, this.dots, ...this.labels());
  }

  /** Whole powers of ten around the values. */
  decadesAround() {
    const powers = this.lines.flatMap((line) => line.points.map(([, value]) => value)).filter((value) => value > 0).map(Math.log10);
    const low = Math.floor(powers.reduce((a, b) => Math.min(a, b), Infinity)), high = Math.ceil(powers.reduce((a, b) => Math.max(a, b), -Infinity));
    return powers.length ? [10 ** low, 10 ** Math.max(high, low + 1)] : [1e-7, 1e-6];
  }

  domain() {
    if (this.log) return this.decadesAround();
    const values = this.areas.length ? this.totals().map(([, value]) => value).sort((a, b) => a - b)
      : this.lines.flatMap((line) => line.points.map(([, value]) => value));
    // The first steps warm caches up and would flatten the others.
    const top = this.areas.length ? Math.min(values[values.length - 1], 1.6 * values[Math.floor(0.95 * (values.length - 1))])
      : values.reduce((a, b) => Math.max(a, b), -Infinity);
    let low = this.floor ?? (this.areas.length ? 0 : values.reduce((a, b) => Math.min(a, b), Infinity));
    let high = this.ceiling ?? top;
    if (!(high > low)) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
    const pad = (high - low) * 0.06;
    return [this.floor === undefined && !this.areas.length ? low - pad : low, this.ceiling === undefined ? high + pad : high];
  }

  totals() {
    return this.areas[0].points.map(([step], place) => [step, this.areas.reduce((sum, area) => sum + area.points[place][1], 0)]);
  }

  axes(low, high, steps, width) {
    const values = (this.log ? decades : ticks)(low, high, 4), texts = tickTexts(values);
    const nodes = values.map((value, place) => svg("g", {},
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: this.y(value) + 4, "text-anchor": "end", text: texts[place] })));
    for (const step of ticks(steps[0], steps[1] || 1, Math.max(2, Math.floor(width / 130)))) {
      if (!Number.isInteger(step)) continue;
      nodes.push(svg("text", { class: "tick", x: this.x(step), y: CHART_HEIGHT - 6, "text-anchor": "middle", text: short(step) }));
    }
    return nodes;
  }

  linePaths() {
    return this.lines.flatMap((line) => {
      const places = line.points.map(([step, value]) => [this.x(step).toFixed(1), Math.max(this.y(value), 0).toFixed(1)]);
      const path = svg("path", { class: `line${line.faint ? " faint" : ""}${line.dotted ? " dotted" : ""}${line.dashed ? " dashed" : ""}`, d: "M" + places.map((one) => one.join(",")).join("L") });
      path.style.stroke = line.colour;
      const marks = line.marks || line.points.length === 1 ? places.map(([x, y]) => {
        const mark = svg("circle", { cx: x, cy: y, r: 2.6, class: "mark" });
        mark.style.fill = line.colour;
        return mark;
      }) : [];
      return places.length ? [path, ...marks] : [];
    });
  }

  markPaths() {
    return this.marks.map(({ step, title }) => {
      const x = this.x(step).toFixed(1), top = MARGIN.top - 8;
      return svg("g", { class: "alarm" }, svg("title", { text: title }), svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom }),
        svg("path", { d: `M${x},${MARGIN.top}l-5,${top - MARGIN.top}h10Z` }));
    });
  }

  stack() {
    if (!this.areas.length) return [];
    const bottom = this.areas[0].points.map(() => 0), clip = MARGIN.top - 4;
    return this.areas.map((area) => {
      const lower = area.points.map(([step], place) => [step, bottom[place]]);
      area.points.forEach(([, value], place) => { bottom[place] += value; });
      const upper = area.points.map(([step], place) => [step, bottom[place]]);
      area.middle = (lower[lower.length - 1][1] + upper[upper.length - 1][1]) / 2;
      const places = [...upper, ...lower.reverse()].map(([step, value]) => `${this.x(step).toFixed(1)},${Math.max(this.y(value), clip).toFixed(1)}`);
      const path = svg("path", { class: "area", d: `M${places.join("L")}Z` });
      path.style.fill = area.colour;
      return path;
    });
  }

  /** Names stand where their curves end, apart from each other. */
  labels() {
    const wanted = this.areas.length
      ? this.areas.map((area) => ({ ...area, y: this.y(area.middle), share: area.points[area.points.length - 1][1] }))
        .sort((a, b) => b.share - a.share).filter((area, _, all) => area.share > 0.04 * all.reduce((sum, one) => sum + one.share, 0))
      : this.lines.filter((line) => !line.faint && line.points.length).map((line) => ({ ...line, y: this.y(line.points[line.points.length - 1][1]) }));
    wanted.sort((a, b) => a.y - b.y);
    const gap = 14, lowest = CHART_HEIGHT - MARGIN.bottom;
    wanted.forEach((label, place) => { label.y = Math.max(label.y, place ? wanted[place - 1].y + gap : MARGIN.top + 2); });
    for (let place = wanted.length - 1, limit = lowest; place >= 0; place--, limit -= gap) wanted[place].y = Math.min(wanted[place].y, limit);
    return wanted.map((label) => {
      const text = svg("text", { class: "label", x: this.width - MARGIN.right + 8, y: label.y + 4, text: label.name });
      text.style.fill = label.ink || label.colour;
      return text;
    });
  }

  values(step) {
    const found = this.areas.length ? [...this.areas].reverse() : this.lines.filter((line) => !line.hidden);
    return found.map((one) => ({ name: one.faint ? `${one.name}, this step` : one.name, colour: one.colour, point: pointAt(one.points, step), faint: one.faint }))
      .filter((one) => one.point !== null);
  }

  showCursor() {
    if (!this.rule) return;
    const step = cursor.step;
    if (step === null) {
      this.rule.setAttribute("visibility", "hidden");
      this.dots.replaceChildren();
      this.readout.replaceChildren();
      return;
    }
    const x = this.x(Math.min(Math.max(step, this.limits[0]), this.limits[1]));
    this.rule.setAttribute("x1", x);
    this.rule.setAttribute("x2", x);
    this.rule.setAttribute("visibility", "visible");
    const values = this.values(step), main = values.filter((one) => !one.faint);
    if (!this.areas.length) {
      this.dots.replaceChildren(...main.map(({ point, colour }) => {
        const dot = svg("circle", { class: "dot", cx: this.x(point[0]), cy: this.y(point[1]), r: 3.5 });
        dot.style.fill = colour;
        return dot;
      }));
    }
    const read = this.areas.length ? [{ colour: "var(--ink)", point: pointAt(this.totals(), step) }] : main.slice(0, 3);
    this.readout.replaceChildren(...read.filter((one) => one.point).map(({ colour, point }) => {
      const value = el("span", { text: short(point[1], 4) });
      value.style.color = colour;
      return value;
    }));
  }

  tipContent(step) {
    return [el("strong", { text: `step ${step}` }), ...this.values(step).map(({ name, colour, point }) => {
      const key = el("i", { class: "key" });
      key.style.background = colour;
      return el("div", { class: "tip-row" }, key, el("span", { text: name }), el("b", { text: short(point[1], 4) }));
    })];
  }

  follow(event) {
    const box = this.drawing.getBoundingClientRect();
    const step = Math.min(Math.max(this.stepAt(event.clientX - box.left), this.limits[0]), this.limits[1]);
    cursor.move(step);
    showTip(event.clientX, event.clientY, ...this.tipContent(step));
  }

  key(event) {
    const size = event.shiftKey ? 10 : 1, from = cursor.step ?? this.limits[1];
    const to = { ArrowLeft: from - size, ArrowRight: from + size, Home: this.limits[0], End: this.limits[1] }[event.key];
    if (event.key === "Enter") this.open(from);
    if (event.key === "Escape") cursor.move(null);
    if (to === undefined) return;
    event.preventDefault();
    const step = Math.min(Math.max(to, this.limits[0]), this.limits[1]);
    cursor.move(step);
    speak(`step ${step}: ${this.values(step).map(({ name, point }) => `${name} ${short(point[1], 4)}`).join(", ")}`);
  }
}
