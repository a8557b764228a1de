"""Latency as a kind of cost, and budgets that stop at fast counts."""

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data
from tests.support.latency_models import calls, counts, gated_model
from tests.support.latency_tables import BLOCK, in_blocks, smooth, table_for
from tests.support.training import loader, small_gated
from tgfx.errors import BudgetError, GranularityError, InputError, TrainingError
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import LatencyTable
from tgfx.training.stops import fast_stops

CONV = LayerShape("conv", 96, 128, space=(8, 8), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))


# -- a kind of cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [name for name in BUDGET_MODELS if name != "transformer"])
def test_cost_is_the_sum_over_the_layers_of_the_cut_model(model: str) -> None:
    """Looked up for each layer of the shrunk model; all its counts are measured ones or exact by the formula."""
    gated = gated_model(model)
    table = table_for(gated, whole=1000.0)
    gated.use_latency(table)
    assert gated.total("latency") == pytest.approx(1000.0, rel=1e-9)
    constant = 1000.0 - sum(in_blocks(c.shape, c.shape.channels_in, c.shape.channels_out) for c in calls(gated))
    opened = torch.from_numpy(np.append(gated.open_slots(), True))
    expected = constant
    for call in calls(gated):
        slots = [torch.from_numpy(gated.facts.coupling.slots_of(ids.numpy())) for ids in (call.ins, call.outs)]
        ins, outs = (int(opened[own].all(0).sum()) for own in slots)
        expected += table.lookup(call.shape, ins, outs)
    assert float(gated.cost("latency")) == pytest.approx(expected, rel=1e-12)
    assert float(gated.ratio("latency")) == pytest.approx(expected / 1000.0, rel=1e-9)
    again = {(m.weight.shape[0], m.weight.shape[1]) for m in tgfx.shrink(gated).modules() if isinstance(m, nn.Linear)}
    linear = [c for c in calls(gated) if c.shape.op == "linear"]
    assert len(again) == len(linear)


def test_layers_of_the_shrunk_model_have_the_counts_that_were_priced() -> None:
    gated = gated_model("depthwise")
    compact = tgfx.shrink(gated)
    opened = np.append(gated.open_slots(), True)
    for call in calls(gated):
        layer = compact.get_submodule(call.node)
        counted = [
            int(opened[gated.facts.coupling.slots_of(ids.numpy())].all(0).sum()) for ids in (call.ins, call.outs)
        ]
        if isinstance(layer, nn.Linear):
            assert counted == [layer.in_features, layer.out_features]
        else:
            assert counted == [layer.in_channels, layer.out_channels]
            assert call.shape.groups_with(counted[0]) == layer.groups


def test_closed_branches_cost_nothing() -> None:
    gated = gated_model("residual", granularity=("channel", "layer"))
    gated.use_latency(table_for(gated))
    branch = next(group.name for group in gated.facts.coupling.groups if group.kind == "layer")
    for gate in gated.gates.values():
        gate.set_open_(torch.ones_like(gate.weight, dtype=torch.bool))
    before = float(gated.cost("latency"))
    gated.gates[branch].set_open_(torch.zeros(1, dtype=torch.bool))
    inside = [c.shape for c in calls(gated) if c.node in ("a", "b")]
    assert len(inside) == 2
    saved = sum(in_blocks(shape, shape.channels_in, shape.channels_out) for shape in inside)
    assert before - float(gated.cost("latency")) == pytest.approx(saved, rel=1e-9)


def test_marginal_and_gradient() -> None:
    gated = gated_model("residual").use_latency(table_for(gated_model("residual")))
    marginal = gated.marginal("latency")
    assert set(marginal) == set(gated.gates) and all(bool((m > 0).all()) for m in marginal.values())
    gated.train()
    loss = gated.budget_loss(latency=0.3, weight=1.0)
    loss.backward()
    price = {name: m / gated.total("latency") for name, m in gated.marginal("latency").items()}
    gap = 2 * (gated.ratio("latency").item() - 0.3)
    for name, gate in gated.gates.items():
        assert torch.allclose(gate.weight.grad.double(), gap * price[name].double(), rtol=1e-3)
    # in train mode prices follow the trainable gate, within 1e-5 of a channel
    assert gated.ratio("latency").item() == pytest.approx(gated.eval().ratio("latency").item(), rel=1e-2)


def test_marginal_is_the_way_from_half_as_many() -> None:
    gated = gated_model("plain").use_latency(table_for(gated_model("plain")))
    for gate in gated.gates.values():
        gate.set_open_(torch.arange(gate.weight.numel()) < 48)
    before, slope = float(gated.cost("latency")), float(gated.marginal("latency")["0"][0])
    gated.gates["0"].set_open_(torch.arange(64) < 24)
    assert (before - float(gated.cost("latency"))) / 24 == pytest.approx(slope, rel=0.02)
    gated.gates["0"].set_open_(torch.arange(64) < 47)
    assert float(gated.cost("latency")) > before  # one channel less, and slower


def test_expression_names_every_layer() -> None:
    gated = gated_model("plain").use_latency(table_for(gated_model("plain")))
    text = str(gated.cost_expr("latency"))
    assert all(f"ms[{call.node}]" in text for call in calls(gated)) and "n[0]" in text


def test_without_a_table() -> None:
    gated = gated_model()
    for ask in (gated.cost, gated.total, gated.ratio, gated.cost_expr, gated.marginal, gated.cheapest):
        with pytest.raises(BudgetError, match="no latency table"):
            ask("latency")
    for call in (
        lambda: gated.train().budget_loss(latency=0.5),
        lambda: gated.budget_loss(latency=0.5, weight=1.0),
        lambda: tgfx.finish(gated, latency=0.5),
        lambda: tgfx.fit(gated, loader(), F.cross_entropy, budget={"latency": 0.5}, progress=False),
    ):
        with pytest.raises(BudgetError, match="no latency table") as caught:
            call()
        assert "use_latency" in caught.value.fix


def test_what_cannot_have_a_latency() -> None:
    weights = tgfx.transform(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(1, 4), granularity="weight")
    with pytest.raises(GranularityError):
        weights.use_latency(LatencyTable({CONV: {(96, 128): 1.0}}))
    with pytest.raises(BudgetError):
        weights.cost("latency")
    with pytest.raises(InputError):
        gated_model().use_latency({"conv": 1.0})  # type: ignore[arg-type]
    with pytest.raises(InputError):
        tgfx.latency.attach(nn.Linear(2, 2), LatencyTable({}))  # type: ignore[arg-type]


def test_copies_keep_the_table_and_reports_show_it() -> None:
    gated = gated_model().use_latency(table_for(gated_model(), whole=1.5))
    stored = io.BytesIO()
    torch.save(gated, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated)), torch.load(stored, weights_only=False)):
        assert float(twin.cost("latency")) == float(gated.cost("latency"))
    assert f"of {gated.total('latency'):.3f} ms" in str(gated.report())
    assert " ms " in str(tgfx.finish(gated, latency=0.9))


# -- budgets -------------------------------------------------------------------------------------------------


def is_fast(gated: tgfx.GatedModule) -> bool:
    """Whole blocks, or the whole group."""
    return all(n % BLOCK == 0 or n == gated.groups[name].size for name, n in counts(gated).items())


@pytest.mark.parametrize("model", ["plain", "residual", "depthwise", "dense", "mlp", "grouped"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_finish_lands_on_fast_counts_within_the_budget(model: str, share: float) -> None:
    for seed in range(2):
        gated = gated_model(model, seed)
        gated.use_latency(table_for(gated))
        finished = tgfx.finish(gated, latency=share)
        assert finished.ratio("latency") <= share + 1e-12
        assert finished.ratio("latency") == pytest.approx(float(gated.eval().ratio("latency")), rel=1e-12)
        assert share - finished.ratio("latency") < 0.12, "blocks of 8 are this coarse at most"
        assert is_fast(gated) or model == "grouped", counts(gated)


def test_a_transformer_has_a_latency_too() -> None:
    gated = gated_model("transformer")
    gated.use_latency(table_for(gated))
    finished = tgfx.finish(gated, latency=0.5)
    assert 0.35 < finished.ratio("latency") <= 0.5


def test_flops_stay_free_and_multiples_win_where_asked() -> None:
    gated = gated_model("residual").use_latency(table_for(gated_model("residual")))
    tgfx.finish(gated, latency=0.6, round_to=12)
    assert all(n % 12 == 0 or n == gated.groups[name].size for name, n in counts(gated).items())
    finished = tgfx.finish(gated_model("residual").use_latency(table_for(gated)), latency=0.6, params=0.4)
    assert finished.ratio("params") <= 0.4 and finished.ratio("latency") <= 0.6
    gated = gated_model("residual").use_latency(table_for(gated))
    tgfx.finish(gated, flops=0.5)  # a table alone changes nothing
    other = gated_model("residual")
    tgfx.finish(other, flops=0.5)
    assert counts(gated) == counts(other)


def test_budgets_that_cannot_be_met() -> None:
    gated = gated_model("plain")
    table = table_for(gated)
    everything = sum(in_blocks(c.shape, c.shape.channels_in, c.shape.channels_out) for c in calls(gated))
    gated.use_latency(replace(table, whole=2 * everything))  # half of it is no layer
    before = gated.open_slots()
    with pytest.raises(BudgetError, match=r"latency=0\.4 cannot be met"):
        tgfx.finish(gated, latency=0.4)
    assert np.array_equal(before, gated.open_slots())
    assert 0.5 < gated.cheapest("latency") < 0.52
    assert tgfx.finish(gated, latency=0.55).ratio("latency") <= 0.55


def test_training_stops_at_fast_counts() -> None:
    """fit: the budget is met at the end, by the table, and every group is in whole blocks."""
    gated = small_gated(32)
    gated.use_latency(table_for(gated))
    budget = {"latency": 0.4}
    result = tgfx.fit(gated, loader(), F.cross_entropy, budget=budget, epochs=10, lr=0.05, seed=0, progress=False)
    assert 0.25 < result.ratios["latency"] <= 0.4
    assert is_fast(gated)
    x = next(iter(loader()))[0]
    compact = tgfx.shrink(gated.eval()).eval()
    assert torch.allclose(compact(x), gated(x), atol=1e-5)


def test_budget_loss_in_a_loop() -> None:
    gated = gated_model("plain")
    for gate in gated.gates.values():
        gate.set_open_(torch.ones_like(gate.weight, dtype=torch.bool))
    gated.use_latency(table_for(gated)).train()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
    x, y = data(BUDGET_MODELS["plain"][1])
    for step in range(40):
        batch = slice(32 * (step % 8), 32 * (step % 8) + 32)
        loss = F.cross_entropy(gated(x[batch]), y[batch]) + gated.budget_loss(latency=0.5, steps=40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0.35 < float(gated.eval().ratio("latency")) <= 0.5 and is_fast(gated)


def test_compaction_keeps_the_price() -> None:
    gated = gated_model("residual")
    gated.use_latency(table_for(gated))
    tgfx.finish(gated, latency=0.5)
    before = float(gated.eval().cost("latency"))
    tgfx.compact_(gated)
    assert float(gated.eval().cost("latency")) == before
    finished = tgfx.finish(gated, latency=0.3)
    assert finished.ratio("latency") <= 0.3 and is_fast(gated)
    assert all(stops[-1] == gated.gates[name].weight.numel() for name, stops in fast_stops(gated, ["latency"]).items())


def test_checkpoints_and_another_table(tmp_path: Path) -> None:
    def run(formula, **options) -> tgfx.FitResult:
        gated = small_gated(32)
        gated.use_latency(table_for(gated, formula))
        settings = {"budget": {"latency": 0.5}, "lr": 0.05, "seed": 0, "progress": False, "epochs": 2}
        return tgfx.fit(gated, loader(), F.cross_entropy, checkpoint=tmp_path / "last.pt", **settings, **options)

    first = run(in_blocks)
    assert run(in_blocks).ratios == first.ratios  # finished already: read back
    with pytest.raises(TrainingError, match="another latency table"):
        run(smooth)
    assert run(smooth, resume=False).ratios["latency"] <= 0.5


def test_plans_need_no_table(tmp_path: Path) -> None:
    gated = gated_model("plain").use_latency(table_for(gated_model("plain")))
    finished = tgfx.finish(gated, latency=0.5)
    tgfx.save_plan(gated, tmp_path / "plan")
    x = data(BUDGET_MODELS["plain"][1])[0][:3]
    again = tgfx.load_plan(tmp_path / "plan", BUDGET_MODELS["plain"][0](), x[:1])
    with torch.no_grad():
        assert torch.equal(again.eval()(x), finished.model.eval()(x))
