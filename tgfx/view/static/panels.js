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

// -- overview ---------------------------------------------------------------------------------------------------------------

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

// -- groups ----------------------------------------------------------------------------------------------------------------------

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

// -- the polynomial ----------------------------------------------------------------------------------------------------------------

function valueOf(term) {
  if (typeof term === "number") return term;
  const [kind, ...rest] = term;
  if (kind === "n") return openOf(rest[0]);
  if (kind === "gate") {
    const mask = now().groups[rest[0]].mask;
    return mask ? Number(mask[rest[1]] === "1") : NaN;
  }
  if (kind === "+") return rest.reduce((sum, part) => sum + valueOf(part), 0);
  if (kind === "*") return rest.reduce((product, part) => product * valueOf(part), 1);
  if (kind === "^") return valueOf(rest[0]) ** valueOf(rest[1]);
  return NaN;
}

function typeset(term, inside = false) {
  if (typeof term === "number") return [el("span", { class: "coefficient" }, whole(term))];
  const [kind, ...rest] = term;
  if (kind === "n") return [el("span", { class: "factor" }, el("i", {}, "n"), chip(rest[0], tailOf(groups[rest[0]].name, 30)))];
  if (kind === "gate") return [el("span", { class: "factor" }, chip(rest[0], `${groups[rest[0]].name}[${rest[1]}]`))];
  if (kind === "^") return [...typeset(rest[0], true), el("sup", {}, String(valueOf(rest[1])))];
  if (kind === "?") return [el("code", {}, rest[0])];
  const sign = kind === "+" ? " + " : " · ";
  const shown = rest.length > 12 ? rest.slice(0, 10) : rest;
  const parts = shown.flatMap((part, i) => [i ? sign : "", ...typeset(part, true)]);
  if (shown.length < rest.length) parts.push(`${sign}… ${rest.length - shown.length} more`);
  return kind === "+" && inside ? ["(", ...parts, ")"] : parts;
}

let allTerms = false;
function costPanel() {
  const kind = state.cost;
  const switcher = el("div", { class: "segmented", role: "group", "aria-label": "cost" }, Object.keys(data.cost).map((id) => el("button", {
    type: "button", "aria-pressed": String(id === kind), onclick: () => { state.cost = id; drawPanel(); },
  }, KIND_WORDS[id])));
  const total = now().totals[kind];
  const terms = data.cost[kind].terms.map((term) => ({ term, value: valueOf(term) }))
    .sort((a, b) => (Number.isFinite(b.value) ? b.value : -1) - (Number.isFinite(a.value) ? a.value : -1));
  const shown = allTerms ? terms : terms.slice(0, 25);
  const list = el("ol", { class: "terms" }, shown.map(({ term, value }, i) => el("li", {},
    el("span", { class: "term" }, i ? el("span", { class: "plus" }, "+") : el("span", { class: "plus" }, "="), ...typeset(term)),
    el("span", { class: "worth" }, Number.isFinite(value) ? `${brief(value)} · ${percent(value / total)}` : ""))));
  const more = terms.length - shown.length + data.cost[kind].left_out;
  return [
    switcher,
    el("p", { class: "formula" }, `${KIND_WORDS[kind]} = ${whole(total)} now, of ${whole(data.totals[kind])}`),
    el("p", { class: "dim small" }, "n: open gates of a group. Largest terms first; each with its value now."),
    list,
    more > 0 ? el("p", {}, terms.length > shown.length ? el("button", { type: "button", onclick: () => { allTerms = true; drawPanel(); } }, `show ${whole(more)} more`) : `${whole(more)} terms are left out`) : null,
  ];
}

// -- channels per layer ----------------------------------------------------------------------------------------------------------------

function channelsPanel() {
  if (data.weights) return weightsPanel();
  const rows = [];
  nodes.forEach((node, i) => {
    if (!["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear", "linear", "conv2d", "Embedding"].includes(node.op) || !node.shape) return;
    const axis = /conv/i.test(node.op) ? node.shape.length - (/1d/.test(node.op) ? 2 : /3d/.test(node.op) ? 4 : 3) : node.shape.length - 1;
    const before = node.shape[axis];
    const shape = now().nodes.shape[i];
    rows.push({ i, before, after: goneNow().has(i) ? 0 : shape ? shape[axis] : before });
  });
  if (!rows.length) return [empty("No convolution or fully-connected layer.")];
  const most = Math.max(...rows.map((row) => row.before));
  const chart = el("div", { class: "bars", role: "list", "aria-label": "output channels kept per layer" }, rows.map(({ i, before, after }) => {
    const name = nodes[i].kind === "call_module" ? nodes[i].path : `${nodes[i].module}.${nodes[i].op}`;
    return bar(name, before, after, most, "channels", nodes[i].groups[0], () => goTo(i));
  }));
  return [el("p", { class: "dim small" }, "Output channels per layer, in the order of the model: kept (solid) of all (light)."), chart];
}

function weightsPanel() {
  const most = Math.max(1, ...gatedGroups.map((g) => groups[g].size));
  return [
    el("p", { class: "dim small" }, "Weights per layer: open (solid) of all (light)."),
    el("div", { class: "bars", role: "list", "aria-label": "weights kept per layer" }, gatedGroups.map((g) => bar(groups[g].name, groups[g].size, openOf(g), most, "weights", g, () => showGroup(g)))),
  ];
}

function bar(name, before, after, most, what, group, chosen) {
  const colour = group === undefined ? themeValue("--muted") : groupColour(group);
  return el("div", { role: "listitem" }, el("button", {
    type: "button", class: "bar", "aria-label": `${name}: ${after} of ${before} ${what}`, onclick: chosen,
    onpointerenter: () => group !== undefined && hoverGroup(group), onpointerleave: () => hoverGroup(null),
  },
  el("span", { class: "name", title: name }, tailOf(name, 28)),
  el("span", { class: "lane" }, el("span", { class: "before", style: `width:${(before / most) * 100}%` }), el("span", { class: "after", style: `width:${(after / most) * 100}%;background:${colour}` })),
  el("span", { class: "count" }, after === before ? whole(before) : `${brief(after)} / ${brief(before)}`)));
}

// -- training ----------------------------------------------------------------------------------------------------------------------------

function trainingPanel() {
  const history = data.history;
  const out = [];
  if (data.live) out.push(el("p", { id: "live-state", class: "live" }, liveText()));
  if (!history || !(history.columns.step || []).length) return [...out, empty("No step has been recorded yet.")];
  const { columns } = history;
  const x = columns.step;
  for (const name of Object.keys(columns).filter((column) => column.startsWith("ratio_"))) {
    const kind = name.slice(6);
    const series = [{ name: "ratio", x, y: columns[name], colour: themeValue("--accent") }];
    if (columns[`target_${kind}`]) series.push({ name: "target", x, y: columns[`target_${kind}`], colour: themeValue("--muted"), dash: "4 3" });
    out.push(section(`Share of ${KIND_WORDS[kind] || kind}`, lineChart(series, { low: 0, high: 1, format: percent, label: `share of ${kind} over the steps` })));
  }
  if (columns.loss) out.push(section("Loss", lineChart([{ name: "loss", x, y: columns.loss, colour: "hsl(22 80% 50%)" }], { label: "loss over the steps" })));
  for (const name of Object.keys(columns).filter((column) => column.startsWith("val_"))) {
    const measured = x.map((step, i) => [step, columns[name][i]]).filter(([, value]) => value !== null);
    const curve = { name: name.slice(4), x: measured.map(([step]) => step), y: measured.map(([, value]) => value), colour: "hsl(160 60% 40%)", dots: true };
    out.push(section(`Validation: ${name.slice(4)}`, lineChart([curve], { label: `${name} over the steps` })));
  }
  out.push(section("Open gates per group", groupCurves(history)));
  return out;
}

function groupCurves(history) {
  const index = new Map(groups.map((group, g) => [group.name, g]));
  const steps = history.kept.step;
  const last = history.columns.step[history.columns.step.length - 1];
  const chosen = state.selected && state.selected.kind === "group" ? state.selected.id : null;
  const series = history.groups.map((name, k) => {
    const g = index.get(name);
    const size = g === undefined ? 1 : groups[g].size;
    const y = history.kept.open.map((row) => row[k] / size);
    return { name, group: g, x: [...steps, last], y: [...y, y[y.length - 1]], colour: g === undefined ? "gray" : groupColour(g), strong: g === chosen };
  }).sort((a, b) => a.strong - b.strong);
  return lineChart(series.reverse(), { low: 0, high: 1, format: percent, height: 200, label: "share of open gates of every group over the steps", faint: chosen !== null });
}

// -- before and after ------------------------------------------------------------------------------------------------------------------------

function comparePanel() {
  const c = data.comparison;
  const line = (name, [before, after], text = brief) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, text(before)), el("td", { class: "number" }, text(after)), el("td", { class: "number" }, percent(after / before)));
  const totals = el("table", { id: "compare-totals" },
    el("thead", {}, el("tr", {}, ["", "before", "after", "share"].map((title) => el("th", { scope: "col", class: title ? "number" : "" }, title)))),
    el("tbody", {}, line("parameters", c.parameters), line("bytes", c.bytes), line("FLOPs, all", c.flops), line("graph nodes", c.nodes, whole)));
  const layersTable = el("table", {},
    el("thead", {}, el("tr", {}, ["layer", "weight before", "after", "params"].map((title, i) => el("th", { scope: "col", class: i ? "number" : "" }, title)))),
    el("tbody", {}, c.layers.map((layer) => el("tr", { class: sameShape(layer.before, layer.after) ? "same" : "" },
      el("td", {}, nodeLink(layer.node, layer.layer)),
      el("td", { class: "number" }, layer.before.join("×")),
      el("td", { class: "number" }, layer.after ? layer.after.join("×") : "gone"),
      el("td", { class: "number" }, percent(layer.params[1] / layer.params[0]))))));
  return [
    section("The whole model", totals, el("p", { class: "dim small" }, "Counted on the compact model itself: its parameters, and what torch's FLOP counter sees when it runs.")),
    section("Layer by layer", el("div", { class: "scroll" }, layersTable)),
  ];
}

// -- details ---------------------------------------------------------------------------------------------------------------------------------

function detailsPanel() {
  const s = state.selected;
  if (!s) return [empty("Click a node, a module or a group; or use the arrow keys in the graph.")];
  return s.kind === "group" ? groupDetails(s.id) : s.kind === "module" ? moduleDetails(s.id) : nodeDetails(s.id);
}

const fact = (name, ...value) => [el("dt", {}, name), el("dd", {}, ...value)];
const beforeAfter = (before, after) => (before === after ? brief(before) : `${brief(before)} → ${brief(after)}`);

function nodeDetails(i) {
  const node = nodes[i];
  const place = `n${i}`;
  const after = now().nodes.shape[i];
  const facts = el("dl", { class: "facts" },
    fact("operator", node.op),
    node.detail ? fact("arguments", el("code", {}, node.detail)) : null,
    node.shape ? fact("shape", shapeText(node.shape), goneNow().has(i) ? " → gone" : after && !sameShape(after, node.shape) ? ` → ${shapeText(after)}` : after ? "" : " → not rectangular inside of a shuffle") : null,
    node.flops ? fact("FLOPs", beforeAfter(node.flops, now().nodes.flops[i]), el("span", { class: "dim" }, ` · ${percent(now().nodes.flops[i] / now().totals.flops)} of all`)) : null,
    node.uncounted ? fact("FLOPs outside of the budget", beforeAfter(node.uncounted, now().nodes.uncounted[i])) : null,
    sumOf(place, "params", true) ? fact("parameters", beforeAfter(sumOf(place, "params", true), sumOf(place, "params"))) : null,
    node.module ? fact("in module", el("button", { type: "button", class: "link", onclick: () => goToModule(node.module) }, node.module)) : null,
    node.line ? fact("source", lineOf(node.line)) : null);
  return [
    el("h2", { class: "what" }, node.path), facts, keptBlock(place),
    node.groups.length ? section(node.groups.length === 1 ? "Channels" : `Channels of ${node.groups.length} groups`, node.groups.slice(0, 24).map((g) => groupCard(g))) : null,
    memberOf[i].some((g) => !node.groups.includes(g) && !groups[g].frozen) ? section("Its parameters also belong to", memberOf[i].filter((g) => !node.groups.includes(g) && !groups[g].frozen).map((g) => groupCard(g))) : null,
    section("Connections", el("dl", { class: "facts" }, fact("from", node.inputs.filter((k) => roles[k] !== "size").map((k) => [nodeLink(k), " "])), fact("to", consumers[i].filter((k) => roles[k] !== "size").map((k) => [nodeLink(k), " "])))),
  ];
}

async function goToModule(path) {
  let own = path;
  while (own && !modules.has(own)) own = own.includes(".") ? own.slice(0, own.lastIndexOf(".")) : "";
  if (!own) return;
  await reveal(`m:${own}`);
  select({ kind: "module", id: own });
}

function moduleDetails(path) {
  const module = modules.get(path);
  const place = `m:${path}`;
  const open = state.expanded.has(path);
  const own = groupsOf(place);
  return [
    el("h2", { class: "what" }, path),
    el("p", {}, el("button", { type: "button", onclick: () => toggleModule(path) }, open ? "close the module" : "open the module")),
    el("dl", { class: "facts" },
      fact("class", module.type || "–"),
      fact("operations", whole(module.leaves.filter((i) => !roles[i]).length)),
      fact("FLOPs", beforeAfter(sumOf(place, "flops", true), sumOf(place, "flops"))),
      fact("parameters", beforeAfter(sumOf(place, "params", true), sumOf(place, "params")))),
    keptBlock(place),
    own.length ? section(`${own.length} group${own.length === 1 ? "" : "s"} with parameters here`, own.slice(0, 24).map((g) => groupCard(g)), own.length > 24 ? empty(`and ${own.length - 24} more`) : null) : null,
  ];
}

function keptBlock(place) {
  const reasons = keptReasons(place);
  if (!reasons.length) return null;
  return el("section", { class: "kept-block" }, el("h2", {}, isKept(place) ? "Kept whole" : place.startsWith("m:") ? "Kept inside" : "Some of its parameters' axes are kept"), reasons.slice(0, 8).map((one) => el("div", { class: "kept-reason" },
    el("p", { class: "reason" }, one.reason, one.op && one.op !== "output" ? el("span", { class: "dim" }, ` (${one.op}${one.at ? ` at ${one.at}` : ""})`) : one.at ? el("span", { class: "dim" }, ` (at ${one.at})`) : null),
    lineOf(one.line),
    one.group !== undefined ? chip(one.group) : null)));
}

function groupCard(g) {
  const group = groups[g];
  return el("div", { class: "card" }, el("div", { class: "row" }, chip(g), el("span", { class: "number" }, group.frozen ? `kept ${whole(group.size)}` : `${whole(openOf(g))} of ${whole(group.size)}`)),
    group.frozen ? el("p", { class: "reason" }, group.frozen.reason) : strip(g));
}

function groupDetails(g) {
  const group = groups[g];
  const own = now().groups[g];
  const words = gateWord(group);
  const marginal = own.marginal;
  const axes = new Map();
  for (const member of group.members) {
    if (!axes.has(member.name)) axes.set(member.name, { axes: [], nodes: member.nodes });
    if (member.axis !== null) axes.get(member.name).axes.push(member.axis);
  }
  return [
    el("h2", { class: "what" }, chip(g)),
    group.frozen ? el("section", { class: "kept-block" }, el("h2", {}, `${whole(group.size)} ${words}, kept whole`),
      el("p", { class: "reason" }, group.frozen.reason, group.frozen.at ? el("span", { class: "dim" }, ` (at ${group.frozen.at}${group.frozen.op ? `, ${group.frozen.op}` : ""})`) : null),
      group.frozen.limit ? el("p", { class: "dim small" }, "A limit of tgfx, not of the model.") : null,
      lineOf(group.frozen.line)) : null,
    group.frozen ? null : section(`${whole(openOf(g))} of ${whole(group.size)} ${words} open`, strip(g)),
    marginal ? el("dl", { class: "facts" }, fact("one gate costs", `${brief(marginal.flops[0])} FLOPs, ${brief(marginal.params[0])} parameters`, marginal.flops[2] - marginal.flops[1] > 1e-6 * Math.abs(marginal.flops[2]) ? el("span", { class: "dim" }, ` (FLOPs from ${brief(marginal.flops[1])} to ${brief(marginal.flops[2])})`) : null)) : null,
    own.latent && own.latent.counts.length ? section("Latent weights of the gates", histogram(own.latent, groupColour(g))) : null,
    section(`Parameter axes (${axes.size})`, el("ul", { class: "plain" }, [...axes].map(([name, { axes: list, nodes: at }]) => {
      const text = [name, list.length ? el("span", { class: "axis" }, `[${list.join(", ")}]`) : ""];
      return el("li", {}, at.length ? nodeLink(at[0], text) : text);
    }))),
    group.ties.length ? section(`Tied by (${group.ties.length})`, el("ul", { class: "plain" }, group.ties.slice(0, 60).map((tie) => el("li", {}, el("b", {}, tie.op || tie.reason), " at ", tie.node >= 0 ? nodeLink(tie.node, tie.at) : tie.at, lineOf(tie.line))))) : null,
  ];
}

// -- the frame around them ------------------------------------------------------------------------------------------------------------------------

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
