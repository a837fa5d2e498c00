// What narrows a table beside its filter and search: the environment, and least and largest reward and length.

const RANGES = [["reward", "Reward", (row) => row.reward], ["tokens", "Tokens", (row) => row.tokens]];

/** Fields above the tables: { element, keeps(row), offer(rows) }; `changed` is called when one of them changes. */
class Narrowing {
  constructor(changed) {
    this.limits = Object.fromEntries(RANGES.map(([name]) => [name, [null, null]]));
    this.environment = "";
    const field = (name, label, side) => el("input", { type: "number", step: "any", placeholder: side ? "to" : "from", "aria-label": `${label} ${side ? "at most" : "at least"}`,
      oninput: (event) => { this.limits[name][side] = event.target.value === "" ? null : Number(event.target.value); changed(); } });
    this.choice = el("select", { "aria-label": "Environment", hidden: true, onchange: () => { this.environment = this.choice.value; changed(); } });
    this.element = el("div", { class: "ranges" }, this.choice, ...RANGES.flatMap(([name, label]) => [el("span", { text: label }), field(name, label, 0), field(name, label, 1)]));
  }

  keeps(row) {
    const within = ([name, , key]) => {
      const [low, high] = this.limits[name], value = key(row);
      return (low === null && high === null) || (value !== null && (low === null || value >= low) && (high === null || value <= high));
    };
    return RANGES.every(within) && (!this.environment || row.environment === this.environment);
  }

  /** Offers the environments of these rows, if there are several. */
  offer(rows) {
    const names = [...new Set([...rows.map((row) => row.environment), this.environment])].filter((name) => name).sort();
    this.choice.hidden = names.length < 2;
    this.choice.replaceChildren(el("option", { value: "", text: "All environments" }), ...names.map((name) => el("option", { value: name, text: name })));
    this.choice.value = this.environment;
  }
}

/** What became of a prompt: a line for each step that sampled it, with means over its samples. */
function historyOf(rows, remark, leave) {
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  const mean = (values) => { const known = values.filter((value) => value !== null); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };
  const lines = steps.map((step) => {
    const samples = rows.filter((row) => row.step === step);
    return [step, samples.length, mean(samples.map((row) => row.reward)), mean(samples.map((row) => (row.correct === null ? null : Number(row.correct)))),
      mean(samples.map((row) => row.tokens)), new Set(samples.map((row) => row.response)).size];
  });
  const heads = ["Step", "Samples", "Reward", "Right", "Tokens", "Different"];
  return el("section", { class: "history", "aria-label": "This prompt over steps" }, el("h4", { text: "This prompt over steps" }),
    el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { text, scope: "col" })))),
      el("tbody", {}, ...lines.map((line) => el("tr", {}, ...line.map((value) => el("td", { text: short(value) })))))),
    remark ? el("p", { class: "note", text: remark }) : null, el("button", { class: "more", text: "Back to the step", onclick: leave }));
}

/** All rows of a prompt in a run: { rows, remark }. A page without a server looks through its tables. */
async function rowsOfPrompt(run, source, kind, prompt) {
  if (runs[0].live) {
    const { tables, read, steps } = await ask("prompt", { run, source, prompt });
    Object.values(tables).forEach((table) => Object.assign(tokensByRun[run], table.texts));
    const rows = Object.entries(tables).flatMap(([step, table]) => rowsOf(Number(step), table, kindOf(kind, table)));
    return { rows, remark: read < steps ? `The latest ${short(read)} of ${short(steps)} steps were looked through.` : "" };
  }
  const rows = [];
  for (const step of tablesOf(run, source).steps) {
    const table = await unpack(tableName(run, source, step));
    if (table.prompt_idx.includes(prompt)) rows.push(...rowsOf(step, table, kindOf(kind, table)).filter((row) => row.promptIdx === prompt));
  }
  return { rows, remark: "" };
}
