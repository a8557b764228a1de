"""What gates decide on: names, alone or mixed."""

from __future__ import annotations

from typing import Any

import pytest

from tgfx.errors import GranularityError
from tgfx.granularity import parse


@pytest.mark.parametrize("given", ["channel", ("channel",), ["channel"], {"channel"}, ("channel", "channel")], ids=repr)
def test_one_name_in_any_form(given: Any) -> None:
    assert parse(given) == frozenset({"channel"})


def test_several_names() -> None:
    assert parse(("layer", "channel")) == parse(["channel", "layer"]) == {"channel", "layer"}


@pytest.mark.parametrize("given", ["layers", "", (), None, 3, ("channel", 3), ("channel", "filter"), [None]], ids=repr)
def test_unknown_names(given: Any) -> None:
    with pytest.raises(GranularityError, match="unknown granularity") as caught:
        parse(given)
    assert caught.value.found == repr(given)


def test_connections_are_gated_along_with_channels() -> None:
    assert parse("connection") == parse(("connection", "channel")) == {"channel", "connection"}


def test_taps_are_gated_along_with_channels() -> None:
    assert parse("tap") == {"channel", "tap"}
    assert parse(("tap", "connection")) == {"channel", "connection", "tap"}


def test_single_weights_stand_alone() -> None:
    assert parse("weight") == parse(("weight",)) == {"weight"}
    with pytest.raises(GranularityError, match="cannot be mixed"):
        parse(("channel", "weight"))
