"""A tensor with many zeros in few bytes, bit by bit what it was.

dense:   all entries
mask:    a bit per entry, and the entries that are not zero
delta4, delta8, delta16: before each entry that is not zero, how many zeros stand there, in units of 4, 8 or 16 bits;
         a unit of all ones says "that many, and go on". With it the entries that are not zero.

"Zero" means that all bits are zero, so -0.0 and every NaN come back as they were. Everything works on whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DELTAS = {"delta4": 4, "delta8": 8, "delta16": 16}
ENCODINGS = ("dense", "mask", *DELTAS)
_DENSE_ENOUGH = 0.25  # from here on a mask is never larger than the shortest deltas


class DamagedEncoding(ValueError):
    """Parts that do not belong together."""


@dataclass(frozen=True)
class Encoded:
    """One tensor: `values` are its entries (all, or those that are not zero), `places` says where they go."""

    encoding: str
    values: Tensor
    places: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.places.nbytes if self.places is not None else 0)


def encode(tensor: Tensor) -> Encoded:
    """The smallest of the encodings."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    dense = Encoded("dense", flat.reshape(tensor.shape))
    if flat.numel() == 0 or flat.element_size() not in _BITS:
        return dense
    bits = _as_bits(flat)
    living = bits != 0
    count = int(np.count_nonzero(living))
    sizes = {"dense": flat.nbytes, "mask": count * flat.element_size() + (flat.numel() + 7) // 8}
    gaps = _gaps(living) if count < _DENSE_ENOUGH * flat.numel() else None
    if gaps is not None:
        for name, width in DELTAS.items():
            sizes[name] = count * flat.element_size() + (_units_needed(gaps, width) * width + 7) // 8
    best = min(sizes, key=lambda name: sizes[name])
    if best == "dense":
        return dense
    values = torch.from_numpy(bits[living]).view(tensor.dtype)
    places = np.packbits(living) if best == "mask" else _pack_gaps(gaps, DELTAS[best])  # type: ignore[arg-type]
    return Encoded(best, values, torch.from_numpy(places))


def decode(encoded: Encoded, shape: tuple[int, ...]) -> Tensor:
    """The tensor; DamagedEncoding if the parts do not make one of this shape."""
    values, numel = encoded.values, int(np.prod(shape, dtype=np.int64))
    if encoded.encoding == "dense":
        if tuple(values.shape) != shape:
            raise DamagedEncoding(f"shape {tuple(values.shape)} instead of {shape}")
        return values
    if encoded.encoding not in ENCODINGS or encoded.places is None or values.element_size() not in _BITS:
        raise DamagedEncoding(f"encoding {encoded.encoding!r}")
    places = encoded.places.numpy()
    out = torch.zeros(numel, dtype=values.dtype)
    if encoded.encoding == "mask":
        if len(places) != (numel + 7) // 8:
            raise DamagedEncoding(f"{len(places)} bytes of mask for {numel} entries")
        where: np.ndarray = np.unpackbits(places).view(bool)
        if where[numel:].any() or int(np.count_nonzero(where)) != values.numel():
            raise DamagedEncoding("mask and values do not belong together")
        where = where[:numel]
    else:
        where = _unpack_gaps(places, DELTAS[encoded.encoding], values.numel())
        if where.size and int(where[-1]) >= numel:
            raise DamagedEncoding(f"an entry at {int(where[-1])} of {numel}")
    _as_bits(out)[where] = _as_bits(values)
    return out.reshape(shape)


def _as_bits(flat: Tensor) -> np.ndarray:
    return flat.view(_BITS[flat.element_size()]).numpy()


def _gaps(living: np.ndarray) -> np.ndarray:
    """How many zeros stand before each entry that is not zero."""
    return np.diff(np.flatnonzero(living), prepend=-1) - 1


def _units_needed(gaps: np.ndarray, width: int) -> int:
    return int((gaps // ((1 << width) - 1)).sum()) + len(gaps)


def _pack_gaps(gaps: np.ndarray, width: int) -> np.ndarray:
    """gap = full · q + r  ->  q units of all ones (`full`), then r."""
    full = (1 << width) - 1
    again, rest = np.divmod(gaps, full)
    ends = np.cumsum(again + 1) - 1
    units: np.ndarray[Any, np.dtype[np.uint8 | np.uint16]] = np.full(
        int(ends[-1]) + 1 if len(ends) else 0, full, dtype=np.uint16 if width == 16 else np.uint8
    )
    units[ends] = rest
    if width == 16:
        return units.astype("<u2").view(np.uint8)
    if width == 4:  # two in a byte; a spare one says "go on" and nothing follows
        units = np.append(units, np.uint8(full)) if len(units) % 2 else units
        return (units[0::2] << 4) | units[1::2]
    return units


def _unpack_gaps(places: np.ndarray, width: int, count: int) -> np.ndarray:
    """Positions of the entries that are not zero: a running sum over all units, read at the last of each gap."""
    full = (1 << width) - 1
    if width == 16:
        if len(places) % 2:
            raise DamagedEncoding("half a unit")
        units = places.view("<u2")
    elif width == 4:
        units = np.stack([places >> 4, places & 15], axis=1).reshape(-1)
    else:
        units = places
    ends = np.flatnonzero(units != full)
    spare = len(units) - (int(ends[-1]) + 1 if len(ends) else 0)
    if len(ends) != count or spare > (1 if width == 4 else 0):
        raise DamagedEncoding(f"{len(ends)} places for {count} values")
    return np.cumsum(units, dtype=np.int64)[ends] + np.arange(count)
