"""Latency tables: measured points kept to the letter, steps between them, and tables as CSV."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tgfx
from tests.support.latency_models import gated_model
from tests.support.latency_tables import in_blocks, smooth, table_for
from tgfx.errors import InputError
from tgfx.ir.fast_counts import envelope, fast_counts, smoothed
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import LatencyTable, grid, read_csv
from tgfx.latency.csv_file import COLUMNS
from tgfx.latency.profile import filled
from tgfx.latency.surface import Surface

CONV = LayerShape("conv", 96, 128, space=(8, 8), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))
DEPTHWISE = replace(CONV, channels_out=96, groups=96, grouping="within")


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
