"""What Python asks of a traced value without an operator: hashes, texts, types. Never a wrong number at other sizes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tgfx.errors import CaptureError, VerificationError

logger = logging.getLogger(__name__)
EXAMPLE = (2, 5, 6)
OTHERS = [(1, 5, 6), (3, 5, 6), (2, 7, 6), (2, 6, 6), (1, 1, 6)]


class Two(nn.Module):
    """Two layers with a question in between; `by_export`: fx does not follow it."""

    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor], by_export: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.ask, self.by_export = nn.Linear(6, 16), nn.Linear(16, 3), ask, by_export

    def forward(self, x: Tensor) -> Tensor:
        if self.by_export:
            x = x.clone()
            x[:, torch.arange(1)] = x[:, :1] * 2
        return self.b(self.ask(x, torch.relu(self.a(x))))


@functools.lru_cache
def doubled_at_seven(size: int) -> float:
    return {7: 2.0}.get(size, 1.0)


@dataclasses.dataclass(frozen=True)
class Sizes:
    length: int
    width: int


class Pair(NamedTuple):
    length: int
    width: int


def in_a_table(x: Tensor, y: Tensor) -> Tensor:
    try:
        return y * {7: 2.0}[x.shape[1]]
    except KeyError:
        return y


def whatever_goes_wrong(x: Tensor, y: Tensor) -> Tensor:
    try:
        return y * {7: 2.0}[x.shape[1]]
    except Exception:
        return y


def kept_in_a_table(x: Tensor, y: Tensor) -> Tensor:
    table: dict[Any, float] = {}
    table[x.shape[1]] = 1.0
    table[x.shape[2]] = 2.0
    return y * sum(table.values())


def copied(x: Tensor, y: Tensor) -> Tensor:
    return y * (2.0 if copy.copy(x.shape[1]) == 7 else 1.0)


def deeply_copied(x: Tensor, y: Tensor) -> Tensor:
    return y * (2.0 if copy.deepcopy(x.shape[1]) == 7 else 1.0)


HASHED = {
    "in a set": lambda x, y: y * (2.0 if x.shape[1] in {7, 8} else 1.0),
    "in a set, true": lambda x, y: y * (2.0 if x.shape[1] in {5, 8} else 1.0),
    "batch in a set": lambda x, y: y * (2.0 if x.shape[0] in {1, 3} else 1.0),
    "dict.get": lambda x, y: y * {7: 2.0}.get(x.shape[1], 1.0),
    "a tuple as key": lambda x, y: y * {(7, 6): 2.0}.get((x.shape[1], x.shape[2]), 1.0),
    "a whole shape": lambda x, y: y * (2.0 if x.shape[1:] in {(7, 6)} else 1.0),
    "len of a set": lambda x, y: y * len({x.shape[1], x.shape[2]}),
    "lru_cache": lambda x, y: y * doubled_at_seven(x.shape[1]),
    "a frozen dataclass": lambda x, y: y * (2.0 if Sizes(*x.shape[1:]) in {Sizes(7, 6)} else 1.0),
    "KeyError": in_a_table,
    "any error": whatever_goes_wrong,
    "stored": kept_in_a_table,
    "rank": lambda x, y: y * (2.0 if x.ndim in {3} else 1.0),
    "type of numbers": lambda x, y: y * (2.0 if x.dtype in {torch.float64} else 1.0),
}
PRINTED = {
    "f-string": lambda x, y: y if f"{x.shape[1]}" != "7" else y + 1,
    "f-string with a form": lambda x, y: y if f"{x.shape[1]:03}" != "007" else y + 1,
    "f-string of repr": lambda x, y: y if f"{x.shape[1]!r}" != "7" else y + 1,
    "str": lambda x, y: y if str(x.shape[1]) != "7" else y + 1,
    "repr": lambda x, y: y if repr(x.shape[1]) != "7" else y + 1,
    "percent s": lambda x, y: y if "%s" % x.shape[1] != "7" else y + 1,  # noqa: UP031
    "percent d": lambda x, y: y if "%d" % x.shape[1] != "7" else y + 1,  # noqa: UP031
    "format": lambda x, y: y if format(x.shape[1]) != "7" else y + 1,
    "str.format": lambda x, y: y if "{}".format(x.shape[1]) != "7" else y + 1,  # noqa: UP032
    "join": lambda x, y: y if "x".join(map(str, x.shape[1:])) != "7x6" else y + 1,
    "a list": lambda x, y: y if str([x.shape[1]]) != "[7]" else y + 1,
    "a dataclass": lambda x, y: y if "=7" not in str(Sizes(x.shape[1], 6)) else y + 1,
}
COMPARED = {
    "isclose": lambda x, y: y * (2.0 if math.isclose(x.shape[1], 7) else 1.0),
    "int": lambda x, y: y * (2.0 if int(x.shape[1]) == 7 else 1.0),
    "float": lambda x, y: y * (2.0 if float(x.shape[1]) == 7 else 1.0),
    "chained": lambda x, y: y * (2.0 if 6 < x.shape[1] < 8 else 1.0),
    "max": lambda x, y: y * max([x.shape[1], 6]),
    "sorted": lambda x, y: y * sorted([x.shape[1], 6])[0],
    "sum": lambda x, y: y * sum([x.shape[1], x.shape[2]]),
    "enumerate": lambda x, y: y * sum(i * n for i, n in enumerate(x.shape)),
    "zip": lambda x, y: y * (2.0 if all(n == m for n, m in zip(x.shape[1:], (7, 6), strict=True)) else 1.0),
    "star": lambda x, y: y * math.prod([*x.shape[1:]]),
    "range": lambda x, y: y * (2.0 if x.shape[1] in range(7, 9) else 1.0),
    "in shape": lambda x, y: y * (2.0 if 7 in x.shape else 1.0),
    "NamedTuple": lambda x, y: y * (2.0 if Pair(x.shape[1], x.shape[2]) == Pair(7, 6) else 1.0),
    "dataclass": lambda x, y: y * (2.0 if Sizes(x.shape[1], x.shape[2]) == Sizes(7, 6) else 1.0),
    "copy": copied,
    "deepcopy": deeply_copied,
}
TYPES = {
    "isinstance int": lambda x, y: y * (2.0 if isinstance(x.shape[1], int) else 1.0),
    "isinstance Tensor": lambda x, y: y * (2.0 if isinstance(x, Tensor) else 1.0),
    "isinstance tuple": lambda x, y: y * (2.0 if isinstance(x.shape, tuple) else 1.0),
    "isinstance, then a size": lambda x, y: y + 1 if isinstance(x.shape[1], int) and x.shape[1] == 7 else y,
    "hasattr": lambda x, y: y * (2.0 if hasattr(x, "mask") else 1.0),
    "hasattr, then a size": lambda x, y: y + 1 if not hasattr(x, "mask") and x.shape[1] == 7 else y,
    "getattr with a default": lambda x, y: y if getattr(x, "mask", None) is None else y * x.mask,
    "getattr, then a size": lambda x, y: y + 1 if getattr(x, "mask", None) is None and x.shape[1] == 7 else y,
    "type": lambda x, y: y * (2.0 if type(x.shape) is torch.Size else 1.0),
    "callable": lambda x, y: y * (2.0 if callable(x) else 1.0),
}
REFUSED = {"batch in a set", "deepcopy", "copy"}  # no front end follows these


def transformed(model: nn.Module) -> tgfx.GatedModule | None:
    """None where tgfx says that it cannot follow the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double)).eval()
    except (CaptureError, VerificationError):
        return None


def never_wrong(model: nn.Module, run: nn.Module, expected: nn.Module | None = None) -> None:
    for shape in (EXAMPLE, *OTHERS):
        x = torch.randn(shape, dtype=torch.double)
        try:
            found = run(x)
        except Exception:
            assert shape != EXAMPLE
            continue
        torch.testing.assert_close(found, (expected or model)(x), rtol=1e-12, atol=1e-12)


ALL = {**HASHED, **PRINTED, **COMPARED, **TYPES}


@pytest.mark.parametrize("ask", ALL)
def test_right_or_an_error_at_other_sizes(ask: str) -> None:
    model = Two(ALL[ask]).double().eval()
    gated = transformed(model)
    assert (gated is None) == (ask in REFUSED)
    if gated is None:
        return
    never_wrong(model, gated)
    with torch.no_grad():
        next(iter(gated.gates.values())).weight[::2] = -1
    never_wrong(model, tgfx.shrink(gated).eval(), gated)


@pytest.mark.parametrize("ask", ALL)
def test_right_or_an_error_through_export_too(ask: str) -> None:
    model = Two(ALL[ask], by_export=True).double().eval()
    gated = transformed(model)
    if gated is not None:
        assert gated.facts.source.front_end == "export"
        never_wrong(model, gated)


@pytest.mark.parametrize("by_export", [False, True])
def test_messages_leave_sizes_free(by_export: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def tells(x: Tensor, y: Tensor) -> Tensor:
        torch._assert(x.shape[2] == 6, f"six are expected, but there are {x.shape[2]} of {x.shape[1]}")
        torch._assert(
            x.shape[2] == 6,
            f"this one stands on two lines, {x.shape[1]}, "
            f"and more" + str(x.shape[0]),
        )  # fmt: skip
        torch._assert(x.ndim == 3, "%s of %s" % (x.shape[0], x.shape[1]))  # noqa: UP031
        print(x.shape, f"{x.shape[1]}")
        logger.debug("%s", x.shape[1])
        logger.debug(f"{x.shape[1]}")
        logger.info("{}".format(x.shape))  # noqa: UP032
        return y

    model = Two(tells, by_export).double().eval()
    gated = tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double)).eval()
    assert gated.facts.source.front_end == ("export" if by_export else "fx")
    for shape in OTHERS[:4]:
        x = torch.randn(shape, dtype=torch.double)
        torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=1e-12)


def test_a_text_that_is_more_than_a_message_is_a_question() -> None:
    seen: set[str] = set()

    def remembers(x: Tensor, y: Tensor) -> Tensor:
        seen.clear()
        torch._assert(y.shape[2] == 16, str(seen.add(f"{x.shape[1]}")))
        return y + 1 if "7" in seen else y

    model = Two(remembers).double().eval()
    gated = transformed(model)
    if gated is not None:
        never_wrong(model, gated)


def test_tables_of_the_model_keep_nothing_that_later_calls_would_find() -> None:
    table: dict[int, Any] = {}

    def looks_up(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] not in table:
            table[x.shape[1]] = x.shape[1] * 2
        return y * table[x.shape[1]]

    model = Two(looks_up).double().eval()
    x = torch.randn(EXAMPLE, dtype=torch.double)
    expected = model(x)
    for _ in range(2):
        table.clear()
        gated = tgfx.transform(model, x).eval()
        torch.testing.assert_close(gated(x), expected, rtol=1e-12, atol=1e-12)
        for run in (model, gated):
            torch.testing.assert_close(run(x), expected, rtol=1e-12, atol=1e-12)
    never_wrong(model, gated)


def test_tensors_as_keys_are_told_apart_by_identity() -> None:
    def keeps(x: Tensor, y: Tensor) -> Tensor:
        factors = {x: 2.0, y: 3.0}
        return y * factors[x] + y * factors[y] + (1 if y * 1 in {y: 1} else 0)

    model = Two(keeps).double().eval()
    gated = tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double)).eval()
    for shape in (EXAMPLE, *OTHERS):
        x = torch.randn(shape, dtype=torch.double)
        torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("granularity", ["channel", "head", "layer"])
def test_the_next_front_end_is_tried_where_fx_went_another_way(granularity: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            h = h + self.b(h) * (2.0 if callable(x) else 1.0)
            return self.c(self.attention(h, h, h)[0])

    model = Model().double().eval()
    gated = tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double), granularity=granularity).eval()
    assert gated.facts.source.front_end == "export"
    never_wrong(model, gated)


def test_a_choice_is_found_by_the_next_front_end_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 3)
            self.choice = tgfx.Choice([nn.Linear(16, 16), nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.choice(torch.relu(self.a(x))) * (2.0 if callable(x) else 1.0))

    model = Model().double().eval()
    gated = tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double)).eval()
    assert "choice" in gated.gates
    never_wrong(model, gated)


def test_the_first_error_is_told_where_no_front_end_does_what_the_model_does() -> None:
    model = Two(lambda x, y: y * (2.0 if type(x) is Tensor else 1.0)).double().eval()
    with pytest.raises(VerificationError, match="does not compute what the model does"):
        tgfx.transform(model, torch.randn(EXAMPLE, dtype=torch.double))
