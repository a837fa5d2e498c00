// The data of the page: figures of the runs at once, the trajectories of a step when somebody looks at them.

const runs = JSON.parse(byId("runs").textContent);
const LETTERS = ["A", "B", "C", "D"];

/** Reads an element of gzip in base 64, in a page that is followed from the server; null: there is none of this name. */
async function unpack(name) {
  const [, run, source, step] = /^run(\d)-(training|validation)(\d+)$/.exec(name) || [];
  if (runs[0].live && source) return fetchTable(Number(run), source, step);
  const element = byId(name);
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const unpacked = new Map();
const KEPT = 12;

/** The same, with those kept that were asked for last. */
function load(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack(name));
  else { const again = unpacked.get(name); unpacked.delete(name); unpacked.set(name, again); }
  if (unpacked.size > KEPT) unpacked.delete(unpacked.keys().next().value);
  return unpacked.get(name);
}

/** What a run has of a source, training or validation: { kind, steps, written, rows, full }. */
const tablesOf = (run, source) => runs[run][`${source}_tables`];
const tableName = (run, source, step) => `run${run}-${source}${step}`;
const tokenTables = new Map();

/** The text, or [bytes in base 64], of each token of a run by its id. */
function loadTokens(run) {
  if (runs[0].live) return tokensByRun[run];
  if (!tokenTables.has(run)) tokenTables.set(run, unpack(`run${run}-tokens`));
  return tokenTables.get(run);
}

/** [[step, value], ...] of a metric of a run's group, without the steps that do not have it. */
function series(run, group, name) {
  const table = runs[run][group], values = table[name] || [];
  return values.map((value, place) => [table.step[place], value]).filter(([, value]) => value !== null);
}

/** Exponential moving average whose first values have their full weight. */
function smoothed(points, past = 0.9) {
  let average = 0, weight = 0;
  return points.map(([step, value]) => {
    average = past * average + (1 - past) * value;
    weight = past * weight + (1 - past);
    return [step, average / weight];
  });
}
