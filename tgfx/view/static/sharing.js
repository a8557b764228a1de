// The view in the address, and the picture for other documents.

// -- the address ------------------------------------------------------------------------------------------------------

function fragment() {
  const out = new URLSearchParams();
  const { x, y, k } = state.view;
  out.set("v", [Math.round(x), Math.round(y), k.toFixed(3)].join(","));
  out.set("o", modulePaths.flatMap((path, i) => (state.expanded.has(path) ? [i.toString(36)] : [])).join("."));
  const s = state.selected;
  if (s) out.set("s", s.kind === "module" ? `m${modulePaths.indexOf(s.id)}` : `${s.kind[0]}${s.id}`);
  if (state.colour !== "group") out.set("c", state.colour);
  if (state.tab !== "overview") out.set("t", state.tab);
  if (!state.folded) out.set("f", "0");
  if (state.sort.key !== "order") out.set("r", `${state.sort.key}${state.sort.down ? "-" : ""}`);
  out.set("th", document.documentElement.dataset.theme);
  return out.toString();
}

let addressTimer = 0;
function keepAddress() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    try {
      history.replaceState(null, "", `#${fragment()}`);
    } catch {
      // a frame without an address of its own (a notebook): there is nothing to share
    }
  }, 250);
}
for (const event of ["view", "selection", "expansion"]) on(event, keepAddress);

/** Put the state of an address in place; whether it said where to look. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (["light", "dark"].includes(given.get("th"))) document.documentElement.dataset.theme = given.get("th");
  if (["flops", "params", "kept"].includes(given.get("c"))) state.colour = given.get("c");
  if (TABS.some(([id]) => id === given.get("t"))) state.tab = given.get("t");
  if (given.get("f") === "0") state.folded = false;
  const sort = given.get("r");
  if (sort) state.sort = { key: sort.replace("-", ""), down: sort.endsWith("-") };
  if (given.has("o")) {
    const open = given.get("o").split(".").filter(Boolean).map((text) => modulePaths[parseInt(text, 36)]);
    state.expanded = new Set(open.filter(Boolean));
  }
  const s = /^([nmg])(\d+)$/.exec(given.get("s") || "");
  if (s) {
    const id = Number(s[2]);
    if (s[1] === "n" && nodes[id]) state.selected = { kind: "node", id };
    if (s[1] === "g" && groups[id]) state.selected = { kind: "group", id };
    if (s[1] === "m" && modulePaths[id]) state.selected = { kind: "module", id: modulePaths[id] };
  }
  const v = (given.get("v") || "").split(",").map(Number);
  if (v.length === 3 && v.every(Number.isFinite) && v[2] > 0) {
    state.view = { x: v[0], y: v[1], k: clamp(v[2], 0.004, 4) };
    return true;
  }
  return false;
}

// -- pictures ------------------------------------------------------------------------------------------------------------

const PICTURE_RULES = () => `
  text { font-family: ${FONT}; fill: ${themeValue("--text")}; }
  .title, .name { font-size: 13px; font-weight: 600; }
  .kind { font-size: 11px; font-weight: 400; fill: ${themeValue("--muted")}; }
  .line { font-size: 11px; fill: ${themeValue("--muted")}; }
  .outline { stroke: ${themeValue("--line")}; stroke-width: 1; }
  .frame > .outline { fill: ${themeValue("--frame")}; }
  .module > .outline { stroke-width: 2; }
  .grip, .toggle rect { fill: none; }
  .toggle path { stroke: ${themeValue("--muted")}; stroke-width: 1.6; }
  .track { fill: ${themeValue("--track")}; }
  .edge { fill: none; stroke: ${themeValue("--edge")}; stroke-width: 1.3; }
  .lit .edge { stroke-width: 2.6; }
  .member > .outline, .tie > .outline { stroke-width: 2.5; }
  .tie > .outline { stroke-dasharray: 5 3; }
  .gone { opacity: .35; }
`;

/** The whole graph as it is now, also what is off the screen, with no need of a style sheet. */
function wholePicture() {
  const margin = 20;
  const width = picture.width + 2 * margin, height = picture.height + 2 * margin;
  const out = sv("svg", { xmlns: SVG, width: width.toFixed(0), height: height.toFixed(0), viewBox: `${-margin} ${-margin} ${width} ${height}` });
  out.append(sv("title", {}, data.name), sv("style", {}, PICTURE_RULES()), sv("defs", {}, hatchPattern(), arrowMarker()));
  out.append(sv("rect", { x: -margin, y: -margin, width, height, fill: themeValue("--canvas") }));
  const boxes = picture.boxes.map((box) => [box, dressed(drawBox(box, "near"), box.place)]);
  out.append(sv("g", {}, boxes.filter(([box]) => box.frame).map(([, element]) => element)));
  out.append(sv("g", {}, picture.lines.map((line) => sv("path", { class: "edge", d: linePath(line.points), "marker-end": line.to === "out" ? null : "url(#arrow)" }))));
  out.append(layers.lit.cloneNode(true));
  out.append(sv("g", {}, boxes.map(([box, element]) => (box.frame ? drawHeader(box, "near") : element))));
  return { text: new XMLSerializer().serializeToString(out), width, height };
}

async function copySvg() {
  const { text } = wholePicture();
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or no secure context
    const area = el("textarea", { class: "aside", "aria-hidden": "true" }, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) return notify("The browser does not allow copying here; Save PNG works.");
  }
  notify(`Copied as SVG, ${brief(text.length)} characters.`);
}

const MOST_PIXELS = 8192;

async function savePng() {
  const { text, width, height } = wholePicture();
  const scale = Math.min(2, MOST_PIXELS / width, MOST_PIXELS / height);
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = el("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) return notify("The picture is too large for this browser; Copy as SVG works.");
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: `${data.name.replace(/[^\w.-]+/g, "_") || "graph"}.png` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  notify(`Saved as PNG, ${canvas.width} × ${canvas.height}.`);
}
