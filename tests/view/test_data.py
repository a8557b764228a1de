"""The JSON of a page says what the model says, to the integer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import tgfx
from tests.support.view_models import EXAMPLE, Residual, close_some_
from tgfx.errors import AlreadyGatedError, InputError
from tgfx.training.history import History
from tgfx.view.data import page_data
from tgfx.view.history import history_data


@pytest.fixture
def gated() -> tgfx.GatedModule:
    torch.manual_seed(0)
    made = tgfx.transform(Residual(), torch.randn(*EXAMPLE))
    close_some_(made)
    return made.eval()


def test_prices_of_nodes_add_up(gated: tgfx.GatedModule) -> None:
    data = page_data(gated)
    for kind in ("flops", "params"):
        assert sum(node[kind] for node in data["nodes"]) == data["totals"][kind] == gated.total(kind)
        now = data["now"]
        assert sum(now["nodes"][kind]) == now["totals"][kind] == float(gated.cost(kind))


def test_shapes_now_are_those_of_the_compact_model(gated: tgfx.GatedModule) -> None:
    compact = tgfx.shrink(gated)
    seen: dict[str, list[int]] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                seen[n.name] = list(result.shape)
            return result

    with torch.no_grad():
        Watch(compact).run(torch.randn(*EXAMPLE))
    data = page_data(gated, compact=compact)
    shapes = data["now"]["nodes"]["shape"]
    checked = [node["name"] for node, shape in zip(data["nodes"], shapes, strict=True) if shape == seen[node["name"]]]
    assert len(checked) == len(data["nodes"]) == len(seen)
    assert data["comparison"]["after"] == shapes
    assert data["comparison"]["parameters"][1] == sum(p.numel() for p in compact.parameters())
    assert data["comparison"]["flops"] == [gated.total("flops_all"), float(gated.cost("flops_all"))]
    (stem,) = [layer for layer in data["comparison"]["layers"] if layer["layer"] == "stem"]
    assert stem["before"] == [8, 3, 1, 1] and stem["after"] == list(compact.stem.weight.shape)


def test_groups_have_members_ties_masks_and_lines(gated: tgfx.GatedModule) -> None:
    data = page_data(gated)
    names = [node["name"] for node in data["nodes"]]
    stem = data["groups"][0]
    assert stem["name"] == "stem" and stem["frozen"] is None
    members = {(member["name"], member["axis"]) for member in stem["members"]}
    assert {("stem.weight", 0), ("stages.0.0.conv1.weight", 1), ("head.weight", 1)} <= members
    assert all(names[i].startswith("stem") for m in stem["members"] if m["name"] == "stem.weight" for i in m["nodes"])
    added = [tie for tie in stem["ties"] if tie["op"] == "add"]
    assert len(added) == 2 and all(data["nodes"][tie["node"]]["op"] == "add" for tie in added)
    assert "self.bn2(self.conv2" in added[0]["line"]["code"]
    assert added[0]["line"]["place"].split(":")[0].endswith("support/view_models.py")
    state = data["now"]["groups"][0]
    opened = gated.gates["stem"].is_open()
    assert state["mask"] == "".join("01"[int(value)] for value in opened) and state["open"] == int(opened.sum())
    assert sum(state["latent"]["counts"]) == len(opened)
    assert state["marginal"]["flops"][0] == pytest.approx(float(gated.marginal("flops")["stem"].mean()), rel=1e-12)
    (head,) = [group for group in data["groups"] if group["frozen"]]
    assert head["name"] == "head" and head["frozen"]["reason"] == "makes the model's output"
    assert head["frozen"]["line"]["code"].startswith("return self.head(")


def test_the_polynomial_is_the_cost(gated: tgfx.GatedModule) -> None:
    data = page_data(gated)

    def value(term: object) -> float:
        if not isinstance(term, list):
            return float(term)  # type: ignore[arg-type]
        sign, *rest = term
        if sign == "n":
            return data["now"]["groups"][rest[0]]["open"]
        parts = [value(part) for part in rest]
        return {"+": sum(parts), "*": float(np.prod(parts)), "^": parts[0] ** parts[-1]}[sign]

    for kind in ("flops", "params"):
        assert sum(map(value, data["cost"][kind]["terms"])) == float(gated.cost(kind))


def test_nodes_carry_the_groups_of_their_channels() -> None:
    class Cat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.cat([self.left(x), self.right(x)], 1))

    data = page_data(Cat(), torch.randn(1, 3, 4, 4))
    carried = {node["op"]: [data["groups"][g]["name"] for g in node["groups"]] for node in data["nodes"]}
    assert carried["cat"] == ["left", "right"]
    assert carried["input"] == [] and carried["output"] == []


def test_what_is_not_gated_can_be_shown_too() -> None:
    plain = page_data(Residual(), torch.randn(*EXAMPLE))
    assert plain["name"] == "Residual" and plain["now"]["totals"] == plain["totals"]
    nothing = page_data(nn.Linear(3, 2), torch.randn(1, 3))
    assert nothing["totals"]["params"] == 8 and [g["name"] for g in nothing["groups"] if not g["frozen"]] == []
    compact = tgfx.shrink(tgfx.transform(Residual(), torch.randn(*EXAMPLE)))
    assert page_data(compact, torch.randn(*EXAMPLE))["name"] == compact._get_name()
    with pytest.raises(InputError):
        page_data(3)  # type: ignore[arg-type]
    with pytest.raises(AlreadyGatedError):
        page_data(nn.Sequential(tgfx.transform(Residual(), torch.randn(*EXAMPLE))))


@pytest.mark.parametrize("granularity", ["weight", "layer", ("channel", "layer"), "connection", "tap"])
def test_other_granularities(granularity: str) -> None:
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE), granularity=granularity).eval()
    close_some_(gated) if granularity != "weight" else None
    first = next(iter(gated.gates.values()))
    with torch.no_grad():
        first.weight.view(-1)[1:] = -1.0
    data = page_data(gated)
    json.dumps(data, allow_nan=False)
    for kind in ("flops", "params"):
        assert data["now"]["totals"][kind] == float(gated.cost(kind))
        assert sum(data["now"]["nodes"][kind]) == pytest.approx(float(gated.cost(kind)), rel=1e-12)
    assert data["now"]["groups"][0]["open"] == first.open_count()


def test_closed_branches_are_gone() -> None:
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE), granularity="layer").eval()
    name, gate = next(iter(gated.gates.items()))
    gate.set_open_(torch.tensor([False]))
    data = page_data(gated)
    gone = {data["nodes"][i]["path"] for i in data["now"]["nodes"]["gone"]}
    assert "stages.0.0.conv1" in gone and "stages.1.0.conv1" not in gone, name
    assert data["now"]["totals"]["params"] == float(gated.cost("params")) < gated.total("params")


def test_many_gates_are_drawn_as_shares() -> None:
    gated = tgfx.transform(nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 2)), torch.randn(1, 4)).eval()
    gated.gates["0"].set_open_(torch.arange(3000) < 1500)
    state = page_data(gated)["now"]["groups"][0]
    assert "mask" not in state and len(state["shares"]) == 1024
    assert state["shares"][0] == 1 and state["shares"][-1] == 0 and state["open"] == 1500


def test_removed_channels_are_marked_after_compaction() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE))
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))
    gated.gates["stem"].set_open_(torch.arange(8) < 5)
    tgfx.compact_(gated, optimizer, patience=0)
    data = page_data(gated.eval())
    assert data["now"]["groups"][0]["mask"] == "11111---"
    assert data["now"]["totals"]["flops"] == float(gated.cost("flops"))


def test_the_model_is_left_as_it_is(gated: tgfx.GatedModule) -> None:
    gated.train()
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    random = torch.get_rng_state()
    page_data(gated)
    assert gated.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in gated.state_dict().items())


def test_a_history_becomes_columns() -> None:
    history = History(["a", "b"])
    for step in range(1, 2001):
        history.add({"step": step, "loss": float("nan") if step == 1 else 1 / step, "phase": "close"}, (step // 500, 3))
    data = history_data(history, 100)
    assert data is not None
    assert len(data["columns"]["step"]) <= 101 and data["columns"]["step"][-1] == 2000
    assert data["columns"]["loss"][0] is None
    assert data["kept"] == {"step": [1, 500, 1000, 1500, 2000], "open": [[0, 3], [1, 3], [2, 3], [3, 3], [4, 3]]}
    with pytest.raises(InputError):
        history_data([1, 2])  # type: ignore[arg-type]


def test_budgets_come_from_the_argument_or_the_history(gated: tgfx.GatedModule) -> None:
    history = History(["stem"])
    history.add({"step": 1, "target_flops": 0.4}, (3,))
    assert page_data(gated, history=history)["budget"] == {"flops": 0.4}
    assert page_data(gated, budget={"params": 0.3}, history=history)["budget"] == {"params": 0.3}


def test_a_foreign_compact_model_is_refused(gated: tgfx.GatedModule) -> None:
    other = fx.symbolic_trace(nn.Linear(3, 2))
    with pytest.raises(InputError, match="does not run"):
        page_data(gated, compact=other)
    with pytest.raises(InputError, match="not a compact model"):
        page_data(gated, compact=nn.Linear(3, 2))
