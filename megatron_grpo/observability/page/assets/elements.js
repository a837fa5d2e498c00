// Elements are built one by one and text is set as text: nothing in this page is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Sets attributes, listeners (`onclick`) and, as `text`, the text of an element; appends children that are not null. */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

/** A number in a few digits, with a true minus sign. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e12) text = value.toLocaleString("en");
  else if (size >= 1e6 || size < 1e-3) text = value.toExponential(Math.max(digits - 2, 1)).replace(".0e", "e");
  else if (size >= 1000) text = Math.round(value).toLocaleString("en");
  else text = String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

const countOf = (count, noun) => `${short(count)} ${noun}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(whole % 60).padStart(2, "0")} s` : `${short(seconds)} s`;
}

// Characters that are not seen, or that would turn around what stands beside them, are written out.
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]", "gu");
const UNSEEN_NAMES = {
  0x0000: "NUL", 0x0007: "BEL", 0x0008: "BS", 0x000d: "CR", 0x001b: "ESC", 0x007f: "DEL", 0x00ad: "SHY",
  0x061c: "ALM", 0x200b: "ZWSP", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE",
  0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI",
  0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};

/** What a model wrote, as nodes: its text, with a label in place of each character that is not seen. */
function shown(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > end) nodes.push(document.createTextNode(text.slice(end, found.index)));
    const code = found[0].codePointAt(0), number = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "unseen-character", title: number, text: UNSEEN_NAMES[code] || number }));
    end = found.index + found[0].length;
  }
  if (end < text.length) nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

/** The same in one line, in an element that keeps its direction to itself. */
const isolated = (text, attributes) => el("bdi", attributes, ...shown(text.replace(/[ \t\r\n]+/g, " ")));

const speak = (text) => { byId("spoken").textContent = text; };

/** Shows a small box beside a point of the window. */
function showTip(x, y, ...content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + box.height + 22 > innerHeight ? Math.max(4, y - box.height - 12) : y + 16}px`;
}

const hideTip = () => { byId("tip").hidden = true; };
