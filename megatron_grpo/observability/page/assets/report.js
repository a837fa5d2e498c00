// The page: its head, its views, and the keys that move between them.

const SHORTCUTS = [
  ["1 2 3", `curves, trajectories, configuration${runs[0].live ? "; 4: processes" : ""}`], ["[ ]", "step before, next step"], ["/", "search"],
  ["↑ ↓", "in a table: the row before, the next"], ["← →", "on a chart: move the crosshair (with Shift: ten steps); in a text: token by token"],
  ["Enter", "on a chart: the trajectories of that step"], ["?", "these keys"],
];
const VIEWS = ["Curves", "Trajectories", "Configuration", ...(runs[0].live ? ["Processes"] : [])];
let trajectories = null;

function tile(name, value, note) {
  return el("div", { class: "tile" }, el("dt", { text: name }), el("dd", {}, value, note ? el("small", { text: note }) : null));
}

/** The last value of a metric, and the first one with its step; null: the run has none. */
function changeOf(number, name, group, metric) {
  const points = series(number, group, metric), [first, last] = [points[0], points[points.length - 1]];
  return points.length ? tile(name, short(last[1]), points.length > 1 ? `from ${short(first[1])} at step ${short(first[0])}` : "") : null;
}

const TILES = {
  reward: "Reward", val_reward: "Held-out reward", accuracy: "Accuracy", val_accuracy: "Held-out accuracy", loss: "Loss", val_loss: "Held-out loss",
  preference_accuracy: "Preference accuracy", margin: "Margin", teacher_divergence: "Divergence from the teacher", value_loss: "Loss of the values",
  reference_point: "Reference point",
};
const MOST_TILES = 3; // figures of the algorithm in the head

/** Recipe, algorithm, model and code of a run. */
function aboutOf(run) {
  const { recipe, algorithm, model, code } = run.about, name = (path) => path.split("/").filter((part) => part).slice(-2).join("/");
  const facts = [["Recipe", recipe], ["Algorithm", algorithm], ["Model", model && name(model), model], ["Commit", code]].filter(([, text]) => text);
  return facts.length ? el("dl", { class: "about" }, ...facts.map(([label, text, whole]) => el("div", {}, el("dt", { text: label }), el("dd", { title: whole || text }, isolated(text))))) : null;
}

function headOf(run, number) {
  const { summary } = run, metrics = run.metrics.step || [], total = runs.length > 1;
  const outcome = (summary.outcome || (run.refresh_s || run.is_live ? "running" : "no end recorded")).replaceAll("_", " ");
  const leading = run.leading.map((name) => changeOf(number, TILES[name] || name, groupOf(name), name));
  const tiles = [
    ...leading.filter((one) => one !== null).slice(0, MOST_TILES),
    tile("Steps", short(metrics.length ? metrics[metrics.length - 1] : 0), summary.samples ? `${short(summary.samples)} samples` : ""),
    summary.train_s === undefined || summary.train_s === null ? null : tile("Training", duration(summary.train_s), summary.startup_s ? `start ${duration(summary.startup_s)}` : ""),
    summary.samples_per_s ? tile("Samples per second", short(summary.samples_per_s), `${short(summary.step_s)} s a step`) : null,
  ];
  return el("section", { class: `run-head run-${number}` },
    el("h1", {}, total ? el("span", { class: "letter", text: LETTERS[number] }) : null, isolated(run.name), el("span", { class: `outcome ${outcome.replaceAll(" ", "_")}`, text: outcome })),
    aboutOf(run), summary.reason ? el("p", { class: "reason" }, isolated(summary.reason)) : null, disagreement(run), alarmsOf(run), el("dl", { class: "tiles" }, ...tiles));
}

/** The steps whose probability error left the noise, with the command that examines the first; null: there is none. */
function disagreement(run) {
  const steps = run.metrics.step || [], off = run.metrics.token_mult_prob_error_off || [], marked = steps.filter((_, place) => off[place] === 1);
  const text = `Training and generation disagree more than noise explains in ${marked.length} of ${steps.length} steps, first in step ${marked[0]}: python -m megatron_grpo.doctor RUN_DIR step=${marked[0]}`;
  return marked.length ? el("p", { class: "reason" }, isolated(text)) : null;
}

function show(name, focus = false) {
  for (const tab of byId("views").querySelectorAll("[role=tab]")) {
    const chosen = tab.textContent === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  for (const view of byId("main").children) view.hidden = view.id !== `view-${name}`;
  hideTip();
  if (name === "Trajectories" && trajectories.step === undefined) trajectories.open(trajectories.lastOfAll());
  if (name === "Processes") { processes.drawCharts(); processes.refresh(); }
  keepPlace();
}

function openStep(step) {
  if (!trajectories.steps.length) return; // a click on a chart is about training
  if (trajectories.stepsOf("training").length) trajectories.use("training");
  trajectories.nearest(step);
  show("Trajectories", true);
  speak(`trajectories of step ${trajectories.step}`);
}

function typing(event) {
  return event.target.closest("input, select, textarea") !== null;
}

function onKey(event) {
  if (event.key === "Escape") { hideTip(); if (typing(event)) event.target.blur(); }
  if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (VIEWS[Number(event.key) - 1]) show(VIEWS[Number(event.key) - 1], true);
  else if (event.key === "[") trajectories.move(-1);
  else if (event.key === "]") trajectories.move(1);
  else if (event.key === "?") byId("keys").showModal();
  else if (event.key === "/") {
    event.preventDefault();
    const view = [...byId("main").children].find((one) => !one.hidden);
    const field = view.querySelector("input[type=search]");
    if (field) field.focus();
  }
}

function tabs() {
  const list = VIEWS.map((name) => el("button", { role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, text: name, onclick: () => show(name) }));
  byId("views").append(...list);
  byId("views").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], at = list.indexOf(document.activeElement);
    if (by && at >= 0) show(VIEWS[(at + by + VIEWS.length) % VIEWS.length], true);
  });
  const help = el("button", { class: "help", text: "?", "aria-label": "Keys", title: "Keys", onclick: () => byId("keys").showModal() });
  byId("views").after(help);
}

function begin() {
  const place = readPlace(); // what follows writes the place anew
  document.title = `${runs.map((run) => run.name).join(" and ")}: report`;
  byId("head").append(...runs.map(headOf));
  const fresh = runs[0].live ? new Follower().element : refresher();
  if (fresh) byId("head").after(fresh);
  tabs();
  trajectories = new TrajectoriesView();
  const contents = { Curves: curvesView(), Trajectories: trajectories.element, Configuration: configurationView(), Processes: runs[0].live && processes.element };
  byId("main").append(...VIEWS.map((name) => el("div", { role: "tabpanel", id: `view-${name}`, "aria-labelledby": `tab-${name}` }, contents[name])));
  byId("keys").append(el("h2", { text: "Keys" }), el("dl", {}, ...SHORTCUTS.map(([key, what]) => el("div", {}, el("dt", { text: key }), el("dd", { text: what })))),
    el("button", { text: "Close", onclick: () => byId("keys").close() }));
  document.addEventListener("keydown", onKey);
  show("Curves");
  if (place.view) restorePlace(place);
}

begin();
