"""The one exception tree of tgfx: `except TgfxError` catches everything the library raises on purpose."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyGatedError",
    "BudgetError",
    "CaptureError",
    "EmptyGroupError",
    "ExportError",
    "GranularityError",
    "IgnoreError",
    "InputError",
    "LazyModuleError",
    "MissingPackageError",
    "NothingToGateError",
    "OnnxFileError",
    "OptimizerError",
    "PassError",
    "PlanError",
    "SparseFileError",
    "StrictError",
    "TgfxError",
    "TrainingError",
    "VerificationError",
]

_PARTS = ("expected", "found", "where", "fix")


class TgfxError(Exception):
    """Says what went wrong and, as far as it is known, what was expected, found, where, and what to do.

    The parts are text and stay readable as attributes; `str(error)` puts them under the message, one a line.
    """

    def __init__(
        self,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.found = found
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.message]
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None:
                head = f"  {name + ':':<10}"
                lines.append(head + str(part).replace("\n", "\n" + " " * len(head)))
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is rebuilt from `args` alone by default, which loses or lacks keyword arguments.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[TgfxError], args: tuple[Any, ...], state: dict[str, Any]) -> TgfxError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class InputError(TgfxError, ValueError, TypeError):
    """An argument of the wrong type or value: not a module, inputs that do not fit, an unknown option."""


class CaptureError(TgfxError, RuntimeError):
    """The model could not be traced by any front end."""


class NothingToGateError(TgfxError, ValueError):
    """The model has no channel that could be removed."""


class IgnoreError(TgfxError, ValueError):
    """An entry of `ignore` matches nothing in the model."""


class BudgetError(TgfxError, ValueError):
    """A budget outside (0, 1], of an unknown kind, or one that no gate assignment can meet."""


class EmptyGroupError(TgfxError, ValueError):
    """Every gate of a group is closed and the model cannot do without the group."""


class OptimizerError(TgfxError, ValueError):
    """The optimizer does not belong to the gated model."""


class TrainingError(TgfxError, RuntimeError):
    """Training cannot go on: no data, a loss that is not finite, a checkpoint of another model."""


class PlanError(TgfxError, ValueError):
    """A plan that belongs to another architecture, or a damaged file."""


class SparseFileError(TgfxError, ValueError):
    """A sparse model's file that is damaged, of another format, or of another model."""


class AlreadyGatedError(TgfxError, TypeError):
    """The model holds gates already."""


class LazyModuleError(TgfxError, ValueError):
    """The model holds lazy modules whose parameters do not exist yet."""


class MissingPackageError(TgfxError, ImportError):
    """An optional package is not installed."""


class StrictError(TgfxError):
    """`strict=True` was asked for and the analysis had to refuse something."""


class GranularityError(TgfxError, ValueError):
    """An unknown granularity, or one this model does not offer."""


class VerificationError(TgfxError, RuntimeError):
    """tgfx's own proof of a cut failed, so nothing was returned."""


class ExportError(TgfxError, RuntimeError):
    """The model cannot leave torch: an operator without an ONNX form, one that a runtime lacks, an unwritable path."""


class OnnxFileError(TgfxError, ValueError):
    """An ONNX file that is not there, damaged, or that its runtime does not take."""


class PassError(TgfxError, RuntimeError):
    """A pass failed; `pass_name` says which, and the cause is chained."""

    def __init__(self, message: str, *, pass_name: str, **parts: str | None) -> None:
        super().__init__(f"pass {pass_name}: {message}", **parts)
        self.pass_name = pass_name
