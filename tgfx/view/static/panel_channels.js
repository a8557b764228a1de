// What is left of every layer, as bars.

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
