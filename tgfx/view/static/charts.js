// Small charts, drawn as SVG.

/** open/closed channels of a group, one cell each. */
function strip(g, width = 360) {
  const state_ = now().groups[g];
  const cells = state_.mask ? [...state_.mask] : state_.shares || [];
  const canvas = el("canvas", { class: "strip", role: "img", "aria-label": `${openOf(g)} of ${groups[g].size} open` });
  const perRow = cells.length > 512 ? 128 : cells.length > 96 ? 64 : 32;
  const columns = Math.max(1, Math.min(cells.length, perRow));
  const rows = Math.ceil(cells.length / columns) || 1;
  const size = Math.max(2, Math.min(14, Math.floor(width / columns)));
  canvas.width = columns * size * 2;
  canvas.height = rows * size * 2;
  canvas.style.width = `${columns * size}px`;
  const paint = canvas.getContext("2d");
  const open = groupColour(g), closed = themeValue("--track"), removed = themeValue("--node");
  cells.forEach((cell, i) => {
    const x = (i % columns) * size * 2, y = Math.floor(i / columns) * size * 2, gap = size > 4 ? 2 : 1;
    paint.globalAlpha = 1;
    paint.fillStyle = cell === "-" ? removed : closed;
    paint.fillRect(x, y, size * 2 - gap, size * 2 - gap);
    const share = cell === "1" ? 1 : cell === "0" || cell === "-" ? 0 : Number(cell);
    if (share > 0) {
      paint.globalAlpha = share;
      paint.fillStyle = open;
      paint.fillRect(x, y, size * 2 - gap, size * 2 - gap);
    }
  });
  return canvas;
}

function histogram(latent, colour) {
  if (latent.counts.length === 1) return el("p", {}, `All ${whole(latent.counts[0])} are ${latent.low.toPrecision(3)}.`);
  const w = 360, h = 90, base = h - 18;
  const most = Math.max(1, ...latent.counts);
  const bar = w / latent.counts.length;
  const chart = sv("svg", { class: "chart", viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `latent weights from ${latent.low.toPrecision(3)} to ${latent.high.toPrecision(3)}` });
  latent.counts.forEach((count, i) => {
    const height = (count / most) * (base - 4);
    chart.append(sv("rect", { x: i * bar + 1, y: base - height, width: Math.max(1, bar - 2), height, fill: colour }, sv("title", {}, `${count} gates`)));
  });
  const span = latent.high - latent.low;
  if (span > 0 && latent.low < 0 && latent.high > 0) {
    const zero = (-latent.low / span) * w;
    chart.append(sv("line", { x1: zero, x2: zero, y1: 0, y2: base, class: "zero" }));
    chart.append(sv("text", { x: zero + 3, y: 10, class: "tick" }, "0"));
  }
  chart.append(sv("line", { x1: 0, x2: w, y1: base, y2: base, class: "axis" }));
  chart.append(sv("text", { x: 0, y: h - 4, class: "tick" }, latent.low.toPrecision(3)));
  chart.append(sv("text", { x: w, y: h - 4, class: "tick", "text-anchor": "end" }, latent.high.toPrecision(3)));
  return chart;
}

/** series: [{name, x, y, colour, dash}]; null values break a line. */
function lineChart(series, { height = 150, low = null, high = null, format = brief, label = "", faint = false } = {}) {
  const w = 400, left = 46, right = 8, top = 8, bottom = 20;
  const drawn = series.filter((one) => one.y.some((value) => value !== null));
  const chart = sv("svg", { class: "chart", viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": label });
  if (!drawn.length) return chart;
  const xs = drawn.flatMap((one) => one.x), ys = drawn.flatMap((one) => one.y.filter((value) => value !== null));
  const x0 = Math.min(...minmax(xs)), x1 = Math.max(...minmax(xs), x0 + 1);
  let [y0, y1] = minmax(ys);
  y0 = low ?? y0;
  y1 = Math.max(high ?? y1, y0 + 1e-9);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (w - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  for (let i = 0; i <= 3; i++) {
    const value = y0 + ((y1 - y0) * i) / 3;
    chart.append(sv("line", { x1: left, x2: w - right, y1: py(value), y2: py(value), class: "gridline" }));
    chart.append(sv("text", { x: left - 5, y: py(value) + 3.5, class: "tick", "text-anchor": "end" }, format(value)));
  }
  chart.append(sv("text", { x: left, y: height - 5, class: "tick" }, `step ${whole(x0)}`));
  chart.append(sv("text", { x: w - right, y: height - 5, class: "tick", "text-anchor": "end" }, whole(x1)));
  for (const one of drawn) {
    let path = "", pen = false;
    one.y.forEach((value, i) => {
      if (value === null) return (pen = false);
      path += `${pen ? "L" : "M"}${px(one.x[i]).toFixed(1)} ${py(clamp(value, y0, y1)).toFixed(1)}`;
      pen = true;
    });
    if (one.dots) one.y.forEach((value, i) => chart.append(sv("circle", { cx: px(one.x[i]), cy: py(value), r: 2.6, fill: one.colour })));
    chart.append(sv("path", { d: path, class: `curve${faint ? " faint" : ""}${one.strong ? " strong" : ""}`, style: `stroke:${one.colour}`, "stroke-dasharray": one.dash || null, "data-group": one.group ?? null }, sv("title", {}, one.name)));
  }
  const cursor = sv("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const readout = sv("text", { class: "readout", y: top + 8, visibility: "hidden" });
  chart.append(cursor, readout);
  chart.addEventListener("pointermove", (event) => {
    const edge = chart.getBoundingClientRect();
    const x = x0 + (((event.clientX - edge.left) / edge.width) * w - left) / (w - left - right) * (x1 - x0);
    const one = drawn[0];
    let best = 0;
    one.x.forEach((value, i) => Math.abs(value - x) < Math.abs(one.x[best] - x) && (best = i));
    const at = px(one.x[best]);
    for (const item of [cursor, readout]) item.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const shown = drawn.slice(0, 2).map((s) => `${s.name} ${s.y[best] === null || s.y[best] === undefined ? "–" : format(s.y[best])}`);
    readout.textContent = `step ${whole(one.x[best])}: ${shown.join(", ")}`;
    readout.setAttribute("x", at > w / 2 ? at - 4 : at + 4);
    readout.setAttribute("text-anchor", at > w / 2 ? "end" : "start");
  });
  chart.addEventListener("pointerleave", () => [cursor, readout].forEach((item) => item.setAttribute("visibility", "hidden")));
  return chart;
}

function minmax(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** A bar with what there was, what there is, and a mark for the budget. */
function meter(share, budget, colour) {
  const bar = el("div", { class: "meter", role: "img", "aria-label": `${percent(share)}${budget ? `, budget ${percent(budget)}` : ""}` });
  bar.append(el("div", { class: "fill", style: `width:${clamp(share, 0, 1) * 100}%;background:${colour}` }));
  if (budget) bar.append(el("div", { class: "mark", style: `left:${budget * 100}%`, title: `budget ${percent(budget)}` }));
  return bar;
}
