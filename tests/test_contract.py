"""Contracts: the public names, the packages, and what every pass promises."""

import ast
import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

import tgfx
from tests.support.random_models import Case, build
from tgfx.capture import capture, prepare
from tgfx.passes.carry import carry_gates
from tgfx.passes.channels import analyse_channels
from tgfx.passes.cost import KINDS, build_cost
from tgfx.passes.couple import couple
from tgfx.passes.cut import cut, cut_with_places
from tgfx.passes.dead_branches import DeadBranches
from tgfx.passes.insert_gates import GatedGraph, insert_gates
from tgfx.passes.place import place_gates
from tgfx.passes.survivors import Survivors

ROOT = Path(__file__).parent.parent

PUBLIC = [
    "Budget",
    "BudgetController",
    "Choice",
    "CompactionReport",
    "Finished",
    "FitResult",
    "GateSpec",
    "GatedModule",
    "Group",
    "OnnxReport",
    "Probed",
    "Refusal",
    "Schedule",
    "TgfxError",
    "TrainableGate",
    "__version__",
    "check_optimizer",
    "compact_",
    "export_onnx",
    "finish",
    "fit",
    "fp16_onnx",
    "latency",
    "load_plan",
    "load_sparse",
    "param_groups",
    "quantize_onnx",
    "recalibrate",
    "save_plan",
    "save_sparse",
    "shrink",
    "to_dot",
    "to_model_explorer",
    "to_networkx",
    "transform",
    "verify_onnx",
    "visualize",
]


def test_public_names() -> None:
    """A change of this list belongs into CHANGELOG.md."""
    assert tgfx.__all__ == PUBLIC
    assert all(hasattr(tgfx, name) for name in PUBLIC)


def test_public_methods_of_a_gated_model() -> None:
    own = {name for name in vars(tgfx.GatedModule) if not name.startswith("_")}
    assert own == {
        "attach", "bank", "budget_loss", "cheapest", "controller", "cost", "cost_expr", "explain", "gate_slots",
        "gates", "gradient_checkpointing_disable", "gradient_checkpointing_enable", "groups",
        "is_gradient_checkpointing", "kinds", "marginal", "open_slots", "ratio", "report", "to_dot", "to_networkx",
        "total", "use_latency",
    }  # fmt: skip


def test_every_package_is_listed() -> None:
    """setuptools installs what pyproject.toml lists, nothing is discovered."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"tgfx": "tgfx", "passes": "tgfx.passes"}
    there = {
        ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert set(tool["packages"]) == there
    assert tool["package-dir"] == {name: folder for folder, name in folders.items()}
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} is no package"


def sources() -> list[Path]:
    return sorted([*(ROOT / "tgfx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_source_habits(file: Path) -> None:
    """A docstring that says what the file is, no printing, no bare except."""
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), "no module docstring"
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        assert called != "print", f"prints in line {node.lineno}"
        assert not isinstance(node, ast.ExceptHandler) or node.type is not None, f"bare except in {node.lineno}"


# who may import whom: types <- operator rules <- passes <- pipeline
LAYERS = {
    "ir": 0,
    "errors": 0,
    "_version": 0,
    "sharding": 0,
    "gates": 1,
    "choice_gate": 1,
    "choice": 1,
    "bank": 1,
    "ops": 1,
    "gated_layers": 1,
    "capture": 2,
    "passes": 2,
}


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_import_direction(file: Path) -> None:
    inside = file.relative_to(ROOT).with_suffix("").parts
    own = "passes" if inside[0] == "passes" else inside[1] if len(inside) > 1 else ""
    level = LAYERS.get(own, 3)
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            assert parts[0] not in ("tests", "examples"), f"{name} in line {node.lineno}"
            if parts[0] == "tgfx" and len(parts) > 1:
                assert LAYERS.get(parts[1], 3) <= level, f"{own} imports {name} in line {node.lineno}"


# -- passes ------------------------------------------------------------------------------------------------

ATTENTION = {"batch_first": True, "weights": False, "heads": 2, "dropout": 0.0}
CASES = [
    Case("image", (("Residual", {"project": True, "inplace": False}), ("ShuffleUnit", {})), "flatten"),
    Case("image", (("SetItem", {"how": "zeros_like"}), ("GroupNorm", {"groups": 2, "affine": True})), "pool"),
    Case("sequence", (("TorchAttention", ATTENTION), ("Frozen", {"how": "lstm"})), "norm"),
    Case("tokens", (("Rope", {"repeat": False}),), "tied"),
]


class Bench:
    """Inputs of every pass for one model."""

    def __init__(self, case: Case) -> None:
        with torch.no_grad():
            self.model = build(case)
            example = case.example()
            self.source = capture(prepare(self.model, (example,), {}))
            self.channels = analyse_channels(self.source)
            self.source.result = None
            self.coupling = couple(self.channels)
            self.placement = place_gates(self.source, self.channels, self.coupling)
        self.shapes = {n: tuple(p.shape) for n, p in self.source.module.named_parameters()}
        every_third = np.arange(self.coupling.slots) % 3 != 1
        for group in self.coupling.groups:
            every_third[group.start] = True
        self.survivors = Survivors(self.channels, self.coupling, every_third)
        module = self.source.module
        self.tensors = dict(module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(module.named_buffers(remove_duplicate=False))

    def inputs(self) -> Any:
        """All that a pass is given, as comparable data."""
        module, space = self.source.module, self.channels.space
        return {
            "graph": [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in module.graph.nodes],
            "state": {k: v.clone() for k, v in module.state_dict().items()},
            "modes": {k: m.training for k, m in module.named_modules()},
            "attributes": {k: sorted(vars(m)) for k, m in module.named_modules()},
            "roots": space.find(np.arange(space.size)).copy(),
            "groups": described(self.coupling),
            "sites": described(self.placement),
            "args": copy.deepcopy((self.source.args, self.source.kwargs)),
        }


def described(fact: Any) -> Any:
    """A fact as data that can be compared."""
    name = type(fact).__name__
    if name == "ChannelMap":
        ids = {k: [layer.clone() for layer in v.layers] for k, v in [*fact.params.items(), *fact.buffers.items()]}
        nodes = {k: [[x.clone() for x in t.layers] if t else None for t in v.tensors] for k, v in fact.nodes.items()}
        reads = [
            (r.node, r.op, r.kind, r.layer.clone(), [(o.kind, o.name, o.index) for o in r.options]) for r in fact.reads
        ]
        work = [(w.node, w.op, w.factor, [a.clone() for a in w.axes], w.counted) for w in fact.work]
        roots = fact.space.find(np.arange(fact.space.size))
        return ids, nodes, reads, work, roots, fact.const_nodes, fact.grouping, fact.containers
    if name == "Coupling":
        groups = [(g.name, g.size, g.members, g.ties, g.frozen, g.roots, g.start) for g in (*fact.groups, *fact.frozen)]
        return groups, fact.slots, fact.slot_of_id
    if name == "Placement":
        sites = [(s.node, s.kind, s.operand and (s.operand.kind, s.operand.name), s.index) for s in fact.sites]
        return sites, fact.folded
    if name == "CostModel":
        return [(kind, [(t.factor, t.axes, t.origin) for t in fact.terms[kind]], fact.total(kind)) for kind in KINDS]
    if isinstance(fact, fx.GraphModule):
        return fact.code, dict(fact.state_dict()), {k: type(m) for k, m in fact.named_modules() if k}
    assert isinstance(fact, GatedGraph)
    return str(fact.graph), dict(fact.indices.named_buffers()), sorted(fact.twins)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


PASSES: dict[str, Callable[[Bench], Any]] = {
    "analyse_channels": lambda b: analyse_channels(b.source),
    "couple": lambda b: couple(b.channels),
    "place_gates": lambda b: place_gates(b.source, b.channels, b.coupling),
    "insert_gates": lambda b: insert_gates(b.source, b.placement),
    "build_cost": lambda b: build_cost(b.channels, b.coupling, b.shapes),
    "cut": lambda b: cut(b.source, b.channels, b.survivors, b.tensors),
    "carry_gates": lambda b: carry_gates(b.placement, b.channels, b.coupling, b.survivors, cut_nodes(b), {}),
}


def cut_nodes(b: Bench) -> dict[str, str]:
    return cut_with_places(b.source, b.channels, b.survivors, b.tensors, DeadBranches(), None).node_of


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(name for name, _ in case.blocks))
def bench(request) -> Bench:
    return Bench(request.param)


@pytest.mark.parametrize("name", PASSES)
def test_pass_leaves_its_input_alone(bench: Bench, name: str) -> None:
    before = bench.inputs()
    rng = torch.get_rng_state()
    PASSES[name](bench)
    after = bench.inputs()
    for what in before:
        assert same(before[what], after[what]), f"{name} changed the {what} it was given"
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("name", PASSES)
def test_pass_is_deterministic(bench: Bench, name: str) -> None:
    assert same(described(PASSES[name](bench)), described(PASSES[name](bench)))


@pytest.mark.parametrize("name", ["insert_gates", "cut"])
def test_graphs_are_lint_clean(bench: Bench, name: str) -> None:
    graph = PASSES[name](bench).graph
    graph.lint()
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names))
    unused = [n for n in graph.nodes if not n.users and n.op in ("get_attr", "call_function") and not n.is_impure()]
    assert not unused, "dead code"


def test_cut_shares_no_memory_with_its_input(bench: Bench) -> None:
    compact = PASSES["cut"](bench)
    given = {t.data_ptr() for t in bench.tensors.values() if t.numel()}
    for name, tensor in compact.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() not in given, name
        assert isinstance(tensor, nn.Parameter) == isinstance(bench.tensors[name], nn.Parameter)
