"""What the model asks about types while fx traces it: answered as the example's values would, or the trace ends.

    y + 1 if isinstance(x.shape[1], int) and x.shape[1] == 7 else y      a traced size is no int, but is one in a call

`type(x)` cannot be watched; where it leads another way on the example, that shows in what comes out.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tgfx.capture.asking import is_of_torch, is_question
from tgfx.capture.traced_value import InPlaceAttribute, InPlaceProxy

_TRACED = (InPlaceProxy, InPlaceAttribute)


@contextmanager
def types_watched(tracer: Any) -> Iterator[None]:
    """While `tracer` traces. Torch's own code, which knows about traced values, is answered as ever."""
    plain = isinstance

    def asked(value: Any, kinds: Any, /) -> bool:
        if type(value) not in _TRACED:
            return plain(value, kinds)
        frame = sys._getframe(1)
        if plain(value, kinds) or tracer.is_computing or is_of_torch(frame) or not is_question(frame):
            return plain(value, kinds)
        return tracer.is_kind(value, kinds)

    with mock.patch.object(builtins, "isinstance", asked):
        yield
