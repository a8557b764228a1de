"""Front ends in turn, until the graph of one computes what the model does.

Plain fx cannot notice that it takes the wrong way where the model asks for the type of a value:
y * (2. if type(x) is torch.Tensor else 1.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import TypeVar

from tgfx.capture.quiet import quiet
from tgfx.capture.reference import Reference, run_kept
from tgfx.errors import VerificationError
from tgfx.ir.draws import same_draws
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source

_WITHOUT = ((), ("plain",), ("plain", "by sizes"))  # each leads to another front end than the one before

T = TypeVar("T")


def by_any_front_end(
    reference: Reference, capture: Callable[[Reference, Collection[str]], Source], understood: Callable[[Source], T]
) -> T:
    """`understood(graph)`, an error where the graph is another program than the model; the first one if all are."""
    first: Exception | None = None
    for without in _WITHOUT:
        try:
            source = capture(reference, without)
        except Exception:
            if first is None:
                raise
            break
        try:
            return understood(source)
        except Exception as error:
            first = first or error
            if source.front_end != "fx" or not _is_another_program(source, reference, error):
                break
    assert first is not None
    raise first


def _is_another_program(source: Source, reference: Reference, error: Exception) -> bool:
    if isinstance(error, VerificationError):
        return True
    if reference.rehearsed:
        reference.compute()
    args, kwargs = copy.deepcopy((source.args, source.kwargs))
    try:
        with quiet(), same_draws():
            return not reference.is_met_by(run_kept(source.module, args, kwargs, Remembered()))
    except Exception:
        return True
