// What there is to see of a step, by kind: rollouts that it learnt from, responses of a validation, rows of the data,
// and pairs of a chosen and a rejected response, which are the rows of some algorithms.

const cutRow = (text, length) => isolated(text.slice(0, length));
const markOf = (correct) => (correct === true ? "✓" : correct === false ? "✗" : "–");
const markName = (correct) => (correct === true ? "right" : correct === false ? "wrong" : "not judged");
const markCell = (row) => el("span", { class: `mark-${markName(row.correct).split(" ")[0]}`, "aria-label": markName(row.correct), text: markOf(row.correct) });
const numberColumn = (name, width, key, title) => ({ name, title, number: true, width, cell: (row) => short(key(row)), key });

const STEP = { name: "Step", number: true, isMinor: true, width: "2.9rem", cell: (row) => String(row.step), key: (row) => row.step };
const PROMPT = { name: "Prompt", title: "The prompt, from where those of the step begin to differ", width: "minmax(3.2rem, 1.1fr)",
  cell: (row) => cutRow(row.prompt, 120), key: (row) => row.prompt };
const RESPONSE = { name: "Response", title: "Beginning of the response", width: "minmax(3.2rem, 1.4fr)", cell: (row) => cutRow(row.response, 120), key: (row) => row.response };
const REWARD = numberColumn("Reward", "3.7rem", (row) => row.reward);
const TOKENS = { ...numberColumn("Tokens", "3.5rem", (row) => row.tokens), isMinor: true };
const RIGHT = { name: "Right", title: "Whether the environment finds it correct", width: "2.6rem", key: (row) => (row.correct === null ? null : Number(row.correct)), cell: markCell };
const END = { name: "End", isMinor: true, title: "Why the response ended", width: "3rem", cell: (row) => (row.failure !== null ? "failed" : row.stop), key: (row) => row.stop };
const REJECTED = { name: "Rejected", title: "Beginning of the rejected response", width: "minmax(3.2rem, 1.2fr)", cell: (row) => cutRow(row.rejected.response, 120), key: (row) => row.rejected.response };
const PAIR_MARGIN = numberColumn("Margin", "4.8rem", (row) => row.margin, "Reward of the chosen minus that of the rejected response");
const PREFERRED = { ...RIGHT, name: "Right", title: "Whether the chosen response has the higher reward" };

const ANY = ["All", () => true];
const JUDGED = {
  all: ANY,
  right: ["Right", (row) => row.correct === true],
  wrong: ["Wrong", (row) => row.correct === false],
  cut: ["Cut off", (row) => row.stop === "length"],
  failed: ["Failed", (row) => row.failure !== null],
  suspect: ["Suspect", (row) => row.suspect.length > 0],
  full: ["With tokens", (row) => row.full !== null],
};

/** Of each kind: columns of its table, filters, what its rows are called, and what a part that is learnt is called. */
const KINDS = {
  rollouts: { columns: [STEP, PROMPT, RESPONSE, REWARD, RIGHT, TOKENS, numberColumn("Advantage", "4.7rem", (row) => row.advantage), END],
    filters: JUDGED, noun: "rollouts", learnt: "Model", other: "Environment" },
  validation: { columns: [STEP, PROMPT, RESPONSE, REWARD, RIGHT, TOKENS, END], filters: JUDGED, noun: "validation responses", learnt: "Model", other: "Environment" },
  rows: { columns: [STEP, PROMPT, RESPONSE, TOKENS], filters: { all: ANY, full: JUDGED.full }, noun: "rows", learnt: "Learnt", other: "Given" },
  pairs: { columns: [STEP, PROMPT, { ...RESPONSE, name: "Chosen", width: "minmax(3.2rem, 1.2fr)" }, REJECTED, PAIR_MARGIN, PREFERRED], noun: "responses of pairs",
    filters: { all: ANY, right: ["Chosen has more", JUDGED.right[1]], wrong: ["Rejected has more", JUDGED.wrong[1]], full: JUDGED.full }, learnt: "Learnt", other: "Given" },
};

/** The columns of a kind that fit the window. */
const columnsOf = (kind) => KINDS[kind].columns.filter((column) => !column.isMinor || !matchMedia("(max-width: 560px)").matches);

/** A step's columns as rows; the two responses of a pair are one row. */
function rowsOf(step, table, kind) {
  const rows = table.reward.map((reward, place) => {
    const row = table.rows[table.group[place]] || { answer: null, columns: {} };
    return {
      step, place, reward, full: table.full[place] || null, prompt: table.prompts[table.group[place]] || `row ${table.prompt_idx[place]}`,
      promptIdx: table.prompt_idx[place], group: table.group[place], sample: table.sample[place], correct: table.correct[place],
      stop: table.stop_reason[place], failure: table.failure[place] ?? null, fault: table.fault?.[place] ?? null, tokens: table.tokens[place], advantage: table.advantage[place],
      environment: table.task_name?.[place] || "", suspect: table.suspect[place], response: table.response[place], characters: table.characters[place], answer: row.answer, columns: row.columns,
      images: table.images?.[table.group[place]] || [],
    };
  });
  if (kind !== "pairs") return rows;
  const rejected = new Map(rows.filter((row) => row.sample === 1).map((row) => [row.group, row]));
  return rows.filter((row) => row.sample === 0 && rejected.has(row.group)).map((row) => {
    const other = rejected.get(row.group), known = row.reward !== null && other.reward !== null, margin = known ? row.reward - other.reward : null;
    return { ...row, rejected: other, margin, correct: known ? margin > 0 : null };
  });
}

/** The kind of a step's table: rows of a source that come in twos are pairs. */
const kindOf = (kind, table) => (kind === "rows" && table.sample.includes(1) ? "pairs" : kind);

/** Everything in a row that a search looks at, in lower case. */
const searched = (row) => [row.prompt, row.response, row.rejected ? row.rejected.response : "", row.answer || "", ...Object.values(row.columns)].join("\n").toLowerCase();
