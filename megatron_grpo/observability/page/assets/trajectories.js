// The view of trajectories: for each run the table of a step, and the one that is chosen, token by token.

const MOST_FOUND = 5000;
const FILTERS = {
  all: ["All", () => true],
  right: ["Right", (row) => row.correct === true],
  wrong: ["Wrong", (row) => row.correct === false],
  cut: ["Cut off", (row) => row.stop === "length"],
  failed: ["Failed", (row) => row.failure !== null],
  suspect: ["Suspect", (row) => row.suspect.length > 0],
  full: ["With tokens", (row) => row.full !== null],
};

/** A step's columns as rows. */
function rowsOf(step, table) {
  return table.reward.map((reward, place) => ({
    step, place, reward, full: table.full[place] || null, prompt: table.prompts[table.group[place]] || `row ${table.prompt_idx[place]}`,
    promptIdx: table.prompt_idx[place], group: table.group[place], sample: table.sample[place], correct: table.correct[place],
    stop: table.stop_reason[place], failure: table.failure[place] ?? null, fault: table.fault?.[place] ?? null, tokens: table.tokens[place], advantage: table.advantage[place],
    suspect: table.suspect[place], response: table.response[place], characters: table.characters[place],
  }));
}

const markOf = (correct) => (correct === true ? "✓" : correct === false ? "✗" : "–");
const markName = (correct) => (correct === true ? "right" : correct === false ? "wrong" : "not judged");

const COLUMNS = [
  { name: "Step", number: true, width: "2.9rem", cell: (row) => String(row.step), key: (row) => row.step },
  { name: "Prompt", title: "End of the prompt", width: "minmax(6rem, 1.1fr)", cell: (row) => isolated(row.prompt.slice(-90), { class: "cut-left" }), key: (row) => row.prompt },
  { name: "Response", title: "Beginning of the response", width: "minmax(6rem, 1.4fr)", cell: (row) => isolated(row.response.slice(0, 120)), key: (row) => row.response },
  { name: "Reward", number: true, width: "3.7rem", cell: (row) => short(row.reward), key: (row) => row.reward },
  { name: "Right", title: "Whether the environment finds it correct", width: "2.6rem", key: (row) => (row.correct === null ? null : Number(row.correct)),
    cell: (row) => el("span", { class: `mark-${markName(row.correct).split(" ")[0]}`, "aria-label": markName(row.correct), text: markOf(row.correct) }) },
  { name: "Tokens", number: true, width: "3.5rem", cell: (row) => short(row.tokens), key: (row) => row.tokens },
  { name: "Advantage", number: true, width: "4.7rem", cell: (row) => short(row.advantage), key: (row) => row.advantage },
  { name: "End", title: "Why the response ended", width: "3rem", cell: (row) => (row.failure !== null ? "failed" : row.stop), key: (row) => row.stop },
];

/** The trajectories of one run: its table and the detail beside it. */
class RunPanel {
  constructor(run, view) {
    this.run = run;
    this.view = view;
    this.rows = [];
    this.detail = el("section", { class: "detail", "aria-label": "Trajectory" });
    this.count = el("span", { class: "count" });
    this.table = new Table({ columns: COLUMNS, label: `Trajectories of ${runs[run].name}`, choose: (row) => this.choose(row) });
    const title = runs.length > 1 ? el("h2", { class: `run-${run}` }, `${LETTERS[run]} `, isolated(runs[run].name)) : null;
    this.element = el("div", { class: "panel" }, title, el("div", { class: "panel-body" }, el("div", { class: "list" }, this.table.element, this.count), this.detail));
  }

  async open(step) {
    const { steps } = runs[this.run].trajectories;
    this.step = step;
    const table = steps.includes(step) ? await loadStep(this.run, step) : null;
    if (this.step !== step) return; // another step was asked for meanwhile
    this.rows = table ? rowsOf(step, table) : [];
    this.filter();
  }

  filter(rows = this.rows, what = "") {
    const { filter, query } = this.view, keep = FILTERS[filter][1], wanted = query.toLowerCase();
    const found = rows.filter((row) => keep(row) && (!wanted || `${row.prompt}\n${row.response}`.toLowerCase().includes(wanted)));
    const before = this.shown;
    this.table.show(found);
    this.count.textContent = rows.length ? `${what}${short(found.length)} of ${short(rows.length)}` : "No rollouts of this step in the page";
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
    const { steps } = runs[this.run].trajectories, all = [], { query, filter } = this.view, search = (this.search = {});
    for (const step of steps) {
      const rows = rowsOf(step, await unpack(`run${this.run}-step${step}`));
      if (this.search !== search) return;
      all.push(...rows.filter((row) => FILTERS[filter][1](row) && `${row.prompt}\n${row.response}`.toLowerCase().includes(query.toLowerCase())));
      this.count.textContent = `Step ${step}: ${short(all.length)} found`;
      if (all.length >= MOST_FOUND) break;
    }
    this.step = null;
    this.rows = all;
    this.filter(all, "All steps: ");
    speak(`${all.length} found in all steps`);
  }

  async choose(row) {
    this.shown = row;
    this.view.chosen(this, row);
    const table = row.full && row.full.ids ? await loadTokens(this.run) : null;
    if (this.shown !== row) return;
    this.detail.replaceChildren(...this.heading(row), ...(table ? this.byToken(row, table) : this.byText(row)));
    this.detail.scrollTop = 0;
  }

  heading(row) {
    const fact = (name, value, kind) => el("div", {}, el("dt", {}, isolated(name)), el("dd", { class: kind, text: value }));
    const scores = Object.entries((row.full && row.full.parts) || {}).map(([name, value]) => fact(name, short(value)));
    const versions = row.full ? [...new Set(row.full.spans.map(([, , version]) => version))] : [];
    return [
      el("h3", {}, "Step ", el("b", { text: row.step }), ", prompt ", el("b", { text: row.promptIdx }), ", sample ", el("b", { text: row.sample })),
      el("dl", { class: "facts" }, fact("Reward", short(row.reward)), ...scores, fact("Judged", markName(row.correct), `mark-${markName(row.correct).split(" ")[0]}`),
        fact("Advantage", short(row.advantage)), fact("Tokens", short(row.tokens)), fact("Ended by", row.failure !== null ? "failure" : row.stop),
        ...(row.suspect.length ? [fact("Suspect", row.suspect.join(", "))] : []),
        ...(versions.length ? [fact("Weights", versions.map((one) => `v${one}`).join(", "))] : [])),
      row.failure !== null ? el("p", { class: "failure" }, isolated(row.failure)) : null,
      row.fault !== null ? el("p", { class: "failure" }, isolated(row.fault)) : null,
      this.siblings(row),
    ].filter((node) => node !== null);
  }

  siblings(row) {
    const group = this.rows.filter((one) => one.step === row.step && one.group === row.group);
    if (group.length < 2) return null;
    const pick = (one) => this.table.selectWhere((other) => other === one) || this.choose(one);
    return el("div", { class: "siblings", role: "group", "aria-label": "Samples of this prompt" }, el("span", { text: "Samples" }), ...group.map((one) =>
      el("button", { class: `sibling mark-${markName(one.correct).split(" ")[0]}`, "aria-pressed": String(one === row), title: `sample ${one.sample}: reward ${short(one.reward)}, ${markName(one.correct)}`, text: short(one.reward, 2), onclick: () => pick(one) })));
  }

  byToken(row, table) {
    const { full } = row, texts = tokenTexts(full.ids, table), ofStep = largest(this.rows.map((one) => one.advantage));
    const known = Object.keys(COLOURINGS).filter((name) => name === "none" || COLOURINGS[name].of(full));
    const colouring = known.includes(this.view.colouring) ? this.view.colouring : known[0];
    const choice = el("div", { class: "choice", role: "radiogroup", "aria-label": "Colour of tokens" }, el("span", { text: "Colour" }), ...known.map((name) =>
      el("button", { role: "radio", "aria-checked": String(name === colouring), text: COLOURINGS[name].label, onclick: () => this.view.colour(name) })));
    const blocks = parts(full).map((part) => el("section", { class: `part ${part.role.toLowerCase()}` },
      el("h4", {}, part.role, el("span", { text: `${short(part.end - part.begin)} tokens` })), tokenFlow(full, texts, part, colouring, ofStep)));
    return [el("div", { class: "colours" }, choice, legend(full, colouring, ofStep)), ...blocks];
  }

  byText(row) {
    const whole = row.response.length >= row.characters;
    const cut = whole ? null : el("p", { class: "note", text: row.full ? `The first ${short(row.response.length)} of ${short(row.characters)} characters.`
      : `The page holds the first ${short(row.response.length)} of ${short(row.characters)} characters; the run's folder of rollouts has all.` });
    return [
      el("section", { class: "part prompt" }, el("h4", {}, "Prompt", el("span", { text: "its end" })), textFlow(row.prompt, "Prompt")),
      el("section", { class: "part model" }, el("h4", {}, "Model", el("span", { text: `${short(row.tokens)} tokens` })), textFlow(row.response, "Response")), cut,
    ].filter((node) => node !== null);
  }
}

/** Everything above the panels: which step, which rows, what is searched for. */
class TrajectoriesView {
  constructor() {
    this.filter = "all";
    this.query = "";
    this.colouring = "advantage";
    this.steps = [...new Set(runs.flatMap((run) => run.trajectories.steps))].sort((a, b) => a - b);
    this.panels = runs.map((_, run) => new RunPanel(run, this));
    const last = Math.max(this.steps.length - 1, 0);
    this.slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "Step", oninput: () => this.open(this.steps[this.slider.value]) });
    this.number = el("input", { type: "number", min: this.steps[0], max: this.steps[last], "aria-label": "Number of the step", onchange: () => this.nearest(Number(this.number.value)) });
    this.search = el("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search", oninput: () => this.look() });
    const everywhere = el("button", { text: "In all steps", title: "Search all steps (Enter)", onclick: () => this.everywhere() });
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.everywhere());
    const choice = el("select", { "aria-label": "Which trajectories", onchange: () => { this.filter = choice.value; this.look(); } },
      ...Object.entries(FILTERS).map(([name, [label]]) => el("option", { value: name, text: label })));
    const bar = el("div", { class: "bar" },
      el("div", { class: "stepper" }, el("label", { text: "Step" }), el("button", { text: "‹", "aria-label": "Step before", title: "[", onclick: () => this.move(-1) }), this.slider,
        el("button", { text: "›", "aria-label": "Next step", title: "]", onclick: () => this.move(1) }), this.number),
      choice, el("div", { class: "searching" }, this.search, everywhere));
    const notes = runs.map((run, number) => this.note(run, number));
    this.element = this.steps.length ? el("div", { class: "trajectories" }, bar, el("div", { class: `panels of-${runs.length}` }, ...this.panels.map((panel) => panel.element)), ...notes)
      : el("p", { class: "empty", text: "This run has no rollouts: it made no step, or logger.rollouts=off." });
  }

  note(run, number) {
    const { rows, written, full, remark } = run.trajectories, which = runs.length > 1 ? `${LETTERS[number]}: ` : "";
    const rest = rows < written || full < written ? "; the folder of rollouts has all of them" : "";
    return el("p", { class: "note", text: `${which}${short(rows)} of the ${short(written)} rollouts that were written are in the tables, ${short(full)} of them in full${rest}. ${remark || ""}` });
  }

  /** The last step that every run has rollouts of, or the last of all. */
  lastOfAll() {
    const common = this.steps.filter((step) => runs.every((run) => run.trajectories.steps.includes(step)));
    return (common.length ? common : this.steps).at(-1);
  }

  open(step) {
    if (step === undefined) return;
    this.step = step;
    this.slider.value = this.steps.indexOf(step);
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.number.value = step;
    for (const panel of this.panels) { panel.search = null; panel.open(step); }
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
