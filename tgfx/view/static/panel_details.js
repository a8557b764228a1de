// Everything about what is selected: a node, a module or a group.

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
    node.groups.length === 1 ? fact("one channel costs", marginalText(node.groups[0])) : null,
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

/** What closing one gate of a group would save, all its members together. */
function marginalText(g) {
  const marginal = now().groups[g].marginal;
  if (!marginal) return "–";
  const [mean, least, most] = marginal.flops;
  const spread = most - least > 1e-6 * Math.abs(most) ? el("span", { class: "dim" }, ` (FLOPs from ${brief(least)} to ${brief(most)})`) : null;
  return [`${brief(mean)} FLOPs, ${brief(marginal.params[0])} parameters`, spread];
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
    own.marginal ? el("dl", { class: "facts" }, fact("one gate costs", marginalText(g))) : null,
    own.latent && own.latent.counts.length ? section("Latent weights of the gates", histogram(own.latent, groupColour(g))) : null,
    section(`Parameter axes (${axes.size})`, el("ul", { class: "plain" }, [...axes].map(([name, { axes: list, nodes: at }]) => {
      const text = [name, list.length ? el("span", { class: "axis" }, `[${list.join(", ")}]`) : ""];
      return el("li", {}, at.length ? nodeLink(at[0], text) : text);
    }))),
    group.ties.length ? section(`Tied by (${group.ties.length})`, el("ul", { class: "plain" }, group.ties.slice(0, 60).map((tie) => el("li", {}, el("b", {}, tie.op || tie.reason), " at ", tie.node >= 0 ? nodeLink(tie.node, tie.at) : tie.at, lineOf(tie.line))))) : null,
  ];
}
