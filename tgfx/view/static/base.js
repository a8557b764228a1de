// Small helpers. Text only ever enters the document as text nodes or attributes, so names cannot become markup.

const data = JSON.parse(document.getElementById("data").textContent);

const SVG = "http://www.w3.org/2000/svg";

function put(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** 1,234,567 */
const whole = (value) => Math.round(value).toLocaleString("en-US");

/** 1.23 M */
function brief(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${(value / unit).toPrecision(3)} ${letter}`;
  }
  if (Number.isInteger(value)) return String(value);
  return size < 0.001 ? value.toExponential(1) : value.toPrecision(3);
}

function percent(share) {
  if (!Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)}%`;
}

/** 64×56×56; a leading batch of one says nothing. */
function shapeText(shape) {
  if (!shape) return "";
  const sizes = shape.length > 1 && shape[0] === 1 ? shape.slice(1) : shape;
  return sizes.length ? sizes.join("×") : "scalar";
}

const sameShape = (a, b) => Boolean(a && b) && a.length === b.length && a.every((size, i) => size === b[i]);

const KIND_WORDS = {
  flops: "FLOPs", flops_all: "FLOPs with attention", params: "parameters", channels: "channels", heads: "heads",
};

// -- colours: concrete values, so that a copied picture needs no style sheet -------------------------------------

const isDark = () => document.documentElement.dataset.theme === "dark";
const hue = (group) => (group * 137.508) % 360;
const groupColour = (group) => `hsl(${hue(group).toFixed(0)} ${isDark() ? "55% 58%" : "60% 42%"})`;
const groupTint = (group) => `hsl(${hue(group).toFixed(0)} ${isDark() ? "38% 19%" : "60% 94%"})`;

/** 0..1 to a colour that stays readable under the theme's text. */
function heatColour(share) {
  const t = clamp(share, 0, 1);
  return isDark() ? `hsl(${50 - 45 * t} ${25 + 50 * t}% ${16 + 20 * t}%)` : `hsl(${50 - 30 * t} 95% ${97 - 34 * t}%)`;
}

/** Red at nothing, amber at half, teal at all. */
function keptColour(share) {
  const t = clamp(share, 0, 1);
  const angle = t < 0.5 ? 5 + 80 * t : 45 + 280 * (t - 0.5);
  return isDark() ? `hsl(${angle} 45% 27%)` : `hsl(${angle} 75% 82%)`;
}

/** The end of a path says most. */
const tailOf = (path, most) => (path.length > most ? "…" + path.slice(path.length - most + 1).replace(/^\./, "") : path);

const themeValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- state ---------------------------------------------------------------------------------------------------------

const state = {
  expanded: new Set(), // paths of modules that are open
  selected: null, // {kind: "node" | "module" | "group", id}
  hovered: null, // a group
  colour: "group", // or "flops", "params", "kept"
  tab: "overview",
  folded: true, // sizes and parameters are not drawn as nodes of their own
  view: { x: 0, y: 0, k: 1 },
  sort: { key: "order", down: false },
  cost: "flops",
  matches: new Set(),
};

const listeners = {};
const on = (event, call) => (listeners[event] ||= []).push(call);
const emit = (event, detail) => (listeners[event] || []).forEach((call) => call(detail));

function say(text) {
  byId("announcer").textContent = text;
}

let noteTimer = 0;
function notify(text) {
  const note = byId("note");
  note.textContent = text;
  note.hidden = false;
  clearTimeout(noteTimer);
  noteTimer = setTimeout(() => (note.hidden = true), 3500);
  say(text);
}
