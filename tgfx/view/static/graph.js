// The picture on the screen: view, culling, highlights, pointer and keys.

const stage = byId("stage");
const svg = byId("graph");
const world = sv("g", { id: "world" });
const layers = { frames: sv("g"), edges: sv("g", { class: "edges" }), lit: sv("g", { class: "lit" }), boxes: sv("g") };
world.append(...Object.values(layers));

let picture = { width: 1, height: 1, boxes: [], lines: [] };
let boxAt = new Map(); // place -> box
let drawnBoxes = new Map(); // place -> element
let drawnRegion = null; // what is in the document: {x0, y0, x1, y1, detail}

/** How much can be read at this zoom. */
const detailNow = () => (state.view.k < 0.2 ? "far" : state.view.k < 0.5 ? "mid" : "near");

function refreshDefs() {
  svg.replaceChildren(sv("defs", {}, hatchPattern(), arrowMarker()), world);
}

// -- view ---------------------------------------------------------------------------------------------------------------

let frameAsked = false;
function applyView() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(() => {
    frameAsked = false;
    const { x, y, k } = state.view;
    world.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${k.toFixed(4)})`);
    redraw(false);
  });
  emit("view");
}

function visibleRegion() {
  const { x, y, k } = state.view;
  const { clientWidth: w, clientHeight: h } = stage;
  return { x0: -x / k, y0: -y / k, x1: (w - x) / k, y1: (h - y) / k };
}

const touches = (box, r) => box.x < r.x1 && box.x + box.width > r.x0 && box.y < r.y1 && box.y + box.height > r.y0;

function lineBounds(line) {
  if (!line.bounds) {
    const xs = line.points.map((p) => p[0]), ys = line.points.map((p) => p[1]);
    const x = Math.min(...xs), y = Math.min(...ys);
    line.bounds = { x, y, width: Math.max(...xs) - x + 1, height: Math.max(...ys) - y + 1 };
  }
  return line.bounds;
}

/** Bring the document up to the view. Panning inside of what is drawn already costs nothing. */
function redraw(force) {
  const seen = visibleRegion();
  const detail = detailNow();
  const has = drawnRegion;
  if (!force && has && has.detail === detail && seen.x0 >= has.x0 && seen.y0 >= has.y0 && seen.x1 <= has.x1 && seen.y1 <= has.y1) return;
  const mx = (seen.x1 - seen.x0) * 0.6, my = (seen.y1 - seen.y0) * 0.6;
  const region = { x0: seen.x0 - mx, y0: seen.y0 - my, x1: seen.x1 + mx, y1: seen.y1 + my, detail };
  const keep = force || !has || has.detail !== detail ? new Map() : drawnBoxes;
  const next = new Map();
  const frames = [], boxes = [], headers = [];
  for (const box of picture.boxes) {
    if (!touches(box, region)) continue;
    const element = keep.get(box.place) || dressed(drawBox(box, detail), box.place);
    next.set(box.place, element);
    (box.frame ? frames : boxes).push(element);
    if (box.frame && detail !== "far") headers.push(drawHeader(box, detail));
  }
  layers.frames.replaceChildren(...frames);
  layers.boxes.replaceChildren(...boxes, ...headers);
  drawnBoxes = next;
  drawEdges(region, detail !== "near");
  drawnRegion = region;
  svg.classList.toggle("far", detail !== "near");
  svg.classList.toggle("heat", state.colour !== "group");
  drawLitEdges();
}

function drawEdges(region, together) {
  const shown = picture.lines.filter((line) => touches(lineBounds(line), region));
  if (together) { // one element for all of them
    layers.edges.replaceChildren(sv("path", { class: "edge", d: shown.map((line) => (line.path ||= linePath(line.points))).join("") }));
    return;
  }
  layers.edges.replaceChildren(...shown.map((line) => sv("path", {
    class: "edge", d: (line.path ||= linePath(line.points)), "marker-end": line.to === "out" ? null : "url(#arrow)",
  })));
}

function zoomAt(factor, cx = stage.clientWidth / 2, cy = stage.clientHeight / 2) {
  const v = state.view;
  const k = clamp(v.k * factor, 0.004, 4);
  v.x = cx - ((cx - v.x) * k) / v.k;
  v.y = cy - ((cy - v.y) * k) / v.k;
  v.k = k;
  applyView();
}

function fit() {
  const w = stage.clientWidth, h = stage.clientHeight, margin = 24;
  const k = clamp(Math.min((w - 2 * margin) / picture.width, (h - 2 * margin) / picture.height), 0.004, 1.2);
  state.view = { k, x: (w - picture.width * k) / 2, y: Math.max(margin, (h - picture.height * k) / 2) };
  applyView();
}

/** The first look: all of it if it can be read, else its top at a readable size. */
function firstView() {
  const w = stage.clientWidth, h = stage.clientHeight, margin = 20;
  const whole = Math.min((w - 2 * margin) / picture.width, (h - 2 * margin) / picture.height);
  if (whole >= 0.62) return fit();
  const k = clamp((w - 2 * margin) / picture.width, 0.5, 0.9);
  state.view = { k, x: (w - picture.width * k) / 2, y: margin };
  const start = boxAt.get(`n${nodes.findIndex((node) => node.kind === "placeholder")}`);
  if (start && picture.width * k > w) state.view.x = w / 2 - (start.x + start.width / 2) * k;
  applyView();
}

/** zoom: exactly this one; otherwise the one there is, if that can be read. */
function centre(place, zoom) {
  const box = boxAt.get(place);
  if (!box) return;
  const v = state.view;
  v.k = zoom || Math.max(v.k, 0.7);
  const tall = box.frame && box.height * v.k > stage.clientHeight;
  v.x = stage.clientWidth / 2 - (box.x + box.width / 2) * v.k;
  v.y = tall ? 40 - box.y * v.k : stage.clientHeight / 2 - (box.y + box.height / 2) * v.k;
  applyView();
}

function ensureVisible(place) {
  const box = boxAt.get(place);
  if (!box) return;
  const r = visibleRegion();
  if (state.view.k < 0.35 || box.x < r.x0 || box.y < r.y0 || box.x + box.width > r.x1 || box.y + box.height > r.y1) centre(place);
}

// -- layout and expansion -------------------------------------------------------------------------------------------------

/** Lay out again; `anchor`: a place that stays where it is on the screen. */
async function relayout(anchor) {
  const before = anchor && boxAt.get(anchor);
  byId("busy").hidden = false;
  let next;
  try {
    next = await layoutAll();
  } catch (error) {
    byId("busy").hidden = true;
    notify(`The layout failed: ${error && error.message ? error.message : error}`);
    return;
  }
  if (!next) return;
  byId("busy").hidden = true;
  picture = next;
  boxAt = new Map(picture.boxes.map((box) => [box.place, box]));
  const after = anchor && boxAt.get(anchor);
  if (before && after) {
    const v = state.view;
    v.x += (before.x + before.width / 2 - after.x - after.width / 2) * v.k;
    v.y += (before.y - after.y) * v.k;
  }
  drawnRegion = null;
  drawnBoxes = new Map();
  computeLit();
  applyView();
  emit("expansion");
}

function toggleModule(path, open = !state.expanded.has(path)) {
  if (open) state.expanded.add(path);
  else state.expanded.delete(path);
  say(`${path} ${open ? "opened" : "closed"}`);
  return relayout(`m:${path}`);
}

function expandAll() {
  modulePaths.forEach((path) => state.expanded.add(path));
  return relayout().then(() => fit());
}

function collapseAll() {
  state.expanded.clear();
  return relayout().then(() => fit());
}

/** Open what hides a node. */
async function reveal(place) {
  let changed = false;
  let module = place.startsWith("m:") ? modules.get(place.slice(2)).parent : homeOf[Number(place.slice(1))];
  for (; module && module.path; module = module.parent) {
    if (!state.expanded.has(module.path)) {
      state.expanded.add(module.path);
      changed = true;
    }
  }
  if (place.startsWith("n") && !isDrawn(Number(place.slice(1)))) {
    state.folded = false;
    byId("folded").checked = true;
    changed = true;
  }
  if (changed) await relayout();
  centre(place);
}

// -- highlights -------------------------------------------------------------------------------------------------------------

// place -> "member" | "tie" | "carrier": by the group that is hovered, or else selected
let lit = { group: null, roles: new Map() };

function litGroup() {
  if (state.hovered !== null) return state.hovered;
  const s = state.selected;
  if (!s) return null;
  if (s.kind === "group") return s.id;
  return null;
}

function computeLit() {
  const g = litGroup();
  const roleOf = new Map();
  if (g !== null) {
    nodes.forEach((node, i) => node.groups.includes(g) && placesOf(i).forEach((place) => roleOf.set(place, "carrier")));
    groups[g].ties.forEach((tie) => tie.node >= 0 && placesOf(tie.node).forEach((place) => roleOf.set(place, "tie")));
    groups[g].members.forEach((member) => member.nodes.forEach((i) => placesOf(i).forEach((place) => roleOf.set(place, "member"))));
    const at = groups[g].frozen && groups[g].frozen.node;
    if (at !== null && at >= 0) placesOf(at).forEach((place) => roleOf.has(place) || roleOf.set(place, "tie"));
  }
  lit = { group: g, roles: roleOf };
}

function selectedPlace() {
  const s = state.selected;
  if (!s || s.kind === "group") return null;
  return s.kind === "module" ? `m:${s.id}` : placesOf(s.id)[0] || null;
}

function dressed(element, place) {
  const role = lit.roles.get(place);
  for (const name of ["member", "tie", "carrier"]) element.classList.toggle(name, role === name);
  element.classList.toggle("selected", place === selectedPlace());
  element.classList.toggle("match", state.matches.has(place));
  const outline = element.firstChild;
  outline.style.stroke = role && role !== "carrier" && lit.group !== null ? groupColour(lit.group) : "";
  return element;
}

function dressAll() {
  computeLit();
  svg.classList.toggle("focus", lit.group !== null && lit.roles.size > 0);
  for (const [place, element] of drawnBoxes) dressed(element, place);
  drawLitEdges();
}

function drawLitEdges() {
  if (lit.group === null) return layers.lit.replaceChildren();
  const carrying = picture.lines.filter((line) => [...line.sources].some((source) => nodes[source].groups.includes(lit.group)));
  layers.lit.replaceChildren(sv("path", {
    class: "edge", d: carrying.map((line) => (line.path ||= linePath(line.points))).join(""), style: `stroke:${groupColour(lit.group)}`,
  }));
}

function hoverGroup(g) {
  if (state.hovered === g) return;
  state.hovered = g;
  dressAll();
}

function select(target, { move = false } = {}) {
  state.selected = target;
  if (target && target.kind === "node") say(describe(`n${target.id}`));
  if (target && target.kind === "module") say(describe(`m:${target.id}`));
  if (target && target.kind === "group") say(`group ${groups[target.id].name}`);
  dressAll();
  if (move && selectedPlace()) ensureVisible(selectedPlace());
  emit("selection");
}

const targetOf = (place) => (place.startsWith("m:") ? { kind: "module", id: place.slice(2) } : { kind: "node", id: Number(place.slice(1)) });

// -- pointer -------------------------------------------------------------------------------------------------------------------

const pointers = new Map();
let dragged = false;

const placeUnder = (event) => {
  const box = event.target.closest && event.target.closest("[data-place]");
  return box && svg.contains(box) ? box.dataset.place : null;
};

stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
  dragged = false;
});

stage.addEventListener("pointermove", (event) => {
  const from = pointers.get(event.pointerId);
  if (!from) return hovering(event);
  const dx = event.clientX - from[0], dy = event.clientY - from[1];
  if (!dragged && Math.abs(dx) + Math.abs(dy) < 4) return;
  if (!dragged) stage.setPointerCapture(event.pointerId);
  dragged = true;
  hideTip();
  if (pointers.size === 2) pinch(event);
  else {
    state.view.x += dx;
    state.view.y += dy;
    applyView();
  }
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
});

function pinch(event) {
  const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
  const from = pointers.get(event.pointerId);
  const before = Math.hypot(from[0] - other[0], from[1] - other[1]);
  const after = Math.hypot(event.clientX - other[0], event.clientY - other[1]);
  const edge = stage.getBoundingClientRect();
  if (before > 0) zoomAt(after / before, (event.clientX + other[0]) / 2 - edge.left, (event.clientY + other[1]) / 2 - edge.top);
}

const release = (event) => pointers.delete(event.pointerId);
stage.addEventListener("pointerup", release);
stage.addEventListener("pointercancel", release);

stage.addEventListener("click", (event) => {
  if (dragged) return;
  const place = placeUnder(event);
  svg.focus({ preventScroll: true });
  if (!place) return select(null);
  if (event.target.closest("[data-toggle]")) return toggleModule(place.slice(2));
  select(targetOf(place));
});

stage.addEventListener("dblclick", (event) => {
  const place = placeUnder(event);
  if (place && place.startsWith("m:")) toggleModule(place.slice(2));
});

stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const edge = stage.getBoundingClientRect();
  const unit = event.deltaMode === 1 ? 16 : 1;
  if (event.ctrlKey || !event.shiftKey) {
    zoomAt(Math.exp(-event.deltaY * unit * 0.0016), event.clientX - edge.left, event.clientY - edge.top);
  } else {
    state.view.x -= (event.deltaX || event.deltaY) * unit;
    applyView();
  }
}, { passive: false });

const tip = byId("tip");
function hovering(event) {
  const place = placeUnder(event);
  const box = place && boxAt.get(place);
  const framed = box && box.frame && !event.target.closest(".header");
  if (!place || framed) {
    hideTip();
    return hoverGroup(null);
  }
  const own = groupsOf(place);
  const main = place.startsWith("n") ? own[0] ?? frozenOf[Number(place.slice(1))][0] : undefined;
  hoverGroup(main === undefined ? null : main);
  tip.replaceChildren(...tipLines(place));
  tip.hidden = false;
  const edge = stage.getBoundingClientRect();
  const x = clamp(event.clientX - edge.left + 16, 4, edge.width - tip.offsetWidth - 4);
  const y = event.clientY - edge.top + 18;
  tip.style.left = `${x}px`;
  tip.style.top = `${y + tip.offsetHeight > edge.height ? y - tip.offsetHeight - 30 : y}px`;
}
function hideTip() {
  tip.hidden = true;
}
stage.addEventListener("pointerleave", () => {
  hideTip();
  hoverGroup(null);
});

function tipLines(place) {
  const words = wordsOf(place);
  const lines = [el("b", {}, place.startsWith("n") ? nodes[Number(place.slice(1))].path : place.slice(2)), el("span", { class: "dim" }, ` ${words.kind || ""}`)];
  const own = groupsOf(place);
  if (own.length === 1) lines.push(el("div", {}, chip(own[0]), ` ${openOf(own[0])} of ${groups[own[0]].size} open`));
  else if (own.length) lines.push(el("div", {}, `channels of ${own.length} groups`));
  const flops = sumOf(place, "flops") + sumOf(place, "uncounted"), params = sumOf(place, "params");
  if (flops || params) lines.push(el("div", { class: "dim" }, `${brief(flops)} FLOPs · ${brief(params)} parameters`));
  for (const one of isKept(place) ? keptReasons(place).slice(0, 3) : []) lines.push(el("div", { class: "reason" }, `kept: ${one.reason}`));
  return lines;
}

// -- keys --------------------------------------------------------------------------------------------------------------------------

function step(direction) {
  const here = selectedPlace();
  const drawn = picture.boxes.filter((box) => !box.frame);
  if (!drawn.length) return;
  if (!here || !boxAt.has(here)) {
    const first = drawn.reduce((a, b) => (b.y < a.y ? b : a));
    return select(targetOf(first.place), { move: true });
  }
  const box = boxAt.get(here);
  const linked = (from, to) => picture.lines.filter((line) => line[from] === here).map((line) => line[to]).filter((p) => boxAt.has(p));
  let options = direction === "down" ? linked("from", "to") : direction === "up" ? linked("to", "from") : [];
  options = options.map((place) => boxAt.get(place)).filter((other) => !other.frame);
  if (!options.length) {
    const middle = (b) => [b.x + b.width / 2, b.y + b.height / 2];
    const [hx, hy] = middle(box);
    options = drawn.filter((other) => {
      const [ox, oy] = middle(other);
      if (other === box) return false;
      if (direction === "down") return oy > hy + 4;
      if (direction === "up") return oy < hy - 4;
      return Math.abs(oy - hy) < Math.max(box.height, 60) && (direction === "left" ? ox < hx - 4 : ox > hx + 4);
    });
    options.sort((a, b) => {
      const [ax, ay] = middle(a), [bx, by] = middle(b);
      return Math.hypot(ax - hx, 2 * (ay - hy)) - Math.hypot(bx - hx, 2 * (by - hy));
    });
  }
  if (options.length) select(targetOf(options[0].place), { move: true });
}

svg.addEventListener("keydown", (event) => {
  const arrows = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };
  const direction = arrows[event.key];
  if (direction && event.shiftKey) {
    state.view.x += { left: 80, right: -80 }[direction] || 0;
    state.view.y += { up: 80, down: -80 }[direction] || 0;
    applyView();
  } else if (direction) step(direction);
  else if (event.key === "Enter" || event.key === " ") {
    if (state.selected && state.selected.kind === "module") toggleModule(state.selected.id);
    else if (state.selected && state.selected.kind === "node") emit("details");
  } else if (event.key === "Backspace" && selectedPlace()) {
    const s = state.selected;
    const home = s.kind === "module" ? modules.get(s.id).parent : homeOf[s.id];
    if (home && home.path) {
      select({ kind: "module", id: home.path });
      toggleModule(home.path, false);
    }
  } else return;
  event.preventDefault();
});
