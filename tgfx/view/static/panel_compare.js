// The compact model beside the one it was made of.

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
