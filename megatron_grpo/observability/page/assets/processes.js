// The view of processes: what each did over time, how well they overlap, and the figures of operation.

const WINDOWS = [["10 s", 10], ["1 min", 60], ["5 min", 300], ["1 h", 3600], ["1 day", 86400]];
const LANE_HEIGHT = 20, LANE_NAME = 190;
const PHASE_KINDS = [
  [/^(generat|rollouts|wake)/, "--p1"], [/^train/, "--p5"], [/logprobs|values|teacher/, "--p4"], [/weights|refit|commit|publish|canary|send/, "--p6"],
  [/score|reward/, "--p3"], [/save|checkpoint|write/, "--p8"], [/fetch|build|compute|advantages/, "--p7"], [/start|import/, "--p9"],
];
const phaseColour = (name) => (PHASE_KINDS.find(([pattern]) => pattern.test(name)) || [null, "--p2"])[1];
const OVERLAP = {
  generating: "engines at work", training: "ranks at work", exposed_generation: "generation that nothing overlaps", engine_bubble: "engines idle, in the mean", rank_bubble: "ranks idle, in the mean",
};

/** Charts of operation: title, note, and the curves as [group, metric, name, how]. */
const OPERATION = [
  { title: "Tokens per second", note: "tokens_per_s: prompt and response, of the whole step", floor: 0, curves: [["throughput", "tokens_per_s", "all", "main"], ["throughput", "tokens_per_s_per_gpu", "per GPU", "second"]] },
  { title: "Engines: tokens per second", note: "engine_tokens_per_s", floor: 0, curves: [["throughput", "engine_tokens_per_s", "an engine", "main"]] },
  { title: "Queue of the engines", note: "largest of the step", floor: 0, curves: [["throughput", "engine_running", "running", "second"], ["throughput", "engine_waiting", "waiting", "main"]] },
  { title: "Prompts sampled ahead", note: "buffer_depth, buffer_in_flight", floor: 0, curves: [["metrics", "buffer_depth", "ready", "main"], ["metrics", "buffer_in_flight", "in flight", "second"]] },
  { title: "Cache of the engines", note: "share of prompt tokens found in it, share in use", floor: 0, ceiling: 1.02, curves: [["throughput", "engine_prefix_hit_rate", "hits", "main"], ["throughput", "engine_kv_cache_usage", "in use", "second"]] },
  { title: "Staleness", note: "trajectory_age: steps since the weights that drew the oldest token", floor: 0, curves: [["metrics", "trajectory_age", "mean", "main"], ["metrics", "trajectory_age_max", "most", "second"]] },
  { title: "Generation that the step waited for", note: "exposed_generation_s", floor: 0, curves: [["metrics", "exposed_generation_s", "seconds", "main"]] },
  { title: "Failures", note: "of a step", floor: 0, curves: [["metrics", "failed_rollouts", "rollouts", "main"], ["metrics", "engine_restarts", "engines", "second"], ["metrics", "refit_retries", "refits", "second"]] },
  { title: "GPU memory", note: "gpu_memory_gib: most of a policy rank", floor: 0, curves: [["throughput", "gpu_memory_gib", "GiB", "main"]] },
  { title: "Utilisation of the GPUs", note: "model_flop_utilization", floor: 0, curves: [["throughput", "model_flop_utilization", "share", "main"]] },
];

/** Adds the figure per GPU, which the run's files do not have. */
function addPerGpu(run) {
  const { tokens_per_s: all } = run.throughput;
  if (all && run.devices) run.throughput.tokens_per_s_per_gpu = all.map((value) => (value === null ? null : value / run.devices));
}

class Lanes {
  constructor(run) {
    this.run = run;
    this.canvas = el("canvas", { class: "lanes", role: "img", tabindex: 0, "aria-label": "Processes over time" });
    this.facts = el("dl", { class: "facts" });
    this.legend = el("div", { class: "phases" });
    this.table = el("tbody", {});
    this.memory = el("div", {});
    const title = runs.length > 1 ? el("h2", { class: `run-${run}` }, `${LETTERS[run]} `, isolated(runs[run].name)) : null;
    const shares = el("details", {}, el("summary", { text: "Shares of the time, by process" }), el("table", { class: "keys" },
      el("thead", {}, el("tr", {}, el("th", { text: "Process", scope: "col" }), el("th", { text: "Phases", scope: "col" }))), this.table));
    this.element = el("section", { class: "lanes-of" }, title, this.facts, this.legend, this.canvas, shares, this.memory);
    this.canvas.addEventListener("pointermove", (event) => this.follow(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async load(seconds) {
    this.data = await ask("lanes", { run: this.run, seconds });
    const { shares, lanes, memory, left_out: leftOut } = this.data, percent = (share) => `${short(100 * share, 3)} %`;
    this.facts.replaceChildren(...Object.entries(shares).map(([name, share]) => fact(OVERLAP[name] || name, percent(share))));
    this.legend.replaceChildren(...this.data.phases.map((name) => { const key = el("i", { class: "key" }); key.style.background = `var(${phaseColour(name)})`; return el("span", {}, key, isolated(name)); }));
    this.table.replaceChildren(...lanes.map((lane) => el("tr", {}, el("th", { scope: "row" }, isolated(lane.name)),
      el("td", {}, isolated(Object.entries(lane.shares).map(([name, share]) => `${name} ${percent(share)}`).join(", "))))));
    this.memory.replaceChildren(...(memory.length ? [el("h3", { text: "GPU memory that torch held after a phase, GiB" }), el("table", { class: "keys" }, el("tbody", {}, ...memory.map(([kind, phase, gib]) =>
      el("tr", {}, el("th", { scope: "row" }, isolated(kind)), el("td", {}, isolated(phase)), el("td", { class: "number", text: short(gib) })))))] : []),
      ...(leftOut ? [el("p", { class: "note", text: `${short(leftOut)} more processes are not drawn.` })] : []));
    this.draw();
  }

  draw() {
    if (!this.data || !this.element.clientWidth) return;
    const { lanes, steps, seconds } = this.data, width = this.element.clientWidth, height = 26 + LANE_HEIGHT * Math.max(lanes.length, 1), scale = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name), pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = `12px ${colour("--sans")}`;
    this.unit = (width - LANE_NAME) / this.data.buckets;
    lanes.forEach((lane, place) => {
      const top = 22 + place * LANE_HEIGHT;
      pen.fillStyle = colour("--ink");
      pen.fillText(lane.name, 0, top + 13, LANE_NAME - 12);
      pen.fillStyle = colour("--grid");
      pen.fillRect(LANE_NAME, top + 2, width - LANE_NAME, LANE_HEIGHT - 4);
      for (const [first, last, phase] of lane.runs) {
        pen.fillStyle = colour(phaseColour(this.data.phases[phase]));
        pen.fillRect(LANE_NAME + first * this.unit, top + 2, Math.max((last - first) * this.unit, 1), LANE_HEIGHT - 4);
      }
    });
    pen.fillStyle = pen.strokeStyle = colour("--dim");
    let free = 0;
    for (const [step, begin] of steps) {
      const x = LANE_NAME + (begin / seconds) * (width - LANE_NAME);
      if (x < Math.max(free, LANE_NAME)) continue;
      pen.fillRect(x, 16, 1, height - 16);
      pen.fillText(`step ${step}`, x + 3, 12);
      free = x + 70;
    }
    if (!lanes.length) pen.fillText("No process has written a span in this time.", 0, 38);
  }

  follow(event) {
    const box = this.canvas.getBoundingClientRect(), lane = this.data?.lanes[Math.floor((event.clientY - box.top - 22) / LANE_HEIGHT)];
    const bucket = (event.clientX - box.left - LANE_NAME) / this.unit, run = lane && lane.runs.find(([first, last]) => bucket >= first && bucket < last);
    if (!lane || bucket < 0) { hideTip(); return; }
    const second = (count) => `${short((count * this.data.seconds) / this.data.buckets)} s`;
    showTip(event.clientX, event.clientY, el("strong", {}, isolated(lane.name)), isolated(run ? `${this.data.phases[run[2]]}, ${second(run[1] - run[0])}` : "idle"));
  }
}

class ProcessesView {
  constructor() {
    this.seconds = 60;
    this.lanes = runs.map((_, run) => new Lanes(run));
    this.note = el("p", { class: "note" });
    this.charts = el("div", { class: "charts" });
    const choice = el("select", { "aria-label": "Time that the lanes show", onchange: () => { this.seconds = Number(choice.value); this.refresh(); } },
      ...WINDOWS.map(([label, seconds]) => el("option", { value: seconds, text: `last ${label}`, selected: seconds === this.seconds })));
    this.element = el("div", {}, el("div", { class: "bar" }, choice), this.note, ...this.lanes.map((one) => one.element), el("h2", { text: "Operation" }), this.charts);
  }

  async refresh() {
    this.note.textContent = "";
    try { await Promise.all(this.lanes.map((one) => one.load(this.seconds))); } catch (error) { this.note.textContent = error.message; }
  }

  drawCharts() {
    const range = stepRange();
    runs.forEach(addPerGpu);
    this.charts.replaceChildren(...OPERATION.map((one) => {
      const lines = linesOf(one.curves, one);
      return lines.length ? new Chart({ ...one, lines, range, marks: alarmMarks(one.curves.map(([, metric]) => metric)), open: openStep }).element : null;
    }).filter((chart) => chart !== null));
  }
}

const processes = new ProcessesView();
