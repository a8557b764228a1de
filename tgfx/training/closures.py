"""optimizer.step(closure): the gradients are made inside of the step, by LBFGS and the like several times.

What is to be done to gradients before a step is then to be done after each call of the closure, which would undo it
otherwise: it begins with zero_grad() and ends with backward(). Lightning's automatic optimization steps like this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a step's arguments, the optimizer itself first, hold a closure."""
    return callable((kwargs or {}).get("closure")) or (len(args) > 1 and callable(args[1]))


def around_closure(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    before: Callable[[], None],
    after: Callable[[bool], None],
) -> Arguments:
    """The step's arguments with `before()` and `after(first call?)` around every call of the closure."""
    named = dict(kwargs or {})
    by_name = callable(named.get("closure"))
    given = named["closure"] if by_name else args[1]
    first = True

    def closure() -> Any:
        nonlocal first
        before()
        loss = given()
        after(first)
        first = False
        return loss

    if by_name:
        return args, {**named, "closure": closure}
    return (args[0], closure, *args[2:]), named
