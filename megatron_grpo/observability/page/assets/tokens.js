// A trajectory token by token: its turns, coloured by what is known of each token.

const AT_ONCE = 3000; // tokens, or runs of 40 characters, that are laid out at once

const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value || 0)), 0);

/** How tokens are coloured: by which numbers, what the ends of the scale mean, and where it ends. */
const COLOURINGS = {
  advantage: { label: "Advantage", low: "makes it less likely", high: "more likely", of: (full) => full.advantages,
    end: (values, ofStep) => Math.max(ofStep, largest(values)) },
  gap: { label: "Training − generation", low: "training less likely", high: "more likely", of: (full) => full.gaps, end: largest },
  logprob: { label: "Surprise", low: "", high: "unlikely", of: (full) => full.logprobs && full.logprobs.map((value) => -value), end: () => 5 },
  none: { label: "None", low: "", high: "", of: () => null },
};

/** The texts of tokens, each what is complete with it: a character over several tokens appears at its last one. */
function tokenTexts(ids, table) {
  const decoder = new TextDecoder("utf-8"), encoder = new TextEncoder();
  let open = false;
  return ids.map((id) => {
    const entry = table[id];
    if (entry === undefined) return `<${id}>`;
    if (typeof entry === "string" && !open) return entry;
    const bytes = typeof entry === "string" ? encoder.encode(entry)
      : Uint8Array.from(atob(entry[0]), (character) => character.charCodeAt(0));
    const text = decoder.decode(bytes, { stream: true });
    open = typeof entry !== "string";
    return text;
  });
}

/** Parts of a trajectory: { role, begin, end, sampled } in tokens; `sampled` counts the model's own before it. */
function parts(full) {
  const found = [];
  let at = 0, sampled = 0;
  for (const [begin, end, version] of full.spans) {
    if (begin > at) found.push({ role: at ? "Environment" : "Prompt", begin: at, end: begin });
    const last = found[found.length - 1];
    if (last && last.role === "Model" && last.end === begin) { last.end = end; last.versions.add(version); }
    else found.push({ role: "Model", begin, end, sampled, versions: new Set([version]) });
    sampled += end - begin;
    at = end;
  }
  if (at < full.ids.length) found.push({ role: at ? "Environment" : "Prompt", begin: at, end: full.ids.length });
  return found;
}

/** Share of a number in its scale, from -1 to 1; 0 where it is not known. */
function shareOf(values, place, end) {
  const value = values && (values.length === 1 ? values[0] : values[place]);
  return value === null || value === undefined || !end ? 0 : Math.max(-1, Math.min(1, value / end));
}

function tokenTip(full, texts, place, sampled) {
  const row = (name, value) => el("div", { class: "tip-row" }, el("span", { text: name }), el("b", { text: value }));
  const advantage = full.advantages && (full.advantages.length === 1 ? full.advantages[0] : full.advantages[sampled]);
  const logprob = full.logprobs && full.logprobs[sampled];
  return [
    el("strong", {}, isolated(JSON.stringify(texts[place]))), row("token", `${place + 1}, id ${full.ids[place]}`),
    ...(sampled === null ? [row("given, not in the loss", "")] : [
      ...(full.logprobs ? [row("log-probability", short(logprob, 4)), row("probability", short(Math.exp(logprob)))] : []),
      ...(full.gaps ? [row("training − generation", short(full.gaps[sampled]))] : []),
      ...(advantage === undefined || advantage === null ? [] : [row("advantage", short(advantage))]),
    ]),
  ];
}

/** The tokens of one part in an element; those that are many follow when they are asked for. `ofStep`: see legend. */
function tokenFlow(full, texts, part, colouring, ofStep) {
  const flow = el("bdi", { class: "tokens", dir: "auto", tabindex: 0, "aria-label": `${part.role}, ${part.end - part.begin} tokens` });
  const values = COLOURINGS[colouring].of(full), end = values && COLOURINGS[colouring].end(values, ofStep);
  const sampledAt = (place) => (part.role === "Model" ? part.sampled + place - part.begin : null);
  const extend = (from) => {
    const to = Math.min(from + AT_ONCE, part.end), fragment = document.createDocumentFragment();
    for (let place = from; place < to; place++) {
      const token = el("span", { class: "token" }, ...(texts[place] ? shown(texts[place]) : []));
      token.place = place;
      if (part.role === "Model" && values) {
        const share = shareOf(values, sampledAt(place), end);
        if (share) token.style.backgroundColor = `color-mix(in oklab, var(--${share < 0 ? "less" : COLOURINGS[colouring].low ? "more" : "much"}) ${Math.round(6 + 46 * Math.abs(share))}%, transparent)`;
      }
      fragment.append(token);
    }
    flow.append(fragment);
    if (to < part.end) {
      const more = el("button", { class: "more", text: `Show the next ${short(Math.min(AT_ONCE, part.end - to))} of ${short(part.end - part.begin)} tokens` });
      more.addEventListener("click", () => { more.remove(); extend(to); flow.focus(); });
      flow.append(more);
    }
  };
  const tip = (token, x, y) => showTip(x, y, ...tokenTip(full, texts, token.place, sampledAt(token.place)));
  flow.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".token");
    if (token) tip(token, event.clientX, event.clientY); else hideTip();
  });
  flow.addEventListener("pointerleave", hideTip);
  let current = null;
  flow.addEventListener("keydown", (event) => {
    const sibling = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (!sibling) return;
    event.preventDefault();
    const next = current ? current[sibling] : flow.firstElementChild;
    if (!next || !next.classList.contains("token")) return;
    if (current) current.classList.remove("current");
    current = next;
    current.classList.add("current");
    const box = current.getBoundingClientRect();
    tip(current, box.left, box.bottom);
    speak(byId("tip").textContent);
  });
  flow.addEventListener("blur", () => { if (current) current.classList.remove("current"); current = null; hideTip(); });
  extend(part.begin);
  return flow;
}

/** A long text in pieces, the next of which follows when it is asked for. */
function textFlow(text, label) {
  const flow = el("bdi", { class: "tokens", dir: "auto", tabindex: 0, "aria-label": label }), size = 40 * AT_ONCE;
  const extend = (from) => {
    flow.append(...shown(text.slice(from, from + size)));
    if (from + size < text.length) {
      const more = el("button", { class: "more", text: `Show more: ${short(text.length - from - size)} characters are left` });
      more.addEventListener("click", () => { more.remove(); extend(from + size); flow.focus(); });
      flow.append(more);
    }
  };
  extend(0);
  return flow;
}

/** What the colours mean; `ofStep` is the largest advantage of the step, so that responses compare. */
function legend(full, colouring, ofStep) {
  const { low, high, end, of } = COLOURINGS[colouring], values = of(full);
  if (!values) return el("div", { class: "legend" });
  const most = short(end(values, ofStep));
  return el("div", { class: "legend" }, el("span", { text: low ? `−${most} ${low}` : "0" }),
    el("i", { class: low ? "scale both" : "scale" }), el("span", { text: `${most} ${high}` }));
}
