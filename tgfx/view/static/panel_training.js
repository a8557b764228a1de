// Curves of a training history.

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
