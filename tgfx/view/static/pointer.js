// Mouse and touch: pan, zoom, select, hover.

const pointers = new Map();
let dragged = false;

const placeUnder = (event) => {
  const box = event.target.closest && event.target.closest("[data-place]");
  return box && svg.contains(box) ? box.dataset.place : null;
};

stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
  dragged = false;
});

stage.addEventListener("pointermove", (event) => {
  const from = pointers.get(event.pointerId);
  if (!from) return hovering(event);
  const dx = event.clientX - from[0], dy = event.clientY - from[1];
  if (!dragged && Math.abs(dx) + Math.abs(dy) < 4) return;
  if (!dragged) stage.setPointerCapture(event.pointerId);
  dragged = true;
  hideTip();
  if (pointers.size === 2) pinch(event);
  else {
    state.view.x += dx;
    state.view.y += dy;
    applyView();
  }
  pointers.set(event.pointerId, [event.clientX, event.clientY]);
});

function pinch(event) {
  const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
  const from = pointers.get(event.pointerId);
  const before = Math.hypot(from[0] - other[0], from[1] - other[1]);
  const after = Math.hypot(event.clientX - other[0], event.clientY - other[1]);
  const edge = stage.getBoundingClientRect();
  if (before > 0) zoomAt(after / before, (event.clientX + other[0]) / 2 - edge.left, (event.clientY + other[1]) / 2 - edge.top);
}

const release = (event) => pointers.delete(event.pointerId);
stage.addEventListener("pointerup", release);
stage.addEventListener("pointercancel", release);

stage.addEventListener("click", (event) => {
  if (dragged) return;
  const place = placeUnder(event);
  svg.focus({ preventScroll: true });
  if (!place) return select(null);
  if (event.target.closest("[data-toggle]")) return toggleModule(place.slice(2));
  select(targetOf(place));
});

stage.addEventListener("dblclick", (event) => {
  const place = placeUnder(event);
  if (place && place.startsWith("m:")) toggleModule(place.slice(2));
});

stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const edge = stage.getBoundingClientRect();
  const unit = event.deltaMode === 1 ? 16 : 1;
  if (event.ctrlKey || !event.shiftKey) {
    zoomAt(Math.exp(-event.deltaY * unit * 0.0016), event.clientX - edge.left, event.clientY - edge.top);
  } else {
    state.view.x -= (event.deltaX || event.deltaY) * unit;
    applyView();
  }
}, { passive: false });

const tip = byId("tip");
function hovering(event) {
  const place = placeUnder(event);
  const box = place && boxAt.get(place);
  const framed = box && box.frame && !event.target.closest(".header");
  if (!place || framed) {
    hideTip();
    return hoverGroup(null);
  }
  const own = groupsOf(place);
  const main = place.startsWith("n") ? own[0] ?? frozenOf[Number(place.slice(1))][0] : undefined;
  hoverGroup(main === undefined ? null : main);
  tip.replaceChildren(...tipLines(place));
  tip.hidden = false;
  const edge = stage.getBoundingClientRect();
  const x = clamp(event.clientX - edge.left + 16, 4, edge.width - tip.offsetWidth - 4);
  const y = event.clientY - edge.top + 18;
  tip.style.left = `${x}px`;
  tip.style.top = `${y + tip.offsetHeight > edge.height ? y - tip.offsetHeight - 30 : y}px`;
}
function hideTip() {
  tip.hidden = true;
}
stage.addEventListener("pointerleave", () => {
  hideTip();
  hoverGroup(null);
});

function tipLines(place) {
  const words = wordsOf(place);
  const lines = [el("b", {}, place.startsWith("n") ? nodes[Number(place.slice(1))].path : place.slice(2)), el("span", { class: "dim" }, ` ${words.kind || ""}`)];
  const own = groupsOf(place);
  if (own.length === 1) lines.push(el("div", {}, chip(own[0]), ` ${openOf(own[0])} of ${groups[own[0]].size} open`));
  else if (own.length) lines.push(el("div", {}, `channels of ${own.length} groups`));
  const flops = sumOf(place, "flops") + sumOf(place, "uncounted"), params = sumOf(place, "params");
  if (flops || params) lines.push(el("div", { class: "dim" }, `${brief(flops)} FLOPs · ${brief(params)} parameters`));
  for (const one of isKept(place) ? keptReasons(place).slice(0, 3) : []) lines.push(el("div", { class: "reason" }, `kept: ${one.reason}`));
  return lines;
}
