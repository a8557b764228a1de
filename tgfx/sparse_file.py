"""A sparse model on disk, in a file that is as small as it is sparse: safetensors, no pickle.

    tgfx.save_sparse(tgfx.shrink(gated), "model.safetensors")
    state = tgfx.load_sparse("model.safetensors")             # a plain state_dict, bit for bit
    tgfx.load_sparse("model.safetensors", MyModel())          # or filled in at once

Each tensor is written in the smallest of the encodings of tgfx.sparse_encoding, a tied one once. Shapes, encodings and
checksums stand in the file's metadata.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from tgfx.errors import InputError, SparseFileError
from tgfx.gated import GatedModule
from tgfx.sparse_encoding import DamagedEncoding, Encoded, decode, encode
from tgfx.whole_file import whole_file

FORMAT = "tgfx-sparse"
VERSION = 1
PLACES = "::places"  # a sparse tensor's values go by its own name, where they belong by this one


def save_sparse(model: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str]) -> Path:
    """Write a plain model (or a state_dict). Written aside and moved into place: all of it or nothing."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, Any]] = {}
    known: dict[tuple, str] = {}
    for name, tensor in _state_of(model).items():
        same = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and same in known:
            about[name] = {"same_as": known[same]}
            continue
        known[same] = name
        encoded = encode(tensor)
        about[name] = {"encoding": encoded.encoding, "shape": list(tensor.shape), "crc32": _checksum(encoded)}
        # what was not encoded is the model's own memory, and two tensors may be views of it
        tensors[name] = encoded.values.clone() if encoded.encoding == "dense" else encoded.values
        if encoded.places is not None:
            tensors[name + PLACES] = encoded.places
    if clash := [name for name in about if name.endswith(PLACES) and name.removesuffix(PLACES) in about]:
        raise InputError("a tensor's name is taken", expected=f"names that do not end in {PLACES!r}", found=clash[0])
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "tensors": json.dumps(about)}
    with whole_file(target) as aside:
        save_file(tensors, aside, metadata)
    return target


def load_sparse(path: str | os.PathLike[str], model: nn.Module | None = None) -> dict[str, Tensor]:
    """The state_dict that was saved; with a model, it is filled in there too (and must fit)."""
    file = Path(path)
    try:
        state = _read(file)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SparseFileError(
            "the file cannot be read as a sparse model",
            expected="a whole file, as tgfx.save_sparse writes it",
            found=f"{type(error).__name__}: {error}",
            where=str(file),
            fix="save it again",
        ) from error
    if model is not None:
        _fill(model, state, file)
    return state


def _state_of(model: Any) -> dict[str, Tensor]:
    if isinstance(model, GatedModule):
        raise InputError(
            "a gated model holds gates, not zeros",
            expected="a plain model",
            found="GatedModule",
            fix="tgfx.save_sparse(tgfx.shrink(gated), path)",
        )
    if not isinstance(model, nn.Module | Mapping):
        raise InputError("this cannot be saved", expected="a model or a state_dict", found=type(model).__name__)
    state = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_sparse or value.is_quantized:
            raise InputError("only plain tensors can be saved", expected="name -> tensor", found=f"{name!r}: {value!r}")
        if not _is_stored(value.dtype):
            raise InputError(
                "a safetensors file cannot hold numbers of this kind",
                expected="a dtype that safetensors writes and reads (complex64 is one, complex128 is not)",
                found=f"{name}: {value.dtype}",
                fix="convert the tensor before, or keep it elsewhere",
            )
    # a conjugated or negated view has the memory, and the address, of what it is a view of
    return {name: value.resolve_conj().resolve_neg() for name, value in state.items()}


@functools.cache
def _is_stored(dtype: torch.dtype) -> bool:
    """Written and read, by the safetensors that is installed."""
    try:
        load(save({"": torch.zeros(0, dtype=torch.uint8).view(dtype)}))
    except (KeyError, ValueError, RuntimeError, SafetensorError):
        return False
    return True


def _read(file: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise DamagedEncoding(f"format {metadata.get('format')!r} instead of {FORMAT!r}")
        if metadata.get("version") != str(VERSION):
            raise DamagedEncoding(f"version {metadata.get('version')!r} instead of {VERSION}")
        about = json.loads(metadata["tensors"])
        names = set(stored.keys())
        for name, entry in about.items():
            if "same_as" in entry:
                state[name] = state[entry["same_as"]]
                continue
            places = stored.get_tensor(name + PLACES) if name + PLACES in names else None
            encoded = Encoded(entry["encoding"], stored.get_tensor(name), places)
            if _checksum(encoded) != entry["crc32"]:
                raise DamagedEncoding(f"the checksum of {name} is wrong")
            state[name] = decode(encoded, tuple(entry["shape"]))
    return state


def _checksum(encoded: Encoded) -> int:
    checksum = 0
    for part in (encoded.values, encoded.places):
        if part is not None and part.numel():
            checksum = zlib.crc32(_bytes_of(part), checksum)
    return checksum


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _fill(model: nn.Module, state: dict[str, Tensor], file: Path) -> None:
    own = model.state_dict()
    wrong = [n for n in own if n not in state or state[n].shape != own[n].shape] + [n for n in state if n not in own]
    if wrong:
        first = wrong[0]
        raise SparseFileError(
            "the file is of another model",
            expected=f"{first} {tuple(own[first].shape) if first in own else 'absent'}",
            found=f"{tuple(state[first].shape) if first in state else 'absent'}",
            where=str(file),
            fix="build the model with the same class and settings as when it was saved",
        )
    model.load_state_dict(state)


__all__ = ["load_sparse", "save_sparse"]
