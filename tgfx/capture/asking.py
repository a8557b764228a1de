"""Who asks: the model, whose answer may be about sizes, or torch.fx, Python's logging or this package.

y * (2. if x.shape[1] in {7, 8} else 1.)                 hashes a size: a question of the model's
torch._assert(h == 224, f"expected 224, got {h}")        prints one, for a message that nobody computes with
"""

from __future__ import annotations

import ast
import builtins
import linecache
import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from opcode import opname
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import fx

_OURS = tuple(os.path.dirname(path) + os.sep for path in (fx.__file__, os.path.dirname(__file__), logging.__file__))
_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_LOGGED = ("debug", "info", "warning", "error", "critical", "exception")
_TEXTS = (ast.JoinedStr, ast.FormattedValue, ast.Tuple)


@cache
def is_ours(path: str) -> bool:
    """Code that hashes and prints traced values for its own purposes."""
    return path.startswith(_OURS)


def is_question(frame: FrameType) -> bool:
    """Whether what `frame` does just now with a traced value is the model's doing."""
    return not is_ours(frame.f_code.co_filename)


def is_of_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)


def is_message(frame: FrameType) -> bool:
    """Whether the text that `frame` makes just now goes to a log or an error, and nowhere else."""
    place = _place(frame)
    tree = _parsed(frame.f_code.co_filename) if place is not None else None
    if tree is None or place is None:
        return False
    calls = [node for node in _around(tree, place) if isinstance(node, ast.Call)]
    return any(
        (_is_at(call, place) and _named(call.func, frame) is builtins.print)
        or any(_is_text_at(arg, place) for arg in _messages(call, frame))
        for call in calls
    )


def asks_for_attribute(frame: FrameType) -> bool:
    """Whether `frame` takes an attribute just now that need not be there: hasattr(x, name), getattr(x, name, other)."""
    if not opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
        return False
    place = _place(frame)
    tree = _parsed(frame.f_code.co_filename) if place is not None else None
    if tree is None or place is None:
        return True
    calls = [node for node in _around(tree, place) if isinstance(node, ast.Call) and _is_at(node, place)]
    return not any(_named(call.func, frame) is getattr and len(call.args) == 2 for call in calls)


def expects_type_error(frame: FrameType) -> bool:
    """Whether `frame` would go on another way if what it does just now were a TypeError (as einops does)."""
    place = _place(frame)
    tree = _parsed(frame.f_code.co_filename) if place is not None else None
    if tree is None or place is None:
        return False
    tries = [node for node in _around(tree, place) if isinstance(node, ast.Try)]
    handlers = [h for t in tries if any(_covers(part, place) for part in t.body) for h in t.handlers]
    return any(isinstance(name, ast.Name) and name.id == "TypeError" for h in handlers for name in _caught(h))


def _caught(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return []
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


_Place = tuple[int, int, int, int]


def _place(frame: FrameType) -> _Place | None:
    """(line, column, last line, last column) of what is being computed."""
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    if not 0 <= index < len(positions):
        return None
    first, last, start, end = positions[index]
    if first is None or last is None or start is None or end is None:
        return None
    return first, start, last, end


@lru_cache(maxsize=16)
def _parsed(path: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None


def _covers(node: ast.AST, place: _Place) -> bool:
    if not isinstance(node, ast.expr | ast.stmt):
        return any(_covers(child, place) for child in ast.iter_child_nodes(node))
    end = (node.end_lineno or 0, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= place[:2] and place[2:] <= end


def _around(tree: ast.AST, place: _Place) -> Iterator[ast.AST]:
    """What the place is in, from the outside in."""
    for child in ast.iter_child_nodes(tree):
        if _covers(child, place):
            yield child
            yield from _around(child, place)


def _messages(call: ast.Call, frame: FrameType) -> list[ast.expr]:
    """The arguments of a call that do nothing but tell."""
    function = _named(call.func, frame)
    if function is torch._assert:
        return [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "message")]
    logs = isinstance(getattr(function, "__self__", None), logging.Logger) and function.__name__ in _LOGGED
    if logs or function is builtins.print or function is warnings.warn:
        return call.args
    return []


def _named(expression: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of a module or a logger, stands for."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _named(expression.value, frame)
        if isinstance(owner, ModuleType | logging.Logger):
            return getattr(owner, expression.attr, None)
    return None


def _is_at(node: ast.expr, place: _Place) -> bool:
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == place


def _is_text_at(node: ast.expr, place: _Place) -> bool:
    """Whether the place is in `node`, with nothing around it that does more than to put texts together."""
    if not _covers(node, place):
        return False
    if _is_at(node, place):  # "{}".format(x) or str(x), say
        return True
    if not isinstance(node, _TEXTS) and not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod)):
        return False
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) and _covers(child, place)]
    return all(_is_text_at(child, place) for child in inner)
