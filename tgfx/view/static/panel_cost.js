// The cost as a polynomial, typeset and valued.

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
