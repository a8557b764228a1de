"""G7, G8: gated and compact models are copied, saved and run without tgfx."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import nn

import tgfx
from tests.support import promises
from tests.support.chains import densities, examples, gated_at, seeds
from tests.support.random_models import Case, build, cases

# -- G7: copies --------------------------------------------------------------------------------------------


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copied = pytest.mark.parametrize("clone", [copy.deepcopy, pickled, saved])
# one model per front end and kind of gate site, instead of all
COPIED = [
    Case("image", (("CalledTwice", {"norm": True}), ("ConvNext", {"norm": "permuted"})), "pool"),
    Case("image", (("ShuffleUnit", {}), ("Constants", {"how": "full"}), ("Unknown", {"how": "fft"})), "view"),
    Case("image", (("SetItem", {"how": "zeros_like"}), ("Dropouts", {})), "conv"),
    Case("sequence", (("ByHand", {"how": "matmul", "heads": 2}), ("Frozen", {"how": "lstm"})), "norm"),
    Case("tokens", (("Rope", {"repeat": False}), ("GatedMlp", {"how": "swiglu"})), "tied"),
]  # fmt: skip
few_cases = pytest.mark.parametrize("case", COPIED, ids=lambda case: "-".join(name for name, _ in case.blocks))


@copied
@few_cases
def test_gated_model_survives_copying(case: Case, clone) -> None:
    gated = gated_at(case, 0.5, 1)
    twin = clone(gated)
    assert isinstance(twin, tgfx.GatedModule) and twin is not gated
    x = case.example(3)
    with torch.no_grad():
        expected = gated(x)
        assert torch.equal(twin(x), expected)
        assert list(twin.state_dict()) == list(gated.state_dict())
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in gated.named_parameters()]
        assert str(twin.report()) == str(gated.report())
        assert float(twin.cost("flops")) == float(gated.cost("flops"))
        promises.assert_close(tgfx.shrink(twin)(x), expected, promises.EXACT, "a copy, shrunk")
    _train_a_step(twin.train(), case)
    twin.eval()
    with torch.no_grad():
        assert torch.equal(gated(x), expected)  # the original stays where it was
        assert not torch.equal(twin(x), expected)
        promises.exact_cut(case, twin, tgfx.shrink(twin))


def _train_a_step(model: nn.Module, case: Case) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(case.example(4)).square().mean()
    if isinstance(model, tgfx.GatedModule):
        loss = loss + model.budget_loss(flops=max(0.5, model.cheapest("flops")), weight=1.0)
    loss.backward()
    optimizer.step()


@copied
@few_cases
def test_compact_model_survives_copying(case: Case, clone) -> None:
    compact = tgfx.shrink(gated_at(case, 0.5, 1)).eval()
    twin = clone(compact)
    x = case.example(3)
    with torch.no_grad():
        expected = compact(x)
        assert torch.equal(twin(x), expected)
    _train_a_step(twin.train(), case)
    with torch.no_grad():
        assert torch.equal(compact(x), expected)
        assert not torch.equal(twin.eval()(x), expected)


@few_cases
def test_state_dict_round_trip(case: Case) -> None:
    gated = gated_at(case, 0.5, 1)
    other = tgfx.transform(build(Case(**{**vars(case), "seed": 5})), case.example()).eval()
    x = case.example(3)
    with torch.no_grad():
        assert not torch.equal(other(x), gated(x))
        other.load_state_dict(gated.state_dict())
        assert torch.equal(other(x), gated(x))
        compact, again = tgfx.shrink(gated).eval(), tgfx.shrink(other).eval()
        for parameter in again.parameters():
            parameter.zero_()
        again.load_state_dict(compact.state_dict())
        assert torch.equal(again(x), compact(x))


# -- G8: real modules out ----------------------------------------------------------------------------------


@examples(25)
@given(cases(), densities, seeds)
def test_compact_model_is_plain_torch(case: Case, density: float, seed: int) -> None:
    model = build(case)
    names = [name for name, _ in model.named_parameters()]
    buffers = {name for name, _ in model.named_buffers()}
    gated = gated_at(case, density, seed)
    own = [n for n, _ in gated.named_parameters() if not n.startswith("gate_bank.")]
    assert set(own) == set(names)
    compact = tgfx.shrink(gated)
    promises.only_torch_modules(compact)
    assert {n for n, _ in compact.named_parameters()} == set(names)
    assert set(compact.state_dict()) == set(model.state_dict())
    extra = {n for n, _ in compact.named_buffers()} - buffers
    assert all(n.startswith("kept_") for n in extra), extra


def test_parameters_keep_their_order() -> None:
    """Optimizer states are matched by position."""
    for case in COPIED:
        model = build(case)
        gated = tgfx.transform(model, case.example())
        names = [n for n, _ in model.named_parameters()]
        assert [n for n, _ in gated.named_parameters() if not n.startswith("gate_bank.")] == names
        assert [n for n, _ in tgfx.shrink(gated).named_parameters()] == names


ALONE = """
import sys
for name in ("tgfx", "passes", "tests"):
    sys.modules[name] = None  # importing it fails
import torch
torch.set_num_threads(1)
for path in sys.argv[1:]:
    model, x, expected = torch.load(path, weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(x), expected), path
    model.train()(x).sum().backward()
print("ran", len(sys.argv) - 1)
"""


def test_compact_model_runs_where_tgfx_is_not(tmp_path: Path) -> None:
    paths = []
    for index, case in enumerate(COPIED):
        compact, x = tgfx.shrink(gated_at(case, 0.5, 2)).eval(), case.example()
        with torch.no_grad():
            torch.save((compact, x, compact(x)), tmp_path / f"{index}.pt")
        paths.append(str(tmp_path / f"{index}.pt"))
    done = subprocess.run([sys.executable, "-c", ALONE, *paths], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ran", str(len(COPIED))]
