// The first panel: totals, gates, what is kept and why, a legend.

function overviewPanel() {
  const rows = Object.entries(data.totals).filter(([kind, total]) => total > 0 && !(kind === "flops_all" && total === data.totals.flops));
  const table = el("div", { class: "totals" });
  for (const [kind, total] of rows) {
    const value = now().totals[kind];
    const budget = data.budget[kind];
    table.append(el("div", { class: "total", "data-kind": kind },
      el("div", { class: "row" }, el("b", {}, KIND_WORDS[kind] || kind), el("span", { class: "big" }, percent(value / total))),
      meter(value / total, budget, themeValue("--accent")),
      el("div", { class: "row dim" }, el("span", {}, `now ${brief(value)}`), el("span", {}, `before ${brief(total)}`), budget ? el("span", {}, `budget ${percent(budget)}`) : null)));
  }
  const channels = gatedGroups.reduce((sum, g) => sum + groups[g].size, 0);
  const open = gatedGroups.reduce((sum, g) => sum + openOf(g), 0);
  const legend = el("dl", { class: "legend" },
    el("dt", {}, el("span", { class: "swatch" , style: `background:${groupTint(0)};border-left:5px solid ${groupColour(0)}` })), el("dd", {}, "a node in the colour of its group; below, how much of it is kept"),
    el("dt", {}, el("span", { class: "swatch hatched" })), el("dd", {}, "kept whole: click for the reason"),
    el("dt", {}, el("span", { class: "swatch modular" }, "+")), el("dd", {}, "a closed module: double-click, or Enter, opens it"));
  return [
    section("Totals", table, el("p", { class: "dim small" }, "FLOPs: 2 × multiply-adds per sample, convolutions and fully-connected layers")),
    section("Gates", el("p", {}, gatedGroups.length ? `${whole(gatedGroups.length)} group${gatedGroups.length === 1 ? "" : "s"}, ${whole(open)} of ${whole(channels)} gates open` : "Nothing in this model can be gated.")),
    keptSection(),
    section("How to read it", legend),
  ];
}

function keptSection() {
  const reasons = new Map();
  groups.forEach((group, g) => {
    if (!group.frozen) return;
    if (!reasons.has(group.frozen.reason)) reasons.set(group.frozen.reason, []);
    reasons.get(group.frozen.reason).push(g);
  });
  if (!reasons.size && !data.refusals.length) return section("Kept", empty("Every group can be cut."));
  const list = el("ul", { class: "reasons" });
  for (const [reason, own] of reasons) {
    list.append(el("li", {}, el("span", { class: "reason" }, reason), el("div", { class: "chips" }, own.slice(0, 6).map((g) => chip(g)), own.length > 6 ? el("span", { class: "dim" }, ` and ${own.length - 6} more`) : null)));
  }
  for (const refusal of data.refusals) list.append(el("li", {}, el("span", { class: "reason" }, `${refusal.at}: ${refusal.reason}`), lineOf(refusal.line)));
  return section("Kept, and why", list);
}
