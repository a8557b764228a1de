"""The cost polynomial as nested lists that the page typesets and evaluates.

["+", a, b, ...]   ["*", a, b, ...]   ["^", base, exponent]   ["n", group index]   ["gate", group index, slot]
["?", name] for a symbol that stands for none of these; numbers are numbers.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from tgfx.view.subject import Subject

MOST = 4000  # terms that are written out


def polynomial(subject: Subject, kind: str) -> dict[str, Any]:
    """Terms of the sum."""
    expression = subject.gated.cost_expr(kind) if subject.gated is not None else subject.cost.expression(kind)
    names = {group.name: index for index, group in enumerate(subject.groups)}
    terms = sympy.Add.make_args(expression)
    return {
        "terms": [_tree(term, names) for term in terms[:MOST]],
        "left_out": max(0, len(terms) - MOST),
    }


def _tree(expression: sympy.Expr, names: dict[str, int]) -> Any:
    if expression.is_Number:
        return int(expression) if expression.is_Integer else float(expression)
    if expression.is_Symbol:
        return _symbol(str(expression), names)
    if expression.is_Pow:
        return ["^", *(_tree(part, names) for part in expression.args)]
    sign = "+" if expression.is_Add else "*"
    return [sign, *(_tree(part, names) for part in expression.args)]


def _symbol(text: str, names: dict[str, int]) -> list[Any]:
    inside = re.fullmatch(r"n\[(.*)\]", text, re.DOTALL)
    if inside and inside[1] in names:
        return ["n", names[inside[1]]]
    slot = re.fullmatch(r"(.*)\[(\d+)\]", text, re.DOTALL)
    if slot and slot[1] in names:
        return ["gate", names[slot[1]], int(slot[2])]
    return ["?", text]
