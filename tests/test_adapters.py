"""`tgfx.lightning`, `tgfx.hf` and `tgfx.distributed` are there after `import tgfx`, at no cost before they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tgfx

ROOT = Path(__file__).parent.parent
PACKAGES = ("lightning", "transformers", "accelerate")


def in_a_new_process(*lines: str) -> None:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_import_brings_no_trainer() -> None:
    in_a_new_process(
        "import sys, tgfx",
        f"assert not {{name.partition('.')[0] for name in sys.modules}} & set({PACKAGES!r})",
        "assert {'lightning', 'hf', 'distributed', 'transform'} <= set(dir(tgfx))",
    )


@pytest.mark.parametrize(
    ("name", "package", "attribute"),
    [
        ("lightning", "lightning", "GateCallback"),
        ("hf", "transformers", "GateCallback"),
        ("distributed", None, "gather"),
    ],
)
def test_adapters_are_found_on_first_use(name: str, package: str | None, attribute: str) -> None:
    if package is not None:
        pytest.importorskip(package)
    in_a_new_process(
        "import tests.support.torchvision_ops",  # before torchvision, which trainers import
        "import tgfx",
        f"tgfx.{name}.{attribute}",
        f"from tgfx import {name}",
    )


@pytest.mark.parametrize(("name", "package"), [("lightning", "lightning"), ("hf", "transformers")])
def test_a_missing_package_is_named(name: str, package: str) -> None:
    in_a_new_process(
        "import sys, tgfx",
        f"sys.modules[{package!r}] = None",
        f"try: tgfx.{name}",
        f"except tgfx.errors.MissingPackageError as error: assert 'pip install tgfx[{name}]' in str(error)",
        "else: raise SystemExit('no error')",
    )


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        tgfx.keras  # noqa: B018
