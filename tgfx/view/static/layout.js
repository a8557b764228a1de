// Layout by ELK (layered), module by module from the inside out: an open module is laid out once and then is a box of
// fixed size in the one around it. So opening one module never lays out the others again.

const FONT = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const PAD = { head: 40, side: 18, foot: 20, gateway: 10 }; // a gateway brings a layer's distance of its own
const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// -- the engine ----------------------------------------------------------------------------------------------------------

let engine = null;

async function engineCode() {
  const packed = Uint8Array.from(atob(byId("elk").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** A worker, or where the browser gives none, the same code on this thread. */
async function startEngine() {
  const url = URL.createObjectURL(new Blob([await engineCode()], { type: "text/javascript" }));
  try {
    const worker = new Worker(url);
    await call(worker, { cmd: "register", algorithms: ["layered"] });
    return worker;
  } catch {
    window.exports = {};
    window.module = { exports: window.exports }; // where the code puts its stand-in for a worker
    await new Promise((done, fail) => document.head.append(el("script", { src: url, onload: done, onerror: fail })));
    const Local = window.module.exports.Worker;
    delete window.module;
    delete window.exports;
    const worker = new Local();
    await call(worker, { cmd: "register", algorithms: ["layered"] });
    return worker;
  }
}

let calls = 0;
const waiting = new Map();

function call(worker, message) {
  const id = calls++;
  return new Promise((done, fail) => {
    waiting.set(id, [done, fail]);
    worker.onmessage = (event) => {
      const pending = waiting.get(event.data.id);
      waiting.delete(event.data.id);
      if (pending) event.data.error ? pending[1](event.data.error) : pending[0](event.data.data);
    };
    worker.onerror = (event) => {
      if (event.preventDefault) event.preventDefault();
      for (const [, pending] of waiting) pending[1](event.message || "the layout engine stopped");
      waiting.clear();
    };
    worker.postMessage({ id, ...message });
  });
}

// -- sizes -----------------------------------------------------------------------------------------------------------------

const TITLE_FONT = `600 13px ${FONT}`;
const LINE_FONT = `11px ${FONT}`;

function wordsOf(place) {
  if (place.startsWith("m:")) {
    const module = modules.get(place.slice(2));
    const count = module.leaves.filter((i) => !roles[i]).length;
    return { title: module.label, kind: module.type, line: `${count} operation${count === 1 ? "" : "s"}` };
  }
  const i = Number(place.slice(1));
  const node = nodes[i];
  const title = titleOf(i);
  const kind = title === node.op ? "" : node.op;
  return { title, kind, line: shapeText(node.shape) };
}

const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

function sizeOf(place) {
  const words = wordsOf(place);
  const first = textWidth(shorten(words.title, 34), TITLE_FONT) + (words.kind ? textWidth("  " + shorten(words.kind, 28), LINE_FONT) : 0);
  // room for "before → after": sizes shrink while one watches, boxes should not
  const second = textWidth(words.line, LINE_FONT) * (place.startsWith("n") && groupsOf(place).length ? 2.1 : 1) + 12;
  const isModule = place.startsWith("m:");
  return { width: Math.ceil(Math.max(first + (isModule ? 26 : 0), second, isModule ? 172 : 92) + 34), height: isModule ? 54 : 48 };
}

// -- one level ---------------------------------------------------------------------------------------------------------------

const levelCache = new Map();
const OPTIONS = {
  "elk.algorithm": "layered",
  "elk.direction": "DOWN",
  "elk.edgeRouting": "ORTHOGONAL",
  "elk.layered.mergeEdges": "true",
  "elk.layered.nodePlacement.strategy": "BRANDES_KOEPF",
  "elk.layered.nodePlacement.bk.fixedAlignment": "BALANCED",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
  "elk.layered.spacing.nodeNodeBetweenLayers": "34",
  "elk.layered.spacing.edgeNodeBetweenLayers": "14",
  "elk.spacing.nodeNode": "30",
  "elk.spacing.edgeNode": "16",
  "elk.spacing.edgeEdge": "8",
  "elk.padding": "[top=0,left=0,bottom=0,right=0]",
};

// a dense block joins each of its layers with all later ones: what is best there would take seconds to find
const DENSE = 100;
const QUICK = {
  "elk.layered.thoroughness": "1",
  "elk.layered.nodePlacement.strategy": "SIMPLE",
  "elk.layered.crossingMinimization.greedySwitch.type": "OFF",
};

/** Drawn children of an open module, and the edges between them ("in" and "out" stand for the world outside). */
function levelOf(module) {
  const inside = new Map(); // leaf -> child of this module that it is in
  const children = [];
  for (const child of module.children) {
    if (typeof child === "number") {
      if (!isDrawn(child)) continue;
      children.push(`n${child}`);
      inside.set(child, `n${child}`);
    } else {
      const own = child.leaves.filter(isDrawn);
      if (!own.length) continue;
      children.push(`m:${child.path}`);
      own.forEach((i) => inside.set(i, `m:${child.path}`));
    }
  }
  const edges = new Map();
  const connect = (from, to, source) => {
    if (from === to) return;
    const key = `${from}>${to}`;
    if (!edges.has(key)) edges.set(key, { from, to, sources: new Set() });
    edges.get(key).sources.add(source);
  };
  for (const [i, place] of inside) {
    for (const source of nodes[i].inputs) if (isDrawn(source)) connect(inside.get(source) || "in", place, source);
    if (module.path) for (const user of consumers[i]) if (isDrawn(user) && !inside.has(user)) connect(place, "out", i);
  }
  return { children, edges: [...edges.values()] };
}

const arrangements = new Map();

/** ELK's answer; the blocks of a network are mostly alike, and what is alike is asked for once. */
async function arranged(graph) {
  const number = new Map(graph.children.map((child, i) => [child.id, i]));
  const key = JSON.stringify([
    graph.layoutOptions,
    graph.children.map((child) => [child.width, child.height, child.layoutOptions]),
    graph.edges.map((edge) => [number.get(edge.sources[0]), number.get(edge.targets[0])]),
  ]);
  if (!arrangements.has(key)) arrangements.set(key, call(engine, { cmd: "layout", graph }));
  const found = await arrangements.get(key);
  return {
    width: found.width,
    height: found.height,
    children: found.children.map((child, i) => ({ id: graph.children[i].id, x: child.x, y: child.y })),
    edges: found.edges.map((edge, k) => ({ id: graph.edges[k].id, sections: edge.sections })),
  };
}

async function layLevel(module) {
  const level = levelOf(module);
  const parts = new Map();
  for (const place of level.children) {
    const path = place.startsWith("m:") ? place.slice(2) : null;
    parts.set(place, path !== null && state.expanded.has(path) ? await laidOut(modules.get(path)) : sizeOf(place));
  }
  const children = level.children.map((place) => ({
    id: place, width: parts.get(place).width, height: parts.get(place).height,
  }));
  const gateway = (id, constraint) => ({
    id, width: 2, height: 2, layoutOptions: { "elk.layered.layering.layerConstraint": constraint },
  });
  const entered = level.edges.some((edge) => edge.from === "in"), exited = level.edges.some((edge) => edge.to === "out");
  if (entered) children.unshift(gateway("in", "FIRST_SEPARATE"));
  if (exited) children.push(gateway("out", "LAST_SEPARATE"));
  const graph = {
    id: "level",
    layoutOptions: level.edges.length > DENSE ? { ...OPTIONS, ...QUICK } : OPTIONS,
    children,
    edges: level.edges.map((edge, k) => ({ id: `e${k}`, sources: [edge.from], targets: [edge.to] })),
  };
  const done = children.length ? await arranged(graph) : { width: 0, height: 0, children: [], edges: [] };
  const frame = module.path
    ? { top: entered ? PAD.gateway : PAD.head, side: PAD.side, bottom: exited ? 0 : PAD.foot }
    : { top: 0, side: 0, bottom: 0 };
  const header = module.path ? textWidth(`${module.label}  ${module.type}`, TITLE_FONT) + 76 : 0;
  const width = Math.max(done.width + 2 * frame.side, header);
  const left = (width - done.width) / 2;
  const result = { width, height: done.height + frame.top + frame.bottom, boxes: [], lines: [] };
  for (const child of done.children) {
    if (child.id === "in" || child.id === "out") continue;
    result.boxes.push({ place: child.id, x: child.x + left, y: child.y + frame.top, part: parts.get(child.id) });
  }
  for (const edge of done.edges) {
    const { from, to, sources } = level.edges[Number(edge.id.slice(1))];
    const section = edge.sections[0];
    const points = [section.startPoint, ...(section.bendPoints || []), section.endPoint];
    const line = points.map((point) => [point.x + left, point.y + frame.top]);
    // what comes from outside enters at the middle of the frame, where the outer edge ends
    if (from === "in") line.unshift([width / 2, 0], [width / 2, line[0][1]]);
    if (to === "out") line.push([width / 2, line[line.length - 1][1]], [width / 2, result.height]);
    result.lines.push({ points: line, sources, from, to });
  }
  return result;
}

function laidOut(module) {
  const open = modulePaths.filter((path) => state.expanded.has(path) && (!module.path || path.startsWith(module.path + ".")));
  const key = JSON.stringify([module.path, state.folded, open]);
  if (!levelCache.has(key)) levelCache.set(key, layLevel(module));
  return levelCache.get(key);
}

// -- the whole picture ----------------------------------------------------------------------------------------------------------

let layoutRun = 0;

/** {width, height, boxes: [{place, x, y, width, height, frame}], lines: [{points, sources, box}]}, or null if overtaken. */
async function layoutAll() {
  const run = ++layoutRun;
  if (!engine) engine = startEngine();
  engine = await engine;
  const top = await laidOut(tree);
  if (run !== layoutRun) return null;
  const picture = { width: top.width, height: top.height, boxes: [], lines: [] };
  (function place(level, x, y) {
    for (const line of level.lines) {
      const points = line.points.map(([px, py]) => [px + x, py + y]);
      picture.lines.push({ points, sources: line.sources, from: line.from, to: line.to });
    }
    for (const box of level.boxes) {
      const { width, height } = box.part;
      const frame = Boolean(box.part.boxes);
      picture.boxes.push({ place: box.place, x: box.x + x, y: box.y + y, width, height, frame });
      if (frame) place(box.part, box.x + x, box.y + y);
    }
  })(top, 0, 0);
  return picture;
}
