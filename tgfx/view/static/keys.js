// Keys inside of the graph.

function step(direction) {
  const here = selectedPlace();
  const drawn = picture.boxes.filter((box) => !box.frame);
  if (!drawn.length) return;
  if (!here || !boxAt.has(here)) {
    const first = drawn.reduce((a, b) => (b.y < a.y ? b : a));
    return select(targetOf(first.place), { move: true });
  }
  const box = boxAt.get(here);
  const linked = (from, to) => picture.lines.filter((line) => line[from] === here).map((line) => line[to]).filter((p) => boxAt.has(p));
  let options = direction === "down" ? linked("from", "to") : direction === "up" ? linked("to", "from") : [];
  options = options.map((place) => boxAt.get(place)).filter((other) => !other.frame);
  if (!options.length) {
    const middle = (b) => [b.x + b.width / 2, b.y + b.height / 2];
    const [hx, hy] = middle(box);
    options = drawn.filter((other) => {
      const [ox, oy] = middle(other);
      if (other === box) return false;
      if (direction === "down") return oy > hy + 4;
      if (direction === "up") return oy < hy - 4;
      return Math.abs(oy - hy) < Math.max(box.height, 60) && (direction === "left" ? ox < hx - 4 : ox > hx + 4);
    });
    options.sort((a, b) => {
      const [ax, ay] = middle(a), [bx, by] = middle(b);
      return Math.hypot(ax - hx, 2 * (ay - hy)) - Math.hypot(bx - hx, 2 * (by - hy));
    });
  }
  if (options.length) select(targetOf(options[0].place), { move: true });
}

svg.addEventListener("keydown", (event) => {
  const arrows = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };
  const direction = arrows[event.key];
  if (direction && event.shiftKey) {
    state.view.x += { left: 80, right: -80 }[direction] || 0;
    state.view.y += { up: 80, down: -80 }[direction] || 0;
    applyView();
  } else if (direction) step(direction);
  else if (event.key === "Enter" || event.key === " ") {
    if (state.selected && state.selected.kind === "module") toggleModule(state.selected.id);
    else if (state.selected && state.selected.kind === "node") emit("details");
  } else if (event.key === "Backspace" && selectedPlace()) {
    const s = state.selected;
    const home = s.kind === "module" ? modules.get(s.id).parent : homeOf[s.id];
    if (home && home.path) {
      select({ kind: "module", id: home.path });
      toggleModule(home.path, false);
    }
  } else return;
  event.preventDefault();
});
