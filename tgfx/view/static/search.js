// Search by name or operator over nodes, modules and groups.

const searchBox = byId("search");
const resultList = byId("results");
let results = [];
let cursorAt = -1;

function searchAll(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const fits = (...texts) => {
    const all = texts.join(" ").toLowerCase();
    return words.every((word) => all.includes(word));
  };
  const found = [];
  for (const module of modules.values()) {
    if (module.path && fits(module.path, module.type)) found.push({ kind: "module", id: module.path, name: module.path, more: module.type });
  }
  nodes.forEach((node, i) => {
    if (fits(node.path, node.name, node.op)) found.push({ kind: "node", id: i, name: node.path, more: node.op });
  });
  groups.forEach((group, g) => {
    if (fits(group.name, "group")) found.push({ kind: "group", id: g, name: group.name, more: "group" });
  });
  const first = (one) => (one.name.toLowerCase().startsWith(words[0]) ? 0 : 1);
  return found.sort((a, b) => first(a) - first(b) || a.name.length - b.name.length);
}

function drawResults() {
  const shown = results.slice(0, 60);
  resultList.replaceChildren(...shown.map((one, k) => el("li", {
    role: "option", id: `result-${k}`, "aria-selected": String(k === cursorAt), onpointerdown: (event) => { event.preventDefault(); choose(k); },
  }, el("span", { class: `mark ${one.kind}` }), el("span", { class: "name" }, one.name), el("span", { class: "dim" }, one.more))));
  if (searchBox.value && !shown.length) resultList.append(el("li", { class: "dim nothing" }, "nothing found"));
  if (results.length > shown.length) resultList.append(el("li", { class: "dim nothing" }, `and ${results.length - shown.length} more`));
  const open = document.activeElement === searchBox && Boolean(searchBox.value);
  resultList.hidden = !open;
  searchBox.setAttribute("aria-expanded", String(open));
  searchBox.setAttribute("aria-activedescendant", cursorAt >= 0 ? `result-${cursorAt}` : "");
  const chosen = byId(`result-${cursorAt}`);
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
}

function markMatches() {
  state.matches = new Set(results.flatMap((one) => (one.kind === "node" ? placesOf(one.id) : one.kind === "module" ? [`m:${one.id}`] : [])));
  for (const [place, element] of drawnBoxes) element.classList.toggle("match", state.matches.has(place));
}

function search() {
  results = searchAll(searchBox.value);
  cursorAt = results.length ? 0 : -1;
  markMatches();
  drawResults();
  say(searchBox.value ? `${results.length} results` : "");
}

async function choose(k) {
  const one = results[k];
  if (!one) return;
  cursorAt = k;
  resultList.hidden = true;
  searchBox.setAttribute("aria-expanded", "false");
  if (one.kind === "group") return showGroup(one.id);
  await reveal(one.kind === "module" ? `m:${one.id}` : `n${one.id}`);
  select({ kind: one.kind, id: one.id });
}

function clearSearch() {
  searchBox.value = "";
  search();
}

searchBox.addEventListener("input", search);
searchBox.addEventListener("focus", drawResults);
searchBox.addEventListener("blur", () => setTimeout(drawResults, 0));
searchBox.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const count = Math.min(results.length, 60);
    if (count) cursorAt = (cursorAt + (event.key === "ArrowDown" ? 1 : -1) + count) % count;
    drawResults();
  } else if (event.key === "Enter") choose(cursorAt);
  else return;
  event.preventDefault();
  event.stopPropagation();
});
on("expansion", markMatches);
