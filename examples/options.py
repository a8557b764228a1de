"""Kinds of numbers on a command line: argparse tells the option and what is wrong with it."""

from __future__ import annotations

from argparse import ArgumentTypeError


def share(text: str) -> float:
    """Of what there is: more than nothing and at most all of it."""
    found = _number(text)
    if not 0 < found <= 1:
        raise ArgumentTypeError(f"{text} is no share: above 0 and at most 1")
    return found


def positive(text: str) -> float:
    found = _number(text)
    if not 0 < found < float("inf"):
        raise ArgumentTypeError(f"{text} is not above 0")
    return found


def count(text: str) -> int:
    try:
        found = int(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no whole number") from error
    if found < 1:
        raise ArgumentTypeError(f"{text} is not above 0")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is no number") from error
