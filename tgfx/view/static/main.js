// Start, toolbar, and keys that work everywhere.

function applyColour() {
  byId("colour").value = state.colour;
  drawnRegion = null;
  redraw(true);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
  refreshDefs();
  drawnRegion = null;
  redraw(true);
  dressAll();
  drawPanel();
  emit("view");
}

function toggleHelp(open = byId("help").hidden) {
  byId("help").hidden = !open;
  if (open) byId("help-close").focus();
  else svg.focus();
}

byId("colour").addEventListener("change", (event) => {
  state.colour = event.target.value;
  applyColour();
  emit("view");
});
byId("folded").addEventListener("change", (event) => {
  state.folded = !event.target.checked;
  relayout();
});
byId("zoom-in").addEventListener("click", () => zoomAt(1.3));
byId("zoom-out").addEventListener("click", () => zoomAt(1 / 1.3));
byId("fit").addEventListener("click", fit);
byId("expand").addEventListener("click", expandAll);
byId("collapse").addEventListener("click", collapseAll);
byId("copy").addEventListener("click", copySvg);
byId("png").addEventListener("click", savePng);
byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
byId("help-open").addEventListener("click", () => toggleHelp(true));
byId("help-close").addEventListener("click", () => toggleHelp(false));

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (!byId("help").hidden) return toggleHelp(false);
    hideTip();
    clearSearch();
    select(null);
    svg.focus();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "/": () => { searchBox.focus(); searchBox.select(); },
    "?": () => toggleHelp(),
    f: fit, "+": () => zoomAt(1.3), "=": () => zoomAt(1.3), "-": () => zoomAt(1 / 1.3),
    e: expandAll, c: collapseAll, t: () => setTheme(isDark() ? "light" : "dark"), g: () => svg.focus(),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

new ResizeObserver(() => applyView()).observe(stage);

async function start() {
  const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = wanted;
  byId("name").textContent = data.name;
  byId("count").textContent = `${whole(nodes.length - foldable)} operations, ${whole(gatedGroups.length)} groups`;
  byId("folded-count").textContent = whole(foldable);
  byId("folded-label").hidden = !foldable;
  state.expanded = defaultExpansion(90);
  const placed = readAddress();
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  byId("folded").checked = !state.folded;
  byId("colour").value = state.colour;
  refreshDefs();
  drawTabs();
  drawPanel();
  await relayout();
  if (!placed) firstView();
  dressAll();
  startLive();
  requestAnimationFrame(() => requestAnimationFrame(() => {
    performance.mark("tgfx-painted");
    document.documentElement.dataset.ready = "true";
  }));
}

window.tgfxView = { data, state, fragment, wholePicture, expandAll, collapseAll, fit, relayout, zoomAt, centre, select, drawn: () => drawnBoxes.size };
start();
