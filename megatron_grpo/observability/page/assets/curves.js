// The view of curves: those that tell how a run goes, and below them every other figure that it reported.

const SMOOTH_FROM = 30; // points from which a curve is drawn smoothed, with its steps faint behind it
const RUN_COLOURS = ["var(--a)", "var(--b)"];
const PHASE_COLOURS = ["--p1", "--p2", "--p3", "--p4", "--p5", "--p6", "--p7", "--p8", "--p9"];

/** Main charts: title, floor, ceiling, whether the axis is logarithmic, and the curves as [group, metric, name, how]. */
const MAIN = [
  { title: "Reward", note: "mean over all responses that were sampled", curves: [["metrics", "reward", "reward", "main"]] },
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
  { title: "Explained variance of the values", note: "explained_variance", curves: [["metrics", "explained_variance", "share", "main"]] },
];

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
      const colour = how === "second" ? `var(--${run ? "b" : "a"}-soft)` : RUN_COLOURS[run];
      const two = runs.length > 1, full = two ? `${LETTERS[run]} ${present.length > 1 ? name : ""}`.trim() : name;
      const smooth = points.length >= SMOOTH_FROM && group === "metrics" && !log;
      if (smooth) lines.push({ name: full, points, colour, faint: true });
      lines.push({ name: full, points: smooth ? smoothed(points) : points, colour, ink: RUN_COLOURS[run], marks: how === "marked", dotted: how === "second" });
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
  const charts = MAIN.map((one) => {
    one.curves.forEach(([, metric]) => shown.add(metric));
    const lines = linesOf(one.curves, one);
    return lines.length ? new Chart({ ...one, lines, range, open: openStep }) : null;
  }).filter((chart) => chart !== null);
  const phases = runs.map((_, run) => phaseChart(run, range)).filter((chart) => chart !== null);
  if (!charts.length && !phases.length) {
    const ended = runs.every((run) => run.summary.outcome);
    return el("p", { class: "empty", text: ended ? "The run ended before its first step." : "No step has been written yet." });
  }
  return el("div", {}, el("div", { class: "charts" }, [...charts, ...phases].map((chart) => chart.element)), others(shown, range));
}

const MISMATCH = /_(kl|divergence|prob)_error(_max)?$/;

/** How a figure of less interest is drawn: those of the mismatch of both frameworks as the main ones are. */
function settingsOf(name) {
  const shift = name.includes("_mult_prob_error") ? -1 : 0;
  return MISMATCH.test(name) ? { title: shift ? `${name} − 1` : name, shift, log: true } : { title: name };
}

/** Charts of all other figures, made when they are asked for. */
function others(shown, range) {
  const found = ["metrics", "validation", "throughput"].flatMap((group) =>
    [...new Set(runs.flatMap((run) => Object.keys(run[group])))].filter((name) => name !== "step" && !shown.has(name)).map((name) => [group, name]));
  const body = el("div", { class: "charts small" });
  const details = el("details", { class: "others" }, el("summary", { text: `All other figures (${found.length})` }), body);
  details.addEventListener("toggle", () => {
    if (!details.open || body.childElementCount) return;
    for (const [group, name] of found) {
      const settings = settingsOf(name), lines = linesOf([[group, name, "", "main"]], settings);
      if (lines.length) body.append(new Chart({ ...settings, lines, range, open: openStep }).element);
    }
  });
  return details;
}
