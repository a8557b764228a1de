"""From what stands on a command line to a model and its example: `package.module:factory`, `1x3x224x224`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tgfx.errors import InputError

_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_FLOATING = ("float16", "bfloat16", "float32", "float64")
_WHOLE = ("int32", "int64", "bool")


def load_model(spec: str, *, checkpoint: Path | None = None) -> nn.Module:
    """The model that `package.module:factory` or `path/to/file.py:factory` gives, in eval mode.

    The factory is a class or function without required arguments, or the model itself. A checkpoint is a state dict
    (torch.save, read with weights_only=True, or safetensors).
    """
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or not attribute:
        raise InputError(
            "the model cannot be found",
            expected="package.module:factory or path/to/file.py:factory",
            found=repr(spec),
            fix="for example torchvision.models:resnet18",
        )
    model = _made(_attribute(_imported(module_name), attribute, spec), spec)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    return model.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into `model`; nothing in the file is executed."""
    if not path.is_file():
        raise InputError("the checkpoint cannot be read", expected="a file", found=f"nothing at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            "the checkpoint cannot be read",
            expected="a state dict: torch.save(model.state_dict(), ...) or safetensors",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            where=str(path),
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise InputError(
            "the checkpoint holds no weights", expected="a state dict", found=type(state).__name__, where=str(path)
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"the checkpoint does not fit {type(model).__name__}",
            expected="the parameters and buffers of the model",
            found="\n".join(line.strip() for line in str(error).splitlines()[1:6]),
            where=str(path),
        ) from error


def parse_inputs(texts: list[str]) -> Any:
    """`1x3x224x224`, `ids=2x16:int64` ...: one example tensor each, by keyword where it has a name."""
    if not texts:
        return None
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        dtype = (match["dtype"] or "float32") if match else ""
        if match is None or dtype not in (*_FLOATING, *_WHOLE):
            raise InputError(
                "an input cannot be understood",
                expected="sizes, with a name before and a type after them if need be: 1x3x224x224, ids=2x16:int64",
                found=repr(text),
                fix=f"types: {', '.join((*_FLOATING, *_WHOLE))}",
            )
        tensor = _example(tuple(map(int, match["shape"].split("x"))), getattr(torch, dtype))
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    if args and kwargs:
        raise InputError(
            "inputs with and without a name are mixed",
            expected="all with names, or none",
            found=", ".join(texts),
            fix="give every input its parameter's name",
        )
    return kwargs or tuple(args)


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)  # 0 and 1 are in every vocabulary


def _imported(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise InputError("the model's file is not there", expected="a Python file", found=f"nothing at {name}")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules.setdefault(path.stem, module)
        found.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: models that lie in the current directory
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{name} cannot be imported",
            expected="a module that Python finds from here",
            found=str(error),
            fix="is the package installed in this environment? A file may be named by its path instead",
        ) from error


def _attribute(module: Any, dotted: str, spec: str) -> Any:
    value = module
    for part in dotted.split("."):
        if not hasattr(value, part):
            names = [n for n in dir(value) if not n.startswith("_")]
            close = [n for n in names if part.lower() in n.lower()] or names
            raise InputError(
                f"{spec} is not there",
                expected=f"a factory named {part}",
                found="no such name",
                fix="there are: " + ", ".join(close[:8]),
            )
        value = getattr(value, part)
    return value


def _made(factory: Any, spec: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise InputError(f"{spec} is not a factory", expected="a callable", found=type(factory).__name__)
    try:
        model = factory()
    except TypeError as error:
        raise InputError(
            f"{spec} cannot be called without arguments",
            expected="a factory that needs none",
            found=str(error),
            fix="write a small function that calls it with what it needs, and name that one",
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} gives no model", expected="torch.nn.Module", found=type(model).__name__)
    return model
