// What is chosen in a table, in full: its figures, its row of the data, and its texts token by token.

const fact = (name, value, kind) => el("div", {}, el("dt", {}, isolated(name)), el("dd", { class: kind }, isolated(String(value))));
const SHORT_COLUMNS = 240; // characters of columns that are shown at once

/** Figures of a rollout or response. */
function factsOf(row, kind) {
  const { full } = row, scores = Object.entries((full && full.parts) || {}).map(([name, value]) => fact(name, short(value)));
  const versions = full ? [...new Set(full.spans.map(([, , version]) => version))].filter((version) => version >= 0) : [];
  return [
    fact("Reward", short(row.reward)), ...scores, fact("Judged", markName(row.correct), `mark-${markName(row.correct).split(" ")[0]}`),
    ...(kind === "rollouts" ? [fact("Advantage", short(row.advantage))] : []), fact("Tokens", short(row.tokens)), fact("Ended by", row.failure !== null ? "failure" : row.stop),
    ...(row.suspect.length ? [fact("Suspect", row.suspect.join(", "))] : []),
    ...(versions.length ? [fact("Weights", versions.map((one) => `v${one}`).join(", "))] : []),
  ];
}

/** Figures of a response of a pair, or of a learnt row. */
function learntFacts(row) {
  const logprobs = row.full && row.full.logprobs, sum = logprobs && logprobs.reduce((total, value) => total + value, 0);
  return [
    ...(row.reward === null ? [] : [fact("Reward", short(row.reward))]),
    ...(logprobs && logprobs.length ? [fact("Log-probability", short(sum)), fact("per token", short(sum / logprobs.length))] : []), fact("Learnt tokens", short(row.tokens)),
  ];
}

/** The images of the prompt in the text around them. */
function imagesOf(row) {
  const piece = (text) => el("span", {}, isolated(text)), last = row.images.at(-1);
  const picture = ({ source, size }) => (source === null ? el("i", { text: `image of ${size}, not on this page` }) : el("img", { src: source, alt: `image of ${size}`, title: size }));
  return last ? [el("section", { class: "part pictures" }, el("h4", {}, "Images", el("span", { text: row.images.map((image) => image.size).join(", ") })),
    el("p", {}, ...row.images.flatMap((image) => [piece(image.before), picture(image)]), piece(last.after)))] : [];
}

/** The expected answer and the other columns of the row. */
function rowOf(row) {
  const names = Object.keys(row.columns), length = names.reduce((sum, name) => sum + name.length + row.columns[name].length, 0);
  return [
    row.answer === null ? null : el("section", { class: "part expected" }, el("h4", {}, "Expected answer"), textFlow(row.answer, "Expected answer")),
    names.length ? el("details", { class: "columns", open: length <= SHORT_COLUMNS }, el("summary", { text: names.length > 1 ? `${names.length} other columns of the row` : "Another column of the row" }),
      el("dl", {}, ...names.map((name) => el("div", {}, el("dt", {}, isolated(name)), el("dd", {}, isolated(row.columns[name])))))) : null,
  ];
}

/** Which of the colourings a text has, with a choice among them. */
function colourChoice(fulls, wanted, colour) {
  const known = Object.keys(COLOURINGS).filter((name) => name === "none" || fulls.some((full) => COLOURINGS[name].of(full)));
  const colouring = known.includes(wanted) ? wanted : known[0];
  const choice = known.length < 2 ? null : el("div", { class: "choice", role: "radiogroup", "aria-label": "Colour of tokens" }, el("span", { text: "Colour" }), ...known.map((name) =>
    el("button", { role: "radio", "aria-checked": String(name === colouring), text: COLOURINGS[name].label, onclick: () => colour(name) })));
  return { colouring, choice };
}

/** Blocks of a text token by token; `part` of `parts`. */
function tokenBlock(full, texts, part, names, colouring, ofStep) {
  const name = part.role === "Model" ? names.learnt : part.role === "Prompt" ? "Prompt" : names.other;
  return el("section", { class: `part ${part.role.toLowerCase()}` }, el("h4", {}, name, el("span", { text: countOf(part.end - part.begin, "token") })), tokenFlow(full, texts, part, colouring, ofStep));
}

function byToken(row, table, names, view, ofStep) {
  const { full } = row, texts = tokenTexts(full.ids, table), { colouring, choice } = colourChoice([full], view.colouring, (name) => view.colour(name));
  return [el("div", { class: "colours" }, choice, legend(full, colouring, ofStep)), ...parts(full).map((part) => tokenBlock(full, texts, part, names, colouring, ofStep))];
}

function byText(row, names) {
  const whole = row.response.length >= row.characters;
  const cut = whole ? null : el("p", { class: "note", text: row.full ? `The first ${short(row.response.length)} of ${short(row.characters)} characters.`
    : `The page holds the first ${short(row.response.length)} of ${short(row.characters)} characters; the run's folder has all.` });
  return [
    el("section", { class: "part prompt" }, el("h4", {}, "Prompt", el("span", { text: "a part" })), textFlow(row.prompt, "Prompt")),
    el("section", { class: "part model" }, el("h4", {}, names.learnt, el("span", { text: countOf(row.tokens, "token") })), textFlow(row.response, "Response")), cut,
  ];
}

/** The chosen response of a pair beside the rejected one, below what both answer. */
function pairDetail(row, table, names, view) {
  const both = [["Chosen", row], ["Rejected", row.rejected]], tokens = table && both.every(([, one]) => one.full && one.full.ids);
  const heads = (name, one) => [el("h4", { class: name === "Chosen" ? "mark-right" : "mark-wrong", text: name }), el("dl", { class: "facts" }, ...learntFacts(one))];
  if (!tokens) {
    const side = ([name, one]) => el("div", { class: "side" }, ...heads(name, one), ...byText(one, names).slice(1).filter((node) => node));
    return [byText(row, names)[0], el("div", { class: "sides" }, ...both.map(side))];
  }
  const { colouring, choice } = colourChoice(both.map(([, one]) => one.full), view.colouring, (name) => view.colour(name));
  const end = Math.max(...both.map(([, one]) => largest(COLOURINGS[colouring].of(one.full) || [])));
  const texts = both.map(([, one]) => tokenTexts(one.full.ids, table)), pieces = both.map(([, one]) => parts(one.full));
  const first = pieces[0][0].role === "Prompt" ? [tokenBlock(row.full, texts[0], pieces[0][0], names, colouring, end)] : [];
  const side = ([name, one], place) => el("div", { class: "side" }, ...heads(name, one),
    ...pieces[place].filter((part) => part.role !== "Prompt").map((part) => tokenBlock(one.full, texts[place], part, names, colouring, end)));
  return [el("div", { class: "colours" }, choice, legend(row.full, colouring, end)), ...first, el("div", { class: "sides" }, ...both.map(side))];
}
