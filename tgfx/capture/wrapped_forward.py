"""A forward behind a wrapper, called with the parameters that it has inside.

    @functools.wraps(f)
    def wrapper(self, *args, **kwargs): ...          forward(self, x, mask=None, **more)    ->    (x, mask)

What goes beyond the named parameters is no input of the graph: giving it is an error, as of any unknown argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_Parameter = inspect.Parameter


def named_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """In order, without the module itself."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def takes_more(function: Callable) -> bool:
    """Whether it has *args or **kwargs besides, which torch.export leaves out too, and fixes less than fx would."""
    return len(named_parameters(function)) + 1 < len(inspect.signature(function).parameters)


def called_by_name(function: Callable, parameters: dict[str, inspect.Parameter]) -> Callable:
    """function(module, *values), where a value that is the default itself is left out: a wrapper may look for it."""

    def call(module: Any, *values: Any) -> Any:
        positional, by_name = [], {}
        for parameter, value in zip(parameters.values(), values, strict=True):
            required = parameter.default is _Parameter.empty and parameter.kind is not _Parameter.KEYWORD_ONLY
            if required or parameter.kind is _Parameter.POSITIONAL_ONLY:
                positional.append(value)
            elif value is not parameter.default:
                by_name[parameter.name] = value
        return function(module, *positional, **by_name)

    return call
