// Modules that open and close.

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
