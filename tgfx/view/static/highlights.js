// What is lit: the members of a group, what ties them, what carries their channels; and the selection.

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
