// The view of the configuration: how often the run was started and what changed, and every key with its value.

function configurationView() {
  return el("div", { class: "configuration" }, ...runs.map((run, number) => startsOf(run, number)), keys());
}

function startsOf(run, number) {
  if (!run.starts.length) return null;
  const items = run.starts.map((start) => el("li", {},
    el("span", { class: "when", text: start.time.replace("T", " ") }),
    el("span", { text: start.resumed_after === null ? "started" : `resumed after step ${start.resumed_after}` }),
    start.changes.length ? el("ul", {}, ...start.changes.map((change) => el("li", {}, isolated(change)))) : null));
  const name = runs.length > 1 ? `Starts of run ${LETTERS[number]}` : "Starts";
  return el("section", {}, el("h2", { text: name }), el("ol", { class: "starts" }, ...items));
}

function keys() {
  const two = runs.length > 1, values = runs.map((run) => new Map(run.config.map(([key, value, before]) => [key, { value, before }])));
  const names = [...new Set(values.flatMap((one) => [...one.keys()]))];
  const differs = (key) => two ? new Set(values.map((one) => (one.get(key) || {}).value)).size > 1 : (values[0].get(key) || {}).before !== null;
  const only = el("input", { type: "checkbox", id: "only" }), search = el("input", { type: "search", placeholder: "Search keys and values", "aria-label": "Search keys" });
  const body = el("tbody", {}), count = el("span", { class: "count" });
  const draw = () => {
    const wanted = search.value.toLowerCase();
    const found = names.filter((key) => (!only.checked || differs(key)) &&
      (!wanted || `${key} ${values.map((one) => (one.get(key) || {}).value).join(" ")}`.toLowerCase().includes(wanted)));
    count.textContent = `${found.length} of ${names.length}`;
    body.replaceChildren(...found.map((key) => el("tr", { class: differs(key) ? "differs" : "" }, el("th", { scope: "row" }, isolated(key)),
      ...values.map((one) => el("td", {}, one.has(key) ? isolated(one.get(key).value) : "–")),
      two ? null : el("td", { class: "default" }, differs(key) ? isolated(values[0].get(key).before ?? "") : ""))));
  };
  only.addEventListener("change", draw);
  search.addEventListener("input", draw);
  draw();
  const heads = two ? runs.map((_, number) => `Run ${LETTERS[number]}`) : ["Value", "Default, where it is another"];
  return el("section", {}, el("h2", { text: "Configuration" }),
    el("div", { class: "bar" }, search, el("label", {}, only, two ? "only what differs" : "only what is not at its default"), count),
    el("table", { class: "keys" }, el("thead", {}, el("tr", {}, el("th", { text: "Key", scope: "col" }), ...heads.map((text) => el("th", { text, scope: "col" })))), body));
}
