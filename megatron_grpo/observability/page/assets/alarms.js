// Alarms of a run: a list in the head of the page, and a mark at their step in the charts of their figures.

const ALARM_FIGURES = {
  entropy_collapse: ["entropy", "approx_entropy"], kl_growth: ["kl_penalty"], mismatch_growth: ["token_mult_prob_error", "gen_kl_error"],
  reward_flat: ["reward"], reward_saturated: ["reward", "accuracy"], groups_without_signal: ["groups_without_signal"],
  lengths_at_limit: ["response_length", "truncation_rate"], gradient_spike: ["grad_norm"], failed_rollouts: ["failed_rollouts"],
  slow_rank: ["slowest_rank_speed"], held_out_falls: ["val_reward", "val_accuracy"],
};
const SHOWN_ALARMS = 3; // in the head; the others are folded away

/** The alarms of a run, the latest first; null: there are none. */
function alarmsOf(run) {
  const all = [...(run.alarms || [])].reverse();
  if (!all.length) return null;
  const item = ({ step, name, text }) => el("li", {}, el("button", { title: "Open the trajectories of this step", text: `step ${short(step)}`, onclick: () => openStep(step) }),
    el("b", {}, isolated(name.replaceAll("_", " "))), isolated(text));
  const rest = all.slice(SHOWN_ALARMS);
  return el("section", { class: "alarms", "aria-label": "Alarms" }, el("h2", { text: countOf(all.length, "alarm") }), el("ul", {}, ...all.slice(0, SHOWN_ALARMS).map(item)),
    rest.length ? el("details", {}, el("summary", { text: `${short(rest.length)} earlier` }), el("ul", {}, ...rest.map(item))) : null);
}

/** Marks of a chart with these figures: { step, title, colour }. */
function alarmMarks(figures) {
  return runs.flatMap((run, number) => (run.alarms || []).filter(({ name }) => (ALARM_FIGURES[name] || []).some((figure) => figures.includes(figure)))
    .map(({ step, name, text }) => ({ step, title: `${runs.length > 1 ? `${LETTERS[number]}, ` : ""}step ${step}, ${name.replaceAll("_", " ")}: ${text}` })));
}
