// The view of trajectories: for each run the table of a step, and the one that is chosen, token by token.

const MOST_FOUND = 5000;
const SOURCES = ["training", "validation"];
/** The trajectories of one run: its table and the detail beside it. */
class RunPanel {
  constructor(run, view) {
    this.run = run;
    this.view = view;
    this.rows = [];
    this.detail = el("section", { class: "detail", "aria-label": "Trajectory" });
    this.count = el("span", { class: "count" });
    this.list = el("div", { class: "list" });
    this.history = el("div", {});
    const title = runs.length > 1 ? el("h2", { class: `run-${run}` }, `${LETTERS[run]} `, isolated(runs[run].name)) : null;
    this.element = el("div", { class: "panel" }, title, el("div", { class: "panel-body" }, this.list, this.detail));
    this.use("rollouts");
  }

  /** Shows rows of a kind, each with its own columns. */
  use(kind) {
    if (this.kind === kind) return;
    this.kind = kind;
    this.table = new Table({ columns: columnsOf(kind), label: `Trajectories of ${runs[this.run].name}`, choose: (row) => this.choose(row) });
    this.list.replaceChildren(this.history, this.table.element, this.count);
    this.shown = undefined;
  }

  async open(step) {
    const { source } = this.view, { steps, kind } = tablesOf(this.run, source);
    this.step = step;
    const table = steps.includes(step) ? await load(tableName(this.run, source, step)) : null;
    if (this.step !== step || this.view.source !== source) return; // another step was asked for meanwhile
    this.use(table ? kindOf(kind, table) : kind);
    this.rows = table ? rowsOf(step, table, this.kind) : [];
    this.history.replaceChildren();
    this.view.narrowing.offer(this.view.panels.flatMap((panel) => panel.rows));
    this.filter();
  }

  keeps(row) {
    const { filter, query, narrowing } = this.view, { filters } = KINDS[this.kind];
    return (filters[filter] || ANY)[1](row) && narrowing.keeps(row) && (!query || searched(row).includes(query.toLowerCase()));
  }

  filter(rows = this.rows, what = "") {
    const found = rows.filter((row) => this.keeps(row));
    const before = this.shown;
    this.table.show(found);
    this.count.textContent = rows.length ? `${what}${short(found.length)} of ${short(rows.length)}` : "The page has nothing of this step";
    const same = before && this.table.selectWhere((row) => row.promptIdx === before.promptIdx && row.sample === before.sample && row.group === before.group);
    if (!same && found.length) this.table.select(this.firstInFull(found));
    if (!found.length) this.detail.replaceChildren(el("p", { class: "empty", text: "Nothing here." }));
  }

  firstInFull(found) {
    const place = this.table.order.findIndex((number) => found[number].full !== null);
    return Math.max(place, 0);
  }

  /** Looks through all steps, one after the other. */
  async searchEverywhere() {
    const { source } = this.view, { steps, kind } = tablesOf(this.run, source), all = [], search = (this.search = {});
    for (const step of steps) {
      const table = await unpack(tableName(this.run, source, step));
      if (this.search !== search) return;
      this.use(kindOf(kind, table));
      all.push(...rowsOf(step, table, this.kind).filter((row) => this.keeps(row)));
      this.count.textContent = `Step ${step}: ${short(all.length)} found`;
      if (all.length >= MOST_FOUND) break;
    }
    this.step = null;
    this.rows = all;
    this.filter(all, "All steps: ");
    speak(`${all.length} found in all steps`);
  }

  /** Shows all samples of a row's prompt, of every step. */
  async showPrompt(row) {
    const { source } = this.view, search = (this.search = {});
    this.count.textContent = "Looking for this prompt";
    this.step = null; // a new step of a run that goes on does not take its place
    const { rows, remark } = await rowsOfPrompt(this.run, source, this.kind, row.promptIdx);
    if (this.search !== search) return;
    this.rows = rows;
    this.history.replaceChildren(historyOf(rows, remark, () => this.open(this.view.step)));
    this.filter(rows, "This prompt: ");
    speak(`${rows.length} samples of this prompt`);
  }

  async choose(row) {
    this.shown = row;
    this.view.chosen(this, row);
    const table = row.full && row.full.ids ? await loadTokens(this.run) : null;
    if (this.shown !== row) return;
    const nodes = [...this.heading(row), ...imagesOf(row), ...rowOf(row), ...this.texts(row, table)];
    this.detail.replaceChildren(...nodes.filter((node) => node !== null));
    this.detail.scrollTop = 0;
  }

  texts(row, table) {
    const names = KINDS[this.kind];
    if (row.rejected) return pairDetail(row, table, names, this.view);
    return table ? byToken(row, table, names, this.view, largest(this.rows.map((one) => one.advantage))) : byText(row, names);
  }

  heading(row) {
    const what = this.kind === "validation" ? "Validation after step " : "Step ", isSampled = this.kind === "rollouts";
    const margin = row.rejected && row.margin !== null ? [fact("Margin", short(row.margin)), fact("Higher", row.margin > 0 ? "chosen" : row.margin < 0 ? "rejected" : "neither", `mark-${row.correct ? "right" : "wrong"}`)] : [];
    const facts = row.rejected ? margin : this.kind === "rows" ? learntFacts(row) : factsOf(row, this.kind);
    return [
      el("h3", {}, what, el("b", { text: row.step }), this.kind === "rows" || row.rejected ? ", row " : ", prompt ", el("b", { text: row.promptIdx }),
        ...(isSampled ? [", sample ", el("b", { text: row.sample })] : [])),
      facts.length ? el("dl", { class: "facts" }, ...facts) : null,
      row.failure !== null ? el("p", { class: "failure" }, isolated(row.failure)) : null,
      row.fault !== null ? el("p", { class: "failure" }, isolated(row.fault)) : null,
      this.siblings(row),
      tablesOf(this.run, this.view.source).steps.length > 1 && !this.history.childElementCount ? el("button", { class: "more over-steps", text: "This prompt over steps", onclick: () => this.showPrompt(row) }) : null,
    ];
  }

  siblings(row) {
    const group = this.rows.filter((one) => one.step === row.step && one.group === row.group);
    if (group.length < 2) return null;
    const pick = (one) => this.table.selectWhere((other) => other === one) || this.choose(one);
    return el("div", { class: "siblings", role: "group", "aria-label": "Samples of this prompt" }, el("span", { text: "Samples" }), ...group.map((one) =>
      el("button", { class: `sibling mark-${markName(one.correct).split(" ")[0]}`, "aria-pressed": String(one === row), title: `sample ${one.sample}: reward ${short(one.reward)}, ${markName(one.correct)}`, text: short(one.reward, 2), onclick: () => pick(one) })));
  }
}

/** Everything above the panels: which step, which rows, what is searched for. */
class TrajectoriesView {
  constructor() {
    this.filter = "all";
    this.query = "";
    this.colouring = "advantage";
    this.source = SOURCES.find((source) => this.stepsOf(source).length) || SOURCES[0];
    this.panels = runs.map((_, run) => new RunPanel(run, this));
    this.slider = el("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => this.open(this.steps[this.slider.value]) });
    this.number = el("input", { type: "number", "aria-label": "Number of the step", onchange: () => this.nearest(Number(this.number.value)) });
    this.search = el("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search", oninput: () => this.look() });
    const everywhere = el("button", { text: "In all steps", title: "Search all steps (Enter)", onclick: () => this.everywhere() });
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.everywhere());
    this.choice = el("select", { "aria-label": "Which trajectories", onchange: () => { this.filter = this.choice.value; this.look(); } });
    const present = SOURCES.filter((source) => this.stepsOf(source).length);
    this.sources = el("select", { "aria-label": "Of training or of validation", onchange: () => { this.use(this.sources.value); this.open(this.lastOfAll()); } },
      ...present.map((source) => el("option", { value: source, text: source === "training" ? "Training" : "Validation" })));
    this.sources.hidden = present.length < 2;
    this.narrowing = new Narrowing(() => this.look());
    const bar = el("div", { class: "bar" }, this.sources,
      el("div", { class: "stepper" }, el("label", { text: "Step" }), el("button", { text: "‹", "aria-label": "Step before", title: "[", onclick: () => this.move(-1) }), this.slider,
        el("button", { text: "›", "aria-label": "Next step", title: "]", onclick: () => this.move(1) }), this.number),
      this.choice, this.narrowing.element, el("div", { class: "searching" }, this.search, everywhere));
    this.notes = el("div", {});
    const ended = runs.every((run) => run.summary.outcome);
    this.element = present.length || runs[0].live ? el("div", { class: "trajectories" }, bar, el("div", { class: `panels of-${runs.length}` }, ...this.panels.map((panel) => panel.element)), this.notes)
      : el("p", { class: "empty", text: ended ? "This run has no rollouts: it made no step, or logger.rollouts=off." : "No rollouts have been written yet." });
    this.use(this.source);
  }

  /** Lets new steps of a run that goes on in; who looks at the last step is taken along. */
  extend() {
    const before = this.steps.length, wasLast = this.step === undefined || this.step === this.steps.at(-1);
    this.steps = this.stepsOf(this.source);
    if (this.steps.length === before) return;
    const last = this.steps.length - 1;
    Object.assign(this.slider, { max: last, value: Math.max(this.steps.indexOf(this.step), 0) });
    Object.assign(this.number, { min: this.steps[0], max: this.steps[last] });
    if (wasLast && !this.element.closest("[hidden]") && !this.panels.some((panel) => panel.step === null)) this.open(this.lastOfAll());
    else if (wasLast) this.step = undefined;
  }

  stepsOf(source) {
    return [...new Set(runs.flatMap((_, run) => tablesOf(run, source).steps))].sort((a, b) => a - b);
  }

  /** Shows the steps of training, or the validations. */
  use(source) {
    this.source = this.sources.value = source;
    this.steps = this.stepsOf(source);
    const last = Math.max(this.steps.length - 1, 0), { kind } = tablesOf(0, source);
    Object.assign(this.slider, { max: last, value: last });
    Object.assign(this.number, { min: this.steps[0] ?? "", max: this.steps[last] ?? "" });
    // Pairs are rows until a table of them is opened, and have the same filters and more.
    const { filters } = KINDS[kind === "rows" ? "pairs" : kind];
    this.choice.replaceChildren(...Object.entries(filters).map(([name, [label]]) => el("option", { value: name, text: label })));
    if (!filters[this.filter]) this.filter = "all";
    this.choice.value = this.filter;
    this.notes.replaceChildren(...runs.map((_, run) => this.note(run)));
  }

  restore(source, filter = "all", query = "") {
    if (SOURCES.includes(source) && this.stepsOf(source).length) this.use(source);
    this.filter = [...this.choice.options].some((option) => option.value === filter) ? filter : "all";
    this.choice.value = this.filter;
    this.query = this.search.value = query;
  }

  note(run) {
    const { kind, rows, written, full } = tablesOf(run, this.source), { remark } = runs[run], which = runs.length > 1 ? `${LETTERS[run]}: ` : "";
    if (rows === undefined) return el("p", { class: "note", text: remark || "" }); // a server gives each step as it is asked for
    const rest = rows < written || full < written ? "; the run's folder has all of them" : "", noun = kind === "rows" ? "rows or responses" : KINDS[kind].noun;
    return el("p", { class: "note", text: `${which}${short(rows)} of the ${short(written)} ${noun} that were written are in the tables, ${short(full)} of them in full${rest}. ${remark || ""}` });
  }

  /** The last step that every run has rollouts of, or the last of all. */
  lastOfAll() {
    const common = this.steps.filter((step) => runs.every((_, run) => tablesOf(run, this.source).steps.includes(step)));
    return (common.length ? common : this.steps).at(-1);
  }

  open(step) {
    if (step === undefined) return;
    this.step = step;
    this.slider.value = this.steps.indexOf(step);
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.number.value = step;
    for (const panel of this.panels) { panel.search = null; panel.open(step); }
    keepPlace();
  }

  /** Opens the step that has rollouts and is nearest to a number. */
  nearest(step) {
    this.open(this.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), this.steps[0]));
  }

  move(by) {
    const place = this.steps.indexOf(this.step) + by;
    if (place >= 0 && place < this.steps.length) this.open(this.steps[place]);
  }

  look() {
    this.query = this.search.value;
    for (const panel of this.panels) {
      panel.search = null;
      if (panel.step === null) panel.open(this.step); else panel.filter();
    }
    keepPlace();
  }

  everywhere() {
    this.query = this.search.value;
    for (const panel of this.panels) panel.searchEverywhere();
  }

  colour(name) {
    this.colouring = name;
    for (const panel of this.panels) if (panel.shown) panel.choose(panel.shown);
  }

  /** What is chosen in one run is looked up in the other: the same prompt and sample, if it is there. */
  chosen(panel, row) {
    if (this.following) return;
    this.following = true;
    for (const other of this.panels) {
      if (other !== panel) other.table.selectWhere((one) => one.promptIdx === row.promptIdx && one.sample === row.sample && one.step === row.step);
    }
    this.following = false;
  }
}
