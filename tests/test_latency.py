"""Latency tables: measured points kept to the letter, steps between them, and budgets that stop at fast counts."""

import copy
import io
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data
from tests.support.latency_tables import BLOCK, in_blocks, smooth, table_for
from tests.support.training import loader, small_gated
from tgfx.errors import BudgetError, GranularityError, InputError, MissingPackageError, TrainingError
from tgfx.ir.fast_counts import envelope, fast_counts, smoothed
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import LatencyTable, grid, measuring, read_csv, whole
from tgfx.latency.cache import Cache, folder_for
from tgfx.latency.csv_file import COLUMNS
from tgfx.latency.needs import needs
from tgfx.latency.profile import filled
from tgfx.latency.surface import Surface
from tgfx.training.stops import fast_stops

CONV = LayerShape("conv", 96, 128, space=(8, 8), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))
DEPTHWISE = replace(CONV, channels_out=96, groups=96, grouping="within")
TINY = {"turns": 1, "whole": False}


def gated_model(name: str = "plain", seed: int = 0, **options) -> tgfx.GatedModule:
    """Gates with random latent weights, about half of them open."""
    build, shape = BUDGET_MODELS[name]
    torch.manual_seed(seed)
    gated = tgfx.transform(build(), data(shape)[0][:1], **options)
    with torch.no_grad():
        for gate in gated.gates.values():
            gate.weight.copy_(torch.randn_like(gate.weight))
            gate.weight[0].abs_()
    return gated.eval()


def counts(gated: tgfx.GatedModule) -> dict[str, int]:
    return {name: int(gate.is_open().sum()) for name, gate in gated.gates.items()}


def surface(shape: LayerShape, formula=in_blocks) -> Surface:
    return Surface(shape, {point: formula(shape, *point) for point in grid.points(shape, vary_in=True, vary_out=True)})


# -- one axis ------------------------------------------------------------------------------------------------


def test_steps_are_repeated_between_the_measured_counts() -> None:
    """From 16s and one window of residues to every count: the pattern is of period 16, so nothing is lost."""
    truth = np.array([-(-n // 8) * 8 * (1.4 if n % 8 else 1.0) for n in range(257)], dtype=float)
    known = {n: truth[n] for n in grid.counts(256)}
    assert len(known) < 50
    found = filled(known, 256)
    assert all(found[n] == truth[n] for n in known)
    assert np.abs(found[17:] / truth[17:] - 1).max() < 0.2
    assert np.abs(found[128:] / truth[128:] - 1).max() < 0.05
    assert {n for n in fast_counts(found) if n >= 16} == set(range(16, 257, 8))


def test_a_straight_line_stays_one() -> None:
    found = filled({n: 3.0 + n for n in grid.counts(300)}, 300)
    assert np.allclose(found[1:], 3.0 + np.arange(1, 301), rtol=1e-12) and found[0] == 0


def test_residues_that_were_not_measured_are_like_those_that_divide_the_same() -> None:
    known = {16: 1.0, 32: 2.0, 48: 3.0, 64: 4.0, 41: 5.125, 40: 2.5}  # an odd count takes twice the trend
    found = filled(known, 64)
    assert found[43] == pytest.approx(2 * 43 / 16) and found[44] == pytest.approx(44 / 16)


def test_envelope_never_falls_and_keeps_the_least() -> None:
    values = np.array([0, 3, 2, 5, 4, 4, 7, 6.0])
    assert envelope(values).tolist() == [0, 2, 2, 4, 4, 4, 6, 6]
    assert (np.diff(envelope(np.random.default_rng(0).random(200))[1:]) >= 0).all()


def test_fast_counts() -> None:
    stairs = np.array([0, *(8 * (-(-n // 8)) for n in range(1, 65))], dtype=float)
    assert fast_counts(stairs) == [1, *range(8, 65, 8)] or fast_counts(stairs) == list(range(8, 65, 8))
    falling = np.array([0, 9, 8, 7, 6.0])
    assert fast_counts(falling) == [4]  # fewer channels save nothing
    spike = np.array([0, *range(1, 33), 39.5, *range(34, 41)], dtype=float)  # 33 at nearly the price of 40
    assert 33 not in fast_counts(spike) and {32, 40} <= set(fast_counts(spike))
    assert fast_counts(np.zeros(5)) == [1, 2, 3, 4]
    assert (np.diff(smoothed(stairs)) > 0).all()


# -- both axes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", [in_blocks, smooth])
@pytest.mark.parametrize("shape", [CONV, DEPTHWISE, replace(CONV, groups=2, grouping="across")], ids=str)
def test_measured_points_are_exact(shape: LayerShape, formula) -> None:
    points = grid.points(shape, vary_in=True, vary_out=True)
    assert len(points) < 110
    found = surface(shape, formula)
    for ins, outs in points:
        assert float(found.value(ins, outs)) == pytest.approx(formula(shape, ins, outs), rel=1e-12)


def test_between_points() -> None:
    """Steps along both axes, and a sum of terms, which is no product of two profiles."""
    found = surface(CONV)
    for ins, outs in ((64, 104), (72, 96), (88, 120), (93, 40), (50, 72)):
        assert float(found.value(ins, outs)) == pytest.approx(in_blocks(CONV, ins, outs), rel=0.1)
    found = surface(CONV, smooth)
    for ins, outs in ((64, 100), (70, 90), (33, 77), (20, 30)):
        assert float(found.value(ins, outs)) == pytest.approx(smooth(CONV, ins, outs), rel=0.03)
    half = float(found.value(32.5, 128))
    assert half == pytest.approx((float(found.value(32, 128)) + float(found.value(33, 128))) / 2, rel=1e-12)
    assert float(found.value(0, 64)) == 0 == float(found.value(64, 0))


@pytest.mark.parametrize("shape", [CONV, DEPTHWISE], ids=str)
def test_slopes_lead_from_half_as_many_channels_and_are_positive(shape: LayerShape) -> None:
    found = surface(shape)
    for ins in range(1, 97):
        by_in, by_out = found.slopes(np.array([ins]), np.array([shape.channels_out if shape is CONV else ins]))
        assert by_in[0] > 0 and (by_out[0] > 0) == (shape is CONV)
    by_in, by_out = found.slopes(np.array([64.0]), np.array([shape.channels_out]))
    half = in_blocks(shape, 64, shape.channels_out) - in_blocks(shape, 32, shape.channels_out)
    assert by_in[0] == pytest.approx(half / 32, rel=1e-9)
    if shape is CONV:
        half = in_blocks(shape, 64, 128) - in_blocks(shape, 64, 64)
        assert by_out[0] == pytest.approx(half / 64, rel=1e-9)


def test_unknown_layers_and_bad_times() -> None:
    table = LatencyTable({CONV: {(96, 128): 1.0, (48, 128): 0.5}})
    assert table.lookup(CONV, 96, 128) == 1.0 and table.lookup(CONV, 48, 128) == 0.5
    with pytest.raises(InputError, match="does not know a layer"):
        table.lookup(DEPTHWISE, 8, 8)
    for points in ({(48, 128): 1.0}, {(96, 128): 0.0}, {(96, 128): float("nan")}):
        with pytest.raises(InputError):
            LatencyTable({CONV: points})
    with pytest.raises(InputError, match="scale"):
        LatencyTable({}, scale=0.0)


# -- CSV -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["depthwise", "grouped", "transformer"])
def test_csv_round_trip(tmp_path: Path, model: str) -> None:
    gated = gated_model(model)
    table = replace(table_for(gated, whole=3.25), scale=0.9)
    again = read_csv(table.to_csv(tmp_path / "new" / "table.csv"))
    assert again.points == table.points and (again.whole, again.scale) == (3.25, 0.9)
    assert again.digest == table.digest != table_for(gated).digest
    measured = tgfx.latency.measure(gated, device_table=tmp_path / "new" / "table.csv")
    assert measured.points == table.points


def test_template_to_fill_in(tmp_path: Path) -> None:
    gated = gated_model("depthwise")
    path = tgfx.latency.template(gated, tmp_path / "blank.csv")
    assert table_for(gated).to_csv(tmp_path / "other.csv", blank=True).read_text() == path.read_text()
    with pytest.raises(InputError, match="ms: a number above 0") as caught:
        read_csv(path)
    assert "line 2" in caught.value.where
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line + "2.5" for line in lines[1:])]))
    table = tgfx.latency.measure(gated, device_table=path)
    assert table.whole == 2.5 and {time for times in table.points.values() for time in times.values()} == {2.5}
    gated.use_latency(table)


HEAD = ",".join(COLUMNS)
GOOD = "conv,8,8,1,4x4,3x3,1x1,1x1,1x1,,1,,float32,8,8,1.5"
BAD_ROWS = {
    "no header": GOOD,
    "a column is missing": HEAD.replace(",ms", "") + "\n" + GOOD,
    "no rows": HEAD,
    "no time": f"{HEAD}\n{GOOD.removesuffix('1.5')}",
    "negative time": f"{HEAD}\n{GOOD.replace('1.5', '-1')}",
    "time is text": f"{HEAD}\n{GOOD.replace('1.5', 'fast')}",
    "infinite": f"{HEAD}\n{GOOD.replace('1.5', 'inf')}",
    "unknown op": f"{HEAD}\n{GOOD.replace('conv', 'lstm')}",
    "twice": f"{HEAD}\n{GOOD}\n{GOOD}",
    "too many channels": f"{HEAD}\n{GOOD.replace('8,8,1.5', '9,8,1.5')}",
    "no channels": f"{HEAD}\n{GOOD.replace('8,8,1.5', '0,8,1.5')}",
    "kernel is text": f"{HEAD}\n{GOOD.replace('3x3', '3 by 3')}",
    "kernel of another length": f"{HEAD}\n{GOOD.replace('3x3', '3')}",
    "groups without grouping": f"{HEAD}\n{GOOD.replace(',1,,float32', ',8,,float32')}",
    "groups that do not divide": f"{HEAD}\n{GOOD.replace(',1,,float32', ',3,within,float32')}",
    "short row": f"{HEAD}\nconv,8",
    "whole layer is missing": f"{HEAD}\n{GOOD.replace('8,8,1.5', '4,8,1.5')}",
    "not text": "\x00\xff\xfe",
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_csv(tmp_path: Path, case: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(BAD_ROWS[case].encode("latin-1"))
    with pytest.raises(InputError) as caught:
        read_csv(path)
    assert caught.value.expected and caught.value.found
    path.write_text(f"{HEAD}\n{GOOD}\n")
    assert read_csv(path).lookup(next(iter(read_csv(path).points)), 8, 8) == 1.5


def test_csv_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        tgfx.latency.measure(gated_model(), device_table=tmp_path / "none.csv")


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    gated, other = gated_model("plain"), gated_model("residual")
    with pytest.raises(InputError, match="does not know a layer"):
        gated.use_latency(table_for(other))
    assert "latency" not in gated.kinds
    frozen = gated_model("plain", ignore="0")  # its input channels were never cut
    table_for(frozen).to_csv(tmp_path / "frozen.csv")
    for attach in (
        lambda: gated.use_latency(table_for(frozen)),
        lambda: tgfx.latency.measure(gated, device_table=tmp_path / "frozen.csv"),
    ):
        with pytest.raises(InputError, match="one time only"):
            attach()
    frozen.use_latency(table_for(gated))  # which knows more than is needed


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


def calls(gated: tgfx.GatedModule):
    return gated.facts.channels.layers


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


# -- measuring -----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """One of each kind that is timed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.grouped = nn.Conv2d(12, 16, 3, groups=2, dilation=1)
        self.up = nn.ConvTranspose2d(16, 9, 4, stride=2, padding=1, output_padding=1)
        self.last = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.first(x))))
        return self.last(torch.relu(self.up(torch.relu(self.grouped(x)))).mean((2, 3)))


@pytest.fixture
def layers() -> tgfx.GatedModule:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    return tgfx.transform(Layers(), torch.randn(1, 3, 12, 12)).eval()


def test_a_real_measurement(layers: tgfx.GatedModule, tmp_path: Path) -> None:
    table = tgfx.latency.measure(layers, cache=tmp_path, turns=2)
    assert {need.shape for need in needs(layers)} == set(table.points)
    assert {shape.op for shape in table.points} == {"conv", "conv_transpose", "linear"}
    assert all(time > 0 for times in table.points.values() for time in times.values())
    assert table.whole is not None and table.whole > 0 and table.scale > 0
    assert table.about["runtime"] == "onnxruntime" and table.about["threads"] == "1"
    layers.use_latency(table)
    assert layers.total("latency") >= table.whole * (1 - 1e-9)
    assert tgfx.finish(layers, latency=1.0).ratio("latency") <= 1.0


def test_layer_models_compute_what_the_layer_would(layers: tgfx.GatedModule) -> None:
    """The ONNX file of each layer takes and gives the sizes of the cut layer."""
    import onnxruntime

    from tgfx.latency.onnx_layer import bare_model, layer_model

    compact = tgfx.shrink(layers)
    sizes: dict[str, tuple] = {}
    for call in calls(layers):
        module = compact.get_submodule(call.node)
        module.register_forward_hook(
            lambda m, args, out, node=call.node: sizes.update({node: (tuple(args[0].shape), tuple(out.shape))})
        )
    compact(torch.randn(1, 3, 12, 12))
    for call in calls(layers):
        taken, given = sizes[call.node]
        model = bare_model(call.shape, taken[1], given[1])
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        (out,) = session.run(None, {"x": np.zeros(taken, dtype=np.float32)})
        assert out.shape == given
        onnxruntime.InferenceSession(layer_model(call.shape, taken[1], given[1]), providers=["CPUExecutionProvider"])


def test_template_with_models(layers: tgfx.GatedModule, tmp_path: Path) -> None:
    path = tgfx.latency.template(layers, tmp_path / "device.csv", models=tmp_path / "models")
    lines = path.read_text().splitlines()
    names = {line.split(",")[-1] for line in lines[1:-1]}
    assert names == {file.name for file in (tmp_path / "models").iterdir()} and len(names) == len(lines) - 2


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No clock: every model takes 1 ms; what was timed is counted."""
    seen: list[int] = []

    def times(clock, models, turns) -> np.ndarray:
        seen.append(len(models))
        return np.ones(len(models)) + np.arange(len(models))[::-1]

    monkeypatch.setattr(measuring.Clock, "times", times)
    return seen


def test_the_cache_is_used(layers: tgfx.GatedModule, tmp_path: Path, timed: list[int]) -> None:
    first = tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    assert timed
    timed.clear()
    assert tgfx.latency.measure(layers, cache=tmp_path, **TINY).points == first.points and not timed
    tgfx.latency.measure(layers, cache=tmp_path, threads=2, **TINY)
    assert timed and len(list(tmp_path.iterdir())) == 2  # another number of threads is another table
    timed.clear()
    tgfx.latency.measure(layers, cache=False, **TINY)
    assert timed and len(list(tmp_path.iterdir())) == 2


DAMAGE = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no times": lambda text: json.dumps({**json.loads(text), "ms": 3}),
    "negative": lambda text: text.replace(": 1.0", ": -1.0", 1) if ": 1.0" in text else text.replace(": ", ": -", 9),
    "other machine": lambda text: text.replace("onnxruntime", "abacus"),
    "other format": lambda text: json.dumps({**json.loads(text), "format": 0}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_measured_anew(layers, tmp_path: Path, timed: list[int], kind: str) -> None:
    first = tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    (path,) = tmp_path.iterdir()
    path.write_text(DAMAGE[kind](path.read_text()))
    timed.clear()
    with pytest.warns(UserWarning, match="measured anew"):
        assert tgfx.latency.measure(layers, cache=tmp_path, **TINY).points == first.points
    assert timed and [file.name for file in tmp_path.iterdir()] == [path.name]
    timed.clear()
    tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    assert not timed


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    one, two = Cache(tmp_path, {"a": "b"}), Cache(tmp_path, {"a": "b"})
    one.times["x"], two.times["y"] = 1.0, 2.0
    one.save()
    two.save()
    assert Cache(tmp_path, {"a": "b"}).times == {"x": 1.0, "y": 2.0}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TGFX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder_for(None) == tmp_path / "xdg" / "tgfx"
    monkeypatch.setenv("TGFX_CACHE", str(tmp_path / "own"))
    assert folder_for(None) == tmp_path / "own" and folder_for(tmp_path) == tmp_path
    monkeypatch.delenv("TGFX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_for(None) == Path.home() / ".cache" / "tgfx"


def test_a_model_that_cannot_be_exported(layers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(whole, "_exported", refuse)
    with pytest.warns(UserWarning, match="no such operator"):
        table = tgfx.latency.measure(layers, cache=False, turns=1)
    assert table.whole is None and "latency" not in layers.kinds


def test_bad_arguments(layers: tgfx.GatedModule, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"runtime": "abacus"}, {"threads": 0}, {"turns": True}):
        with pytest.raises(InputError):
            tgfx.latency.measure(layers, cache=False, **options)
    with pytest.raises(InputError, match="only a gated model"):
        tgfx.latency.measure(nn.Linear(2, 2))  # type: ignore[arg-type]
    double = tgfx.transform(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(), torch.zeros(1, 4).double())
    with pytest.raises(InputError, match="float32"):
        tgfx.latency.measure(double, cache=False)
    for package in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingPackageError, match=package):
            tgfx.latency.measure(layers, cache=False)
        monkeypatch.undo()
