// The page of a run that is going on loads itself again, in the place where it was; that of one that has ended does not.

const PARTS = ["view", "source", "step", "filter", "query", "figures"];

/** Writes what the reader looks at into the fragment of the address, once the page is complete. */
function keepPlace() {
  if (!trajectories || !byId("main").childElementCount) return;
  const place = { ...placeOf() };
  const text = new URLSearchParams(PARTS.filter((name) => place[name]).map((name) => [name, place[name]])).toString();
  if (location.hash.slice(1) !== text) location.replace(`#${text}`);
}

const readPlace = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** The last step is not written down: what comes after it is what the reader waits for. */
function placeOf() {
  const tab = byId("views").querySelector("[aria-selected=true]"), figures = byId("figures"), { step, steps, source, filter, query } = trajectories;
  const isLast = step === undefined || step === steps.at(-1);
  return { view: tab && tab.textContent, source, step: isLast ? "" : step, filter: filter === "all" ? "" : filter, query, figures: figures && figures.value };
}

function restorePlace({ view, source, step, filter, query, figures }) {
  const field = byId("figures");
  trajectories.restore(source, filter, query);
  if (VIEWS.includes(view)) show(view);
  if (view === "Trajectories" && trajectories.steps.includes(Number(step || NaN))) trajectories.open(Number(step));
  if (field && figures) { field.value = figures; field.dispatchEvent(new Event("input")); }
}

let typed = 0;
document.addEventListener("input", () => { typed = Date.now(); });

/** True while a new page would take something away from the reader. */
const isBusy = () => document.hidden || byId("keys").open || String(getSelection()) !== "" || Date.now() - typed < 5000;

/** Loads the page again every `refresh_s` seconds, until its runs have ended; null: they have. */
function refresher() {
  const waits = runs.map((run) => run.refresh_s).filter((seconds) => seconds);
  if (!waits.length) return null;
  const every = Math.max(...waits);
  let paused = false;
  const text = el("span", { text: `as of ${runs[0].written}, again every ${short(every)} s` });
  const button = el("button", { class: "pause", text: "Pause", "aria-pressed": "false", onclick: () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Go on" : "Pause";
  } });
  const again = () => (paused || isBusy() ? setTimeout(again, 2000) : location.reload());
  setTimeout(again, 1000 * every);
  return el("p", { class: "fresh", role: "status" }, text, button);
}
