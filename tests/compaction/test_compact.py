"""compact_ itself: patience, refusals that change nothing, and all that a compacted model can still do."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.compaction.test_companions import close_some, trained
from tests.support.compaction_models import MODELS, images, model
from tests.support.promises import assert_close, exact_price
from tgfx.compaction import restore_
from tgfx.errors import InputError, PlanError, TgfxError, VerificationError
from tgfx.verify import Compared


def compacted(name: str = "branched", times: int = 2) -> tgfx.GatedModule:
    """Cut twice, with gates closed, and kept by patience, on top."""
    trainer = trained(name)
    for number in range(times):
        close_some(trainer.gated, 0.6, number)
        tgfx.compact_(trainer.gated, trainer.optimizer, patience=0)
    for gate in trainer.gated.gates.values():
        mask = torch.ones(len(gate.weight), dtype=torch.bool)
        mask[-1] = len(mask) == 1
        gate.set_open_(mask)
    return trainer.gated.eval()


# -- patience --------------------------------------------------------------------------------------------------


def test_patience_counts_calls_and_forgets_when_a_gate_opens() -> None:
    gated = tgfx.transform(model("branched"), images(2))
    gate = gated.gates["c1"]

    def call(closed: list[int], patience: int = 2) -> tgfx.CompactionReport:
        left = (gated.gate_slots("c1") - gated.groups["c1"].start).tolist()
        gate.set_open_(torch.tensor([place not in closed for place in left]))
        return tgfx.compact_(gated, patience=patience)

    assert not call([0, 1, 2])
    assert not call([1, 2])
    assert call([0, 1, 2]).removed == {"c1": 2}  # 1 and 2, for the third time; 0 for the first
    assert call([0]).waiting == 1
    assert gated.gate_slots("c1").tolist()[:2] == [8, 11]
    assert call([0]).removed == {"c1": 1}
    assert call([5, 6], patience=0).removed == {"c1": 2}
    assert gated.gates["c1"] is gate and len(gate.weight) == 7


def test_default_is_closed_at_two_calls_in_a_row() -> None:
    gated = tgfx.transform(model("resnet"), images(2))
    close_some(gated)
    closed = int((~gated.open_slots()).sum())
    first = tgfx.compact_(gated)
    assert not first and first.waiting == closed and "removed 0 channels" in str(first)
    assert sum(tgfx.compact_(gated).removed.values()) == closed


def test_waiting_survives_a_checkpoint() -> None:
    gated = tgfx.transform(model("resnet"), images(2))
    close_some(gated)
    tgfx.compact_(gated)
    fresh = restore_(tgfx.transform(model("resnet"), images(2)), gated.state_dict())
    assert tgfx.compact_(fresh).removed == tgfx.compact_(gated).removed


# -- what goes on to work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_price_is_that_of_the_original(name: str) -> None:
    whole = tgfx.transform(model(name), images(2))
    gated = compacted(name)

    class Example:
        blocks: tuple[Any, ...] = ()

        def example(self) -> Tensor:
            return images(2)

    exact_price(Example(), gated, tgfx.shrink(gated))  # type: ignore[arg-type]
    for kind in ("flops", "params", "channels"):
        assert gated.total(kind) == whole.total(kind)
        assert gated.cost_expr(kind) == whole.cost_expr(kind)
        before = float(gated.cost(kind))
        slopes = gated.marginal(kind)
        assert {n: len(s) for n, s in slopes.items()} == {n: len(g.weight) for n, g in gated.gates.items()}
        assert 0 < gated.cheapest(kind) <= float(gated.ratio(kind)) <= 1
        tgfx.compact_(gated, patience=0)
        assert float(gated.cost(kind)) == before
    assert float(gated.budget_loss(flops=0.5)) >= 0


def test_report_shows_what_is_left() -> None:
    gated = compacted()
    row = next(r for r in gated.report().rows() if r["group"] == "stem")
    assert row["left"] == len(gated.gates["stem"].weight) < row["size"] == 8
    assert f"{row['open']}/{row['left']} of 8" in str(gated.report())
    assert "removed by compact_" in gated.explain("stem")


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_equal_and_can_be_compacted(name: str) -> None:
    gated, x = compacted(name), images(3)
    buffer = io.BytesIO()
    torch.save(gated, buffer)
    buffer.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(gated),
        "pickle": pickle.loads(pickle.dumps(gated)),
        "torch.save": torch.load(buffer, weights_only=False),
        "state_dict": restore_(tgfx.transform(model(name), images(2)), gated.state_dict()).eval(),
    }
    tgfx.compact_(gated, patience=0)
    compact = tgfx.shrink(gated).eval()
    for how, twin in copies.items():
        assert_close(twin(x).detach(), gated(x).detach(), 1e-12, how)
        tgfx.compact_(twin, patience=0)
        assert np.array_equal(twin.bank.recorded() < 0, gated.bank.recorded() < 0)
        assert torch.equal(tgfx.shrink(twin).eval()(x), compact(x)), how


def test_state_dict_round_trip_and_foreign_states() -> None:
    gated = compacted("resnet", times=1)
    twin = copy.deepcopy(gated)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    twin.load_state_dict(gated.state_dict())
    assert torch.equal(twin(images(2)), gated(images(2)))
    other = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    record = other["gate_bank.record"]
    gone, left = (record < 0).nonzero()[0], (record >= 0).nonzero()[0]
    record[gone], record[left] = 0, -1  # equal shapes, other channels
    with pytest.raises(RuntimeError, match="other channels were removed"):
        gated.load_state_dict(other)
    fresh = tgfx.transform(model("resnet"), images(2))
    before = copy.deepcopy(fresh.state_dict())
    for wrong in ({}, other | {"gate_bank.record": record[:-1]}, other | {"head.weight": torch.ones(2, 2)}):
        with pytest.raises(PlanError, match="another model"):
            restore_(fresh, wrong)
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())


@pytest.mark.filterwarnings("ignore:round_to=2. compact_ has removed")
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_speaks_of_the_original(name: str, tmp_path: Path) -> None:
    gated, x = compacted(name), images(3)
    for round_to in (None, 2):
        folder = tgfx.save_plan(gated, tmp_path / f"plan{round_to}", round_to=round_to)
        rebuilt = tgfx.load_plan(folder, MODELS[name]().double(), images(2)).eval()
        compact = tgfx.shrink(gated, round_to=round_to).eval()
        assert torch.equal(rebuilt(x), compact(x))
        assert rebuilt.state_dict().keys() == compact.state_dict().keys()


def test_other_precision_and_inference_after() -> None:
    gated = compacted("resnet").float()
    out = gated(images(2).float())
    assert out.dtype == torch.float32
    tgfx.compact_(gated, patience=0)
    assert_close(gated(images(2).float()).detach().double(), out.detach().double(), 1e-5, "float")


# -- refusals ----------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):  # as DistributedDataParallel
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x).relu()
        return (self.b(x), self.aux(x)) if self.training else self.b(x)


def snapshot(trainer: Any) -> tuple[Any, ...]:
    gated, optimizer = trainer.gated, trainer.optimizer
    return (
        gated.code,
        {n: (id(t), t.detach().clone()) for n, t in gated.state_dict(keep_vars=True).items()},
        {n: id(m) for n, m in gated.named_modules()},
        [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        {
            id(p): {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()}
            for p, s in optimizer.state.items()
        },
        torch.get_rng_state(),
        gated.training,
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_errors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained()
    gated, optimizer = trainer.gated, trainer.optimizer
    close_some(gated)
    partial, stranger = torch.optim.SGD(gated.stem.parameters(), lr=0.1), nn.Linear(1, 1)
    before = snapshot(trainer)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (optimizer, {"patience": -1}),
        (optimizer, {"patience": True}),
        (optimizer, {"ema": stranger}),
        (optimizer, {"scaler": object()}),
        ("adam", {}),
        (partial, {}),
        (torch.optim.LBFGS(gated.parameters()), {}),
    ]
    for own, options in wrong:
        with pytest.raises(InputError):
            tgfx.compact_(gated, own, **{"patience": 0, **options})
        assert same(snapshot(trainer), before), options
    with monkeypatch.context() as patch:
        patch.setattr("tgfx.compaction.compact.compared", lambda *_: Compared(same=False, draws=False, cause=None))
        with pytest.raises(VerificationError, match="nothing was changed"):
            tgfx.compact_(gated, optimizer, patience=0)
    with monkeypatch.context() as patch:
        patch.setattr("tgfx.compaction.rebuild.insert_gates", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tgfx.compact_(gated, optimizer, patience=0)
    assert same(snapshot(trainer), before)
    assert tgfx.compact_(gated, optimizer, patience=0)
    assert not same(snapshot(trainer), before)


def test_frozen_weights_need_no_optimizer() -> None:
    gated = tgfx.transform(model("resnet"), images(2))
    gated.stem.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in gated.parameters() if p.requires_grad], lr=0.1)
    close_some(gated)
    assert tgfx.compact_(gated, optimizer, patience=0)
    assert not gated.stem.weight.requires_grad


@pytest.mark.parametrize("wrapped", [Wrapper, lambda m: torch.compile(m, backend="eager"), lambda m: model("resnet")])
def test_wrapped_models_are_refused(wrapped: Any) -> None:
    gated = tgfx.transform(model("resnet"), images(2))
    with pytest.raises(InputError, match="only a gated model can be compacted"):
        tgfx.compact_(wrapped(gated))


def test_models_of_two_structures_are_refused() -> None:
    gated = tgfx.transform(Auxiliary(), torch.randn(2, 6))
    gated.gates["a"].set_open_(torch.arange(8) > 3)
    with pytest.raises(InputError, match="another path in train mode"):
        tgfx.compact_(gated, patience=0)
    assert gated.bank.recorded() is None and len(gated.gates["a"].weight) == 8


def test_models_compiled_in_place_are_refused() -> None:
    gated = tgfx.transform(model("resnet"), images(2))
    gated.compile(backend="eager")
    with pytest.raises(TgfxError, match="compiled in place"):
        tgfx.compact_(gated)
