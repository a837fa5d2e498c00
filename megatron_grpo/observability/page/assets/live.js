// A page that a server follows: it asks for what is new, and draws it without being loaded again.

const LONGEST = 2000; // points of a curve, beyond which all are asked for anew, thinned
const ASK_MS = 2000;

async function ask(path, parameters = {}) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  return answer.json();
}

/** Appends the columns of new rows to those that are there, with null where one lacks a name. */
function appendColumns(table, fresh) {
  const before = (table.step || []).length, count = (fresh.step || []).length;
  for (const name of new Set([...Object.keys(table), ...Object.keys(fresh)])) {
    table[name] = [...(table[name] || new Array(before).fill(null)), ...(fresh[name] || new Array(count).fill(null))];
  }
}

/** Takes the server's answer for a run over; true: something of it is new. */
function takeOver(run, { description, figures, tables, is_whole: isWhole, known }) {
  const changed = description !== null || isWhole || Object.values(figures).some((table) => table.step && table.step.length) || Object.values(tables).some(({ steps }) => steps.length);
  if (description) Object.assign(run, description);
  for (const [group, table] of Object.entries(figures)) {
    if (isWhole) run[group] = table; else appendColumns(run[group], table);
  }
  for (const [source, { kind, steps }] of Object.entries(tables)) {
    run[`${source}_tables`] = { kind, steps: isWhole ? steps : [...run[`${source}_tables`].steps, ...steps] };
  }
  run.live = (run.metrics.step || []).length > LONGEST ? {} : known;
  return changed;
}

/** Draws head and curves anew, and lets the trajectories know of new steps. */
function drawAgain() {
  const place = { x: scrollX, y: scrollY }, figures = byId("figures"), words = figures ? figures.value : "", open = document.querySelector(".others")?.open;
  byId("head").replaceChildren(...runs.map(headOf));
  cursor.charts.clear();
  byId("view-Curves").replaceChildren(curvesView());
  if (words) { byId("figures").value = words; byId("figures").dispatchEvent(new Event("input")); }
  if (open) document.querySelector(".others").open = true;
  if (!byId("view-Processes").hidden) processes.drawCharts();
  trajectories.extend();
  scrollTo(place.x, place.y);
}

/** Asks every two seconds, while the page is seen; a line says when it last heard of the run. */
class Follower {
  constructor() {
    this.paused = false;
    this.text = el("span", { text: "following" });
    this.button = el("button", { class: "pause", text: "Pause", "aria-pressed": "false", onclick: () => this.pause() });
    this.element = el("p", { class: "fresh", role: "status" }, this.text, this.button);
    setTimeout(() => this.again(), ASK_MS);
  }

  pause() {
    this.paused = !this.paused;
    this.button.setAttribute("aria-pressed", String(this.paused));
    this.button.textContent = this.paused ? "Go on" : "Pause";
  }

  async again() {
    if (!this.paused && !document.hidden && !byId("keys").open && String(getSelection()) === "") {
      try {
        const answer = await ask("state", { known: JSON.stringify(runs.map((run) => run.live)) });
        const changed = answer.runs.map((part, number) => takeOver(runs[number], part));
        if (changed.includes(true) && Date.now() - typed > 1500) drawAgain();
        if (!byId("view-Processes").hidden) await processes.refresh();
        this.text.textContent = `as of ${answer.time}${runs.some((run) => run.is_live) ? "" : ", ended"}`;
      } catch (error) {
        this.text.textContent = `no answer: ${error.message}`;
      }
    }
    setTimeout(() => this.again(), ASK_MS);
  }
}

const tokensByRun = runs.map(() => ({}));

/** The table of a step from the server; its texts of tokens join those of the run. */
async function fetchTable(run, source, step) {
  const table = await ask("table", { run, source, step });
  Object.assign(tokensByRun[run], table.texts);
  return table;
}
