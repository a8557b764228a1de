// The picture on the screen: the view, and only as much of the graph in the document as it shows.

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
