"""The exception tree: what it says, what it derives from, and that it travels between processes."""

import copy
import pickle
from collections.abc import Callable

import pytest

from tgfx import errors
from tgfx.errors import InputError, PassError, TgfxError

CLASSES = [getattr(errors, name) for name in errors.__all__]
PARTS = {"expected": "a module", "found": "an int", "where": "transform(model)", "fix": "pass a module"}


def build(cls: type[TgfxError], **parts: str) -> TgfxError:
    extra = {"pass_name": "couple"} if cls is PassError else {}
    return cls("no good", **extra, **parts)


def test_all_lists_every_class_of_the_tree() -> None:
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert defined == set(errors.__all__)
    assert all(issubclass(cls, TgfxError) and cls.__doc__ for cls in CLASSES)


def test_message_shows_the_parts_one_a_line() -> None:
    assert str(TgfxError("no good", **PARTS)) == (
        "no good\n  expected: a module\n  found:    an int\n  where:    transform(model)\n  fix:      pass a module"
    )


def test_parts_left_out_are_not_shown() -> None:
    assert str(TgfxError("no good")) == "no good"
    assert str(TgfxError("no good", fix="stop")) == "no good\n  fix:      stop"


def test_an_empty_part_is_still_a_part() -> None:
    assert str(TgfxError("no good", found="")) == "no good\n  found:    "


def test_part_of_several_lines_stays_aligned() -> None:
    assert str(TgfxError("no good", where="a.py:1\nb.py:2")).endswith("  where:    a.py:1\n            b.py:2")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_every_error_keeps_its_parts_and_survives_pickle(cls: type[TgfxError], clone: Callable) -> None:
    error = build(cls, **PARTS)
    twin = clone(error)
    assert type(twin) is cls
    assert twin.__dict__ == error.__dict__
    assert twin.args == error.args
    assert str(twin) == str(error)
    assert {name: getattr(twin, name) for name in PARTS} == PARTS


def test_pass_error_names_the_pass_and_chains_the_cause() -> None:
    with pytest.raises(PassError, match=r"^pass couple: no axis") as caught:
        try:
            raise KeyError("x")
        except KeyError as cause:
            raise PassError("no axis", pass_name="couple", where="conv1") from cause
    assert caught.value.pass_name == "couple"
    assert caught.value.where == "conv1"
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("builtin", [TypeError, ValueError])
def test_bad_input_is_caught_as_the_builtin_a_user_expects(builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise InputError("not a module")
