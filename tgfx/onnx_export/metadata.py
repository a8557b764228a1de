"""What the file says about itself: model metadata, readable by every ONNX tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tgfx._version import __version__
from tgfx.errors import InputError
from tgfx.onnx_export.subject import Subject

PREFIX = "tgfx."
EXAMPLE = "tgfx.example"


def metadata_for(subject: Subject, given: Mapping[str, str] | None, profile: str | None) -> dict[str, str]:
    """Versions, the model's name; of a gated one its budget and kept channels per group (JSON); then the user's own."""
    entries = {"tgfx.version": __version__, "torch.version": torch.__version__, "tgfx.model": subject.name}
    if profile is not None:
        entries["tgfx.profile"] = profile
    if subject.budget:
        entries["tgfx.budget"] = json.dumps(subject.budget)
    if subject.kept:
        entries["tgfx.kept"] = json.dumps({name: {"kept": k, "of": n} for name, (k, n) in subject.kept.items()})
    if given is not None and not isinstance(given, Mapping):
        raise InputError("metadata must be a mapping", expected='e.g. {"author": "me"}', found=type(given).__name__)
    for key, value in (given or {}).items():
        if not isinstance(key, str) or not isinstance(value, str) or key.startswith(PREFIX):
            raise InputError(
                "this metadata cannot be written",
                expected=f"text under names that do not begin with {PREFIX}",
                found=f"{key!r}: {value!r}",
                fix="json.dumps(...) makes text of anything",
            )
        entries[key] = value
    return entries


def example_entry(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Shapes of the example, so that whoever gets the file knows sizes that fit its free axes."""
    return {EXAMPLE: json.dumps({name: list(shape) for name, shape in shapes.items()})}


def example_shapes(model: Any) -> dict[str, list[int]]:
    """What `example_entry` wrote; empty for files from elsewhere."""
    entries = {entry.key: entry.value for entry in model.metadata_props}
    try:
        shapes = json.loads(entries.get(EXAMPLE, "{}"))
        return {str(name): [int(size) for size in shape] for name, shape in shapes.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def set_metadata(model: Any, entries: Mapping[str, str]) -> None:
    """Into a ModelProto, in place."""
    del model.metadata_props[:]
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)
