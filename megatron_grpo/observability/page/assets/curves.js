// The view of curves: those that tell how a run goes, first those of its algorithm, and below them all other figures.

const SMOOTH_FROM = 30; // points from which a curve is drawn smoothed, with its steps faint behind it
const RUN_COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"];
const PHASE_COLOURS = ["--p1", "--p2", "--p3", "--p4", "--p5", "--p6", "--p7", "--p8", "--p9"];

/** Main charts: title, floor, ceiling, whether the axis is logarithmic, and the curves as [group, metric, name, how]. */
const MAIN = [
  { title: "Reward", note: "mean over the responses of a step, and over held-out ones",
    curves: [["metrics", "reward", "reward", "main"], ["validation", "val_reward", "held out", "marked"]] },
  { title: "Accuracy", note: "of training samples and of held-out prompts", floor: 0, ceiling: 1.02,
    curves: [["metrics", "accuracy", "training", "second"], ["validation", "val_accuracy", "held out", "marked"]] },
  { title: "Response length", note: "tokens: mean and 90th percentile", floor: 0,
    curves: [["metrics", "response_length", "mean", "main"], ["metrics", "response_length_p90", "90%", "second"]] },
  { title: "Entropy", note: "nats per token", floor: 0,
    curves: [["metrics", "entropy", "exact", "main"], ["metrics", "approx_entropy", "estimate", "main"]] },
  { title: "KL to the reference policy", note: "kl_penalty", curves: [["metrics", "kl_penalty", "KL", "main"]] },
  { title: "Mismatch of training and generation", note: "token_mult_prob_error − 1, on a logarithmic axis: 0 when both frameworks agree", shift: -1, log: true,
    curves: [["metrics", "token_mult_prob_error", "mean", "main"]] },
  { title: "KL of generation and training", note: "gen_kl_error, on a logarithmic axis", log: true, curves: [["metrics", "gen_kl_error", "KL", "main"]] },
  { title: "Gradient norm", note: "before clipping", floor: 0, curves: [["metrics", "grad_norm", "norm", "main"]] },
  { title: "Prompts without signal", note: "share of the prompts whose samples all have the same reward", floor: 0, ceiling: 1.02,
    curves: [["metrics", "groups_without_signal", "share", "main"]] },
  { title: "Loss", note: "of the optimizer steps, and of held-out rows", curves: [["metrics", "loss", "training", "main"], ["validation", "val_loss", "held out", "marked"]] },
  { title: "Preference accuracy", note: "share of the pairs whose chosen response has gained more", floor: 0, ceiling: 1.02,
    curves: [["metrics", "preference_accuracy", "training", "main"], ["validation", "val_preference_accuracy", "held out", "marked"]] },
  { title: "Margin of the pairs", note: "margin: chosen minus rejected", curves: [["metrics", "margin", "training", "main"], ["validation", "val_margin", "held out", "marked"]] },
  { title: "Rewards of the pairs", note: "rewards_chosen_mean, rewards_rejected_mean",
    curves: [["metrics", "rewards_chosen_mean", "chosen", "main"], ["metrics", "rewards_rejected_mean", "rejected", "second"]] },
  { title: "Reference point", note: "reference_point: mean gain of responses to other prompts, at least 0", floor: 0,
    curves: [["metrics", "reference_point", "gain", "main"]] },
  { title: "Divergence from the teacher", note: "teacher_divergence", floor: 0, curves: [["metrics", "teacher_divergence", "divergence", "main"]] },
  { title: "Loss of the values", note: "value_loss", floor: 0, curves: [["metrics", "value_loss", "loss", "main"]] },
  { title: "Explained variance of the values", note: "explained_variance", curves: [["metrics", "explained_variance", "share", "main"]] },
];

const groupOf = (name) => (name.startsWith("val_") ? "validation" : "metrics");

/** The main charts, first those of the metrics that tell most about the first run. */
function mainCharts() {
  const { leading } = runs[0];
  const place = (chart) => Math.min(...chart.curves.map(([, metric]) => (leading.includes(metric) ? leading.indexOf(metric) : leading.length)));
  const known = new Set(MAIN.flatMap((chart) => chart.curves.map(([, metric]) => metric)));
  const own = leading.filter((name) => !known.has(name)).map((name) => ({ title: name, curves: [[groupOf(name), name, "", "main"]] }));
  return [...MAIN, ...own].map((chart) => [place(chart), chart]).sort(([a], [b]) => a - b).map(([, chart]) => chart);
}

function stepRange() {
  const steps = runs.flatMap((run) => [...(run.metrics.step || []), ...(run.validation.step || [])]);
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/** A logarithmic axis is for single steps that stand out, so its curves are not smoothed. */
function linesOf(curves, { shift = 0, log = false } = {}) {
  const lines = [];
  runs.forEach((_, run) => {
    const present = curves.filter(([group, metric]) => series(run, group, metric).length);
    present.forEach(([group, metric, name, how]) => {
      const points = series(run, group, metric).map(([step, value]) => [step, value + shift]);
      const colour = how === "second" ? `var(--${"abcd"[run]}-soft)` : RUN_COLOURS[run];
      const two = runs.length > 1, full = two ? `${LETTERS[run]} ${present.length > 1 ? name : ""}`.trim() : name;
      const smooth = points.length >= SMOOTH_FROM && group === "metrics" && !log;
      if (smooth) lines.push({ name: full, points, colour, faint: true });
      lines.push({ name: full, points: smooth ? smoothed(points) : points, colour, ink: RUN_COLOURS[run], marks: how === "marked", dotted: how === "second", dashed: how === "marked" && present.length > 1 });
    });
  });
  return lines;
}

function phaseChart(run, range) {
  const { step, total = [], ...phases } = runs[run].timing;
  if (!step || !step.length) return null;
  const calm = (points) => (points.length >= SMOOTH_FROM ? smoothed(points) : points);
  const names = Object.keys(phases).filter((name) => phases[name].some((seconds) => seconds > 0));
  const areas = names.map((name, place) => ({ name, colour: `var(${PHASE_COLOURS[place % 8]})`, ink: "var(--dim)",
    points: calm(step.map((one, at) => [one, phases[name][at] || 0])) }));
  const rest = step.map((one, at) => [one, Math.max(0, (total[at] || 0) - names.reduce((sum, name) => sum + (phases[name][at] || 0), 0))]);
  areas.push({ name: "rest", colour: "var(--p9)", ink: "var(--dim)", points: calm(rest) });
  return new Chart({ title: runs.length > 1 ? `Seconds of a step, run ${LETTERS[run]}` : "Seconds of a step", note: "by phase, smoothed", areas, range, open: openStep });
}

function curvesView() {
  const range = stepRange(), shown = new Set();
  const has = ([group, metric]) => runs.some((_, run) => series(run, group, metric).length);
  const charts = mainCharts().map((one) => {
    one.curves.forEach(([, metric]) => shown.add(metric));
    const lines = linesOf(one.curves, one);
    return lines.length ? named(new Chart({ ...one, lines, range, marks: alarmMarks(one.curves.map(([, metric]) => metric)), open: openStep }), one.title, ...one.curves.filter(has).map(([, metric]) => metric)) : null;
  }).filter((chart) => chart !== null);
  const phases = runs.map((_, run) => phaseChart(run, range)).filter((chart) => chart !== null);
  if (!charts.length && !phases.length) {
    const ended = runs.every((run) => run.summary.outcome);
    return el("p", { class: "empty", text: ended ? "The run ended before its first step." : "No step has been written yet." });
  }
  phases.forEach((chart) => named(chart, "seconds", ...runs.flatMap((run) => Object.keys(run.timing))));
  const rest = others(shown, range), main = [...charts, ...phases].map((chart) => chart.element);
  return el("div", {}, filterOf(main, rest), el("div", { class: "charts" }, main), rest.element);
}

/** Notes the names by which a chart is found. */
function named(chart, ...names) {
  chart.element.dataset.names = names.join(" ").toLowerCase();
  return chart;
}

/** A box that leaves the figures whose names have its words. */
function filterOf(main, rest) {
  const search = el("input", { type: "search", id: "figures", placeholder: "Search figures", "aria-label": "Search figures" });
  const count = el("span", { class: "count" });
  const look = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter((word) => word);
    if (words.length) rest.make();
    rest.element.open = words.length > 0;
    let left = 0;
    const all = [...main, ...rest.body.children];
    for (const chart of all) {
      chart.hidden = !words.every((word) => chart.dataset.names.includes(word));
      left += !chart.hidden;
    }
    count.textContent = words.length ? `${left} of ${main.length + rest.count} figures` : "";
    keepPlace();
  };
  search.addEventListener("input", look);
  return el("div", { class: "bar figures" }, search, count);
}

const MISMATCH = /_(kl|divergence|prob)_error(_max)?$/;

/** How a figure of less interest is drawn: those of the mismatch of both frameworks as the main ones are. */
function settingsOf(name) {
  const shift = name.includes("_mult_prob_error") ? -1 : 0;
  return MISMATCH.test(name) ? { title: shift ? `${name} − 1` : name, shift, log: true } : { title: name };
}

/** Charts of all other figures, made when they are asked for: { element, body, count, make }. */
function others(shown, range) {
  // A step's line repeats the figures of its validation.
  const repeated = new Set(runs.flatMap((run) => Object.keys(run.validation)));
  const found = ["validation", "metrics", "throughput"].flatMap((group) =>
    [...new Set(runs.flatMap((run) => Object.keys(run[group])))]
      .filter((name) => name !== "step" && !shown.has(name) && !(group === "metrics" && repeated.has(name)))
      .filter((name) => runs.some((_, run) => series(run, group, name).length)).map((name) => [group, name]));
  const body = el("div", { class: "charts small" });
  const element = el("details", { class: "others" }, el("summary", { text: `All other figures (${found.length})` }), body);
  const make = () => {
    if (body.childElementCount) return;
    for (const [group, name] of found) {
      const settings = settingsOf(name), lines = linesOf([[group, name, "", group === "validation" ? "marked" : "main"]], settings);
      body.append(named(new Chart({ ...settings, lines, range, marks: alarmMarks([name]), open: openStep }), name).element);
    }
  };
  element.addEventListener("toggle", () => element.open && make());
  return { element, body, count: found.length, make };
}
