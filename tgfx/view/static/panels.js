// The side panel.

const TABS = [
  ["overview", "Overview"], ["groups", "Groups"], ["cost", "Price"], ["channels", "Channels"],
  ["training", "Training"], ["compare", "Compare"], ["details", "Details"],
];
const isThere = {
  training: () => Boolean(data.history) || data.live,
  compare: () => Boolean(data.comparison),
};
const visibleTabs = () => TABS.filter(([id]) => !isThere[id] || isThere[id]());

function chip(g, text) {
  return el("button", {
    type: "button", class: `chip${groups[g].frozen ? " frozen" : ""}`, "data-group": g, title: groups[g].name,
    onclick: (event) => {
      event.stopPropagation();
      showGroup(g);
    },
    onpointerenter: () => hoverGroup(g), onpointerleave: () => hoverGroup(null),
    onfocus: () => hoverGroup(g), onblur: () => hoverGroup(null),
  }, el("span", { class: "dot", style: groups[g].frozen ? "" : `background:${groupColour(g)}` }), text || groups[g].name);
}

function nodeLink(i, text) {
  return el("button", { type: "button", class: "link", onclick: () => goTo(i) }, text || nodes[i].path);
}

async function goTo(i) {
  await reveal(`n${i}`);
  select({ kind: "node", id: i });
}

function showGroup(g) {
  select({ kind: "group", id: g });
  const first = groups[g].members.flatMap((member) => member.nodes).flatMap((i) => placesOf(i))[0];
  if (first) ensureVisible(first);
}

function lineOf(line) {
  if (!line) return null;
  return el("div", { class: "source" }, el("span", { class: "place" }, line.place), line.code ? el("code", {}, line.code) : null);
}

const section = (title, ...children) => el("section", {}, el("h2", {}, title), ...children);
const empty = (text) => el("p", { class: "dim" }, text);

const PANELS = { overview: overviewPanel, groups: groupsPanel, cost: costPanel, channels: channelsPanel, training: trainingPanel, compare: comparePanel, details: detailsPanel };

function drawTabs() {
  const tabs = visibleTabs();
  if (!tabs.some(([id]) => id === state.tab)) state.tab = "overview";
  byId("tabs").replaceChildren(...tabs.map(([id, title]) => el("button", {
    type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel", "aria-selected": String(id === state.tab), tabindex: id === state.tab ? 0 : -1,
    onclick: () => openTab(id),
    onkeydown: (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const at = tabs.findIndex(([own]) => own === id);
      openTab(tabs[(at + move + tabs.length) % tabs.length][0]);
      byId(`tab-${state.tab}`).focus();
      event.preventDefault();
    },
  }, title)));
}

function drawPanel() {
  const panel = byId("panel");
  const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.group : undefined;
  const { scrollTop } = panel;
  panel.setAttribute("aria-labelledby", `tab-${state.tab}`);
  panel.replaceChildren(...PANELS[state.tab]().flat(Infinity).filter(Boolean));
  panel.scrollTop = scrollTop;
  const again = focused === undefined ? null : panel.querySelector(`.chip[data-group="${focused}"]`);
  if (again) again.focus({ preventScroll: true });
}

function openTab(id) {
  state.tab = id;
  drawTabs();
  drawPanel();
  byId("panel").scrollTop = 0;
  emit("view");
}

on("selection", () => {
  const stays = !state.selected || (state.selected.kind === "group" && (state.tab === "groups" || state.tab === "training"));
  if (stays) {
    drawPanel();
    emit("view");
  } else openTab("details");
});
on("details", () => {
  openTab("details");
  byId("panel").focus();
});
