// The table of groups.

const COLUMNS = [
  ["name", "group", (g) => groups[g].name],
  ["open", "open", (g) => openOf(g)],
  ["size", "size", (g) => groups[g].size],
  ["share", "kept", (g) => shareOf(g)],
  ["flops", "FLOPs/gate", (g) => ((now().groups[g].marginal || {}).flops || [0])[0]],
];

function groupsPanel() {
  const { key, down } = state.sort;
  const column = COLUMNS.find(([id]) => id === key);
  const order = groups.map((_, g) => g);
  if (column) {
    const value = column[2];
    order.sort((a, b) => {
      const x = value(a), y = value(b);
      return (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y) * (down ? -1 : 1) || a - b;
    });
  }
  const head = el("tr", {}, COLUMNS.map(([id, title]) => el("th", {
    scope: "col", "aria-sort": key === id ? (down ? "descending" : "ascending") : "none", class: id === "name" ? "" : "number",
  }, el("button", { type: "button", "data-sort": id, onclick: () => sortBy(id) }, title, key === id ? (down ? " ▾" : " ▴") : ""))));
  const rows = order.flatMap((g) => {
    const group = groups[g];
    const chosen = state.selected && state.selected.kind === "group" && state.selected.id === g;
    const row = el("tr", {
      class: `${group.frozen ? "frozen" : ""}${chosen ? " chosen" : ""}`, "data-row": g,
      onclick: () => showGroup(g), onpointerenter: () => hoverGroup(g), onpointerleave: () => hoverGroup(null),
    },
    el("td", {}, chip(g)),
    el("td", { class: "number" }, whole(openOf(g))),
    el("td", { class: "number" }, whole(group.size)),
    el("td", { class: "number" }, group.frozen ? el("span", { class: "reason" }, "kept whole") : percent(shareOf(g))),
    el("td", { class: "number" }, group.frozen ? "" : brief(COLUMNS[4][2](g))));
    return chosen ? [row, el("tr", { class: "opened" }, el("td", { colspan: COLUMNS.length }, groupDetails(g).slice(1)))] : [row];
  });
  return [el("div", { class: "scroll" }, el("table", { id: "group-table" }, el("thead", {}, head), el("tbody", {}, rows)))];
}

function sortBy(id) {
  state.sort = { key: id, down: state.sort.key === id ? !state.sort.down : id !== "name" };
  drawPanel();
  emit("view");
  const again = document.querySelector(`[data-sort="${id}"]`);
  if (again) again.focus();
}
