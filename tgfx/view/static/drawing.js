// Boxes and edges as SVG. Colours are concrete values, so that the same elements make the copied picture.

/** An orthogonal line with rounded corners. */
function linePath(points, radius = 7) {
  const kept = points.filter((p, i) => !i || Math.abs(p[0] - points[i - 1][0]) + Math.abs(p[1] - points[i - 1][1]) > 0.4);
  let path = `M${kept[0][0].toFixed(1)} ${kept[0][1].toFixed(1)}`;
  for (let i = 1; i < kept.length; i++) {
    const [x, y] = kept[i];
    const next = kept[i + 1];
    if (!next) {
      path += `L${x.toFixed(1)} ${y.toFixed(1)}`;
      continue;
    }
    const [px, py] = kept[i - 1];
    const before = Math.hypot(x - px, y - py);
    const after = Math.hypot(next[0] - x, next[1] - y);
    const r = Math.min(radius, before / 2, after / 2);
    const ax = x - ((x - px) / before) * r, ay = y - ((y - py) / before) * r;
    const bx = x + ((next[0] - x) / after) * r, by = y + ((next[1] - y) / after) * r;
    path += `L${ax.toFixed(1)} ${ay.toFixed(1)}Q${x.toFixed(1)} ${y.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`;
  }
  return path;
}

const heatMost = {};
function heatShare(place) {
  if (state.colour === "kept") return keptShare(place);
  const kind = state.colour;
  const most = (heatMost[kind] ||= Math.max(1, ...nodes.map((node) => node[kind] + (kind === "flops" ? node.uncounted : 0))));
  const value = sumOf(place, kind) + (kind === "flops" ? sumOf(place, "uncounted") : 0);
  return Math.sqrt(value / most);
}

function fillOf(place, detail) {
  if (state.colour === "group") {
    const own = groupsOf(place);
    if (!own.length || !place.startsWith("n")) return themeValue("--node");
    return detail === "far" ? groupColour(own[0]) : groupTint(own[0]); // nothing is to be read on it from afar
  }
  const share = heatShare(place);
  if (share === null || (share === 0 && state.colour !== "kept")) return themeValue("--node");
  return state.colour === "kept" ? keptColour(share) : heatColour(share);
}

/** The second line: the shape, or the figure that the colours stand for. */
function figureOf(place) {
  if (state.colour === "flops" || state.colour === "params") {
    const value = sumOf(place, state.colour) + (state.colour === "flops" ? sumOf(place, "uncounted") : 0);
    return value ? `${brief(value)} ${state.colour === "flops" ? "FLOPs" : "params"} · ${percent(value / now().totals[state.colour === "flops" ? "flops_all" : "params"])}` : "–";
  }
  if (state.colour === "kept") {
    const share = keptShare(place);
    return share === null ? "–" : `${percent(share)} of channels kept`;
  }
  if (place.startsWith("m:")) {
    const flops = sumOf(place, "flops") + sumOf(place, "uncounted");
    const all = now().totals.flops_all;
    return wordsOf(place).line + (flops ? ` · ${percent(flops / all)} of FLOPs` : "");
  }
  const i = Number(place.slice(1));
  if (goneNow().has(i)) return `${shapeText(nodes[i].shape)} → gone`;
  const after = now().nodes.shape[i];
  const before = shapeText(nodes[i].shape);
  return after && !sameShape(after, nodes[i].shape) ? `${before} → ${shapeText(after)}` : before;
}

function describe(place) {
  const words = wordsOf(place);
  const parts = [words.title, words.kind, figureOf(place)];
  const own = groupsOf(place);
  if (own.length) parts.push(own.length === 1 ? `group ${groups[own[0]].name}, ${openOf(own[0])} of ${groups[own[0]].size} open` : `${own.length} groups`);
  if (isKept(place)) keptReasons(place).forEach((one) => parts.push(`kept: ${one.reason}`));
  return parts.filter(Boolean).join(", ");
}

/** detail: "near" has everything, "mid" large names only, "far" nothing that would have to be read. */
function drawBox(box, detail) {
  const { place, width, height } = box;
  const isModule = place.startsWith("m:");
  const gone = !isModule && goneNow().has(Number(place.slice(1)));
  const g = sv("g", {
    class: `box ${box.frame ? "frame" : isModule ? "module" : "node"}${gone ? " gone" : ""}`,
    transform: `translate(${box.x.toFixed(1)} ${box.y.toFixed(1)})`,
    "data-place": place,
    role: "img",
    "aria-label": describe(place),
  });
  if (box.frame) {
    g.append(sv("rect", { class: "outline", width, height, rx: 10 }));
    return g;
  }
  g.append(sv("rect", { class: "outline", width, height, rx: 6, fill: fillOf(place, detail) }));
  if (isKept(place)) g.append(sv("rect", { class: "hatch", width, height, rx: 6, fill: "url(#hatch)" }));
  if (detail === "far") return g;
  const own = groupsOf(place);
  const shown = own.slice(0, 8);
  shown.forEach((group, k) => g.append(sv("rect", {
    class: "stripe", x: 0, y: 3 + ((height - 6) / shown.length) * k, width: 5, height: (height - 6) / shown.length, fill: groupColour(group),
  })));
  const words = wordsOf(place);
  if (detail === "mid") {
    g.append(sv("text", { class: "name", x: 14, y: height / 2 + 8 }, fitText(words.title, width - 22)));
    return g;
  }
  const title = sv("text", { class: "title", x: 14, y: 20 }, shorten(words.title, 34));
  if (words.kind) title.append(sv("tspan", { class: "kind", dx: 7 }, shorten(words.kind, 28)));
  g.append(title, sv("text", { class: "line", x: 14, y: 36 }, shorten(figureOf(place), 60)));
  if (isModule) g.append(toggleSign(width - 24, 8, false));
  const share = keptShare(place);
  if (share !== null && (!isModule || share < 1)) {
    const span = width - 26;
    g.append(sv("rect", { class: "track", x: 14, y: height - 6, width: span, height: 3, rx: 1.5 }));
    g.append(sv("rect", { class: "kept", x: 14, y: height - 6, width: span * share, height: 3, rx: 1.5, fill: own.length === 1 ? groupColour(own[0]) : themeValue("--accent") }));
  }
  return g;
}

/** The head of an open module. It lies above the edges: one of them always enters through it. */
function drawHeader(box, detail) {
  const words = wordsOf(box.place);
  const name = shorten(words.title, 60), kind = shorten(words.kind, 40);
  const title = sv("text", { class: "title", x: 34, y: 22 }, name);
  if (kind) title.append(sv("tspan", { class: "kind", dx: 7 }, kind));
  if (detail === "mid") {
    return sv("g", { class: "header box", transform: `translate(${box.x.toFixed(1)} ${box.y.toFixed(1)})`, "data-place": box.place },
      sv("text", { class: "name", x: 12, y: 27 }, fitText(words.title, box.width - 20)));
  }
  const plate = textWidth(name, TITLE_FONT) + (kind ? textWidth(kind, LINE_FONT) + 7 : 0) + 36;
  return sv("g", { class: "header", transform: `translate(${box.x.toFixed(1)} ${box.y.toFixed(1)})`, "data-place": box.place },
    sv("rect", { class: "grip", width: box.width, height: 32, rx: 10 }),
    sv("rect", { class: "plate", x: 6, y: 4, width: plate, height: 26, rx: 6, fill: themeValue("--canvas") }),
    toggleSign(12, 9, true), title);
}

/** What of a large name fits. */
function fitText(text, width) {
  const font = `600 22px ${FONT}`;
  if (textWidth(text, font) <= width) return text;
  let length = text.length;
  while (length > 1 && textWidth(text.slice(0, length) + "…", font) > width) length--;
  return text.slice(0, length) + "…";
}

function toggleSign(x, y, open) {
  const sign = sv("g", { class: "toggle", transform: `translate(${x} ${y})`, "data-toggle": true });
  sign.append(sv("rect", { width: 16, height: 16, rx: 4 }), sv("path", { d: open ? "M4 8H12" : "M4 8H12M8 4V12" }));
  return sign;
}

function hatchPattern() {
  return sv("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    sv("rect", { width: 2, height: 7, fill: themeValue("--hatch") }));
}

function arrowMarker() {
  return sv("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
    sv("path", { d: "M0 0.5L8 4L0 7.5Z", fill: themeValue("--edge") }));
}
