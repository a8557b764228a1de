// The module hierarchy, and what of the graph is to be seen at the moment.

const nodes = data.nodes;
const groups = data.groups;
const gatedGroups = groups.map((group, i) => i).filter((i) => !groups[i].frozen);

const consumers = nodes.map(() => []);
nodes.forEach((node, i) => node.inputs.forEach((source) => consumers[source].push(i)));

// "size": arithmetic on sizes; "constant": depends on no input (parameters and their slices); "": everything else
const roles = [];
nodes.forEach((node, i) => {
  const call = node.kind === "call_function" || node.kind === "call_method";
  if (call && node.shape === null && !node.closed_box) roles[i] = "size";
  else if (node.kind !== "placeholder" && node.kind !== "output" && node.kind !== "call_module" &&
           node.inputs.every((source) => roles[source])) roles[i] = "constant";
  else roles[i] = "";
});
const foldable = roles.filter(Boolean).length;

// groups of which a node owns a parameter axis, and reasons of those that are kept
const memberOf = nodes.map(() => []);
groups.forEach((group, g) => {
  for (const member of group.members) {
    for (const i of member.nodes) if (!memberOf[i].includes(g)) memberOf[i].push(g);
  }
});
const frozenOf = memberOf.map((own) => own.filter((g) => groups[g].frozen));
const tiesAt = nodes.map(() => []);
groups.forEach((group, g) => group.ties.forEach((tie) => tie.node >= 0 && tiesAt[tie.node].push(g)));

// -- the tree of modules -----------------------------------------------------------------------------------------------

/** {path, label, children: (number | module)[], parent, leaves: number[]} */
function buildTree() {
  const root = { path: "", label: "", children: [], parent: null, leaves: [] };
  const known = new Map([["", root]]);
  const moduleAt = (path) => {
    if (known.has(path)) return known.get(path);
    const parent = moduleAt(path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
    const made = { path, label: "", children: [], parent, leaves: [] };
    parent.children.push(made);
    known.set(path, made);
    return made;
  };
  nodes.forEach((node, i) => moduleAt(node.module).children.push(i));
  // a module around a single thing only adds a frame: the thing takes its place
  const simplify = (module) => {
    module.children = module.children.map((child) => {
      if (typeof child === "number") return child;
      simplify(child);
      const drawn = child.children.filter((one) => typeof one !== "number" || !roles[one]);
      return drawn.length === 1 && child.children.length === 1 ? drawn[0] : child;
    });
    module.leaves = module.children.flatMap((child) => (typeof child === "number" ? [child] : child.leaves));
    module.children.forEach((child) => typeof child !== "number" && (child.parent = module));
  };
  simplify(root);
  return root;
}

const tree = buildTree();
const modules = new Map(); // path -> module
const homeOf = []; // node -> the module it is drawn in
(function visit(module) {
  modules.set(module.path, module);
  for (const child of module.children) {
    if (typeof child === "number") homeOf[child] = module;
    else visit(child);
  }
})(tree);
const modulePaths = [...modules.keys()].filter(Boolean);

for (const module of modules.values()) {
  const above = module.parent && module.parent.path;
  module.label = above ? module.path.slice(above.length + 1) : module.path;
  module.type = data.modules[module.path] || "";
}

function titleOf(i) {
  const node = nodes[i];
  if (node.kind === "call_module" || node.kind === "get_attr") {
    const above = homeOf[i].path;
    return above && node.path.startsWith(above + ".") ? node.path.slice(above.length + 1) : node.path;
  }
  return node.kind === "placeholder" ? node.name : node.op;
}

// -- what is shown ------------------------------------------------------------------------------------------------------

const isDrawn = (i) => !(state.folded && roles[i]);

/** Where a node is to be seen: "n12", or "m:path" of the closed module that hides it; folded ones at their users. */
function placesOf(i, depth = 0) {
  if (!isDrawn(i)) {
    if (roles[i] === "size" || depth > 20) return [];
    return [...new Set(consumers[i].flatMap((user) => placesOf(user, depth + 1)))];
  }
  let place = `n${i}`;
  for (let module = homeOf[i]; module && module.path; module = module.parent) {
    if (!state.expanded.has(module.path)) place = `m:${module.path}`;
  }
  return [place];
}

/** Open modules level by level while the picture stays small. */
function defaultExpansion(most) {
  const open = new Set();
  let frontier = tree.children.filter((child) => typeof child !== "number");
  let count = tree.children.length;
  while (frontier.length) {
    const added = frontier.reduce((sum, module) => sum + module.children.filter((c) => typeof c !== "number" || isDrawn(c)).length, 0);
    if (count + added > most) break;
    frontier.forEach((module) => open.add(module.path));
    count += added;
    frontier = frontier.flatMap((module) => module.children.filter((child) => typeof child !== "number"));
  }
  return open;
}

// -- figures, as they are now ---------------------------------------------------------------------------------------------

const now = () => data.now;
const openOf = (g) => now().groups[g].open;
const shareOf = (g) => (groups[g].size ? openOf(g) / groups[g].size : 1);
const goneNow = () => (data.now.goneSet ||= new Set(data.now.nodes.gone));

/** Leaves of a place, with the constants that are folded into them. */
function leavesOf(place) {
  const own = place.startsWith("m:") ? modules.get(place.slice(2)).leaves : [Number(place.slice(1))];
  if (!state.folded) return own;
  const all = new Set(own);
  const add = (i) => nodes[i].inputs.forEach((source) => {
    if (roles[source] === "constant" && !all.has(source) && firstUser(source) === i) {
      all.add(source);
      add(source);
    }
  });
  own.forEach(add);
  return [...all];
}
const firstUser = (i) => consumers[i][0];

function sumOf(place, kind, before = false) {
  return leavesOf(place).reduce((sum, i) => sum + (before ? nodes[i][kind] : now().nodes[kind][i]), 0);
}

/** Groups whose channels leave this place. */
function groupsOf(place) {
  if (place.startsWith("n")) return nodes[Number(place.slice(1))].groups;
  const own = new Set();
  modules.get(place.slice(2)).leaves.forEach((i) => memberOf[i].forEach((g) => !groups[g].frozen && own.add(g)));
  return [...own].sort((a, b) => a - b);
}

/** Share of the channels of a place's groups that are open; null without groups. */
function keptShare(place) {
  const own = groupsOf(place);
  const size = own.reduce((sum, g) => sum + groups[g].size, 0);
  return size ? own.reduce((sum, g) => sum + openOf(g), 0) / size : null;
}

/** Whether what a place gives is kept as a whole. A layer may also have kept inputs: that is in its details only. */
function isKept(place) {
  if (place.startsWith("m:")) {
    const own = modules.get(place.slice(2)).leaves.filter((i) => memberOf[i].length || nodes[i].closed_box);
    return own.length > 0 && own.every((i) => isKept(`n${i}`));
  }
  const i = Number(place.slice(1));
  if (nodes[i].closed_box) return true;
  const all = leavesOf(place);
  const gated = data.weights ? all.some((k) => memberOf[k].some((g) => !groups[g].frozen)) : nodes[i].groups.length > 0;
  return !gated && all.some((k) => frozenOf[k].length > 0);
}

const gateWord = (group) => (data.weights ? "weights" : { channel: "channels", head: "heads", layer: "branch", choice: "alternatives" }[group.kind] || "gates");

function keptReasons(place) {
  const found = new Map();
  for (const i of leavesOf(place)) {
    if (nodes[i].closed_box) found.set(nodes[i].closed_box, { reason: nodes[i].closed_box, node: i });
    for (const g of frozenOf[i]) found.set(groups[g].name, { ...groups[g].frozen, group: g });
  }
  return [...found.values()];
}
