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


def metadata_for(subject: Subject, given: Mapping[str, str] | None, profile: str | None) -> dict[str, str]:
    """tgfx.version, torch.version, tgfx.model and, of a gated model, tgfx.budget and tgfx.kept (JSON); then the user's."""
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


def set_metadata(model: Any, entries: Mapping[str, str]) -> None:
    """Into a ModelProto, in place."""
    del model.metadata_props[:]
    for key, value in entries.items():
        model.metadata_props.add(key=key, value=value)
