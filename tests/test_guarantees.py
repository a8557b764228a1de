"""The guarantees of the design (G1-G5, G7, G8), on every block by itself and on random chains of blocks."""

import copy
import io
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tests.support.random_models import BLOCKS, Case, build, cases, randomised, single_cases
from tgfx.errors import StrictError

SINGLE = single_cases()
each_block = pytest.mark.parametrize("case", [case for _, case in SINGLE], ids=[tag for tag, _ in SINGLE])
densities = st.sampled_from((0.5, 0.0, 0.2, 0.9))  # 0: one gate open in every group
seeds = st.integers(0, 9)


def examples(count: int) -> settings:
    """No shrinking: a chain is short, every block is tested alone as well, and it would take minutes."""
    return settings(
        max_examples=count,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def gated_at(case: Case, density: float, seed: int) -> tgfx.GatedModule:
    gated = tgfx.transform(build(case), case.example())
    promises.gate_at_random(gated, density, seed)
    return gated.eval()


# -- every block alone -------------------------------------------------------------------------------------


@each_block
def test_block_cut_and_price_are_exact(case: Case) -> None:
    model = build(case)
    gated = tgfx.transform(model, case.example())
    promises.identical_in_eval(case, model, gated)
    promises.whole_price(model, gated)
    for density in (0.5, 0.0):
        promises.gate_at_random(gated, density, seed=3)
        compact = tgfx.shrink(gated, verify=False)
        promises.exact_cut(case, gated, compact)
        promises.exact_price(case, gated, compact)
        promises.price_as_polynomial(gated)
        filled = promises.dead_count_for_nothing(case, gated)
    assert filled > 0  # with one gate open in every group there must be something dead


@each_block
def test_block_trains_as_before(case: Case) -> None:
    promises.identical_in_training(case)


# -- random chains -----------------------------------------------------------------------------------------


@examples(40)
@given(cases())
def test_identity_in_eval(case: Case) -> None:
    model = build(case)
    promises.identical_in_eval(case, model, tgfx.transform(model, case.example()))


@examples(30)
@given(cases())
def test_identity_in_training_step_for_step(case: Case) -> None:
    promises.identical_in_training(case)


@examples(10)
@given(cases())
def test_identity_in_float32(case: Case) -> None:
    model = build(case).float()
    x = case.example()
    x = x.float() if x.is_floating_point() else x
    gated = tgfx.transform(model, x).eval()
    assert all(p.dtype == torch.float32 for p in gated.parameters())
    with torch.no_grad():
        promises.assert_close(gated(x), model(x), 1e-5, "gated output")


@examples(60)
@given(cases(), densities, seeds)
def test_cut_is_exact(case: Case, density: float, seed: int) -> None:
    gated = gated_at(case, density, seed)
    promises.exact_cut(case, gated, tgfx.shrink(gated))


@examples(15)
@given(cases(), densities, seeds, st.sampled_from((2, 3, 4)))
def test_cut_to_round_sizes_is_exact(case: Case, density: float, seed: int, multiple: int) -> None:
    gated = gated_at(case, density, seed)
    before = {name: gate.is_open() for name, gate in gated.gates.items()}
    compact = tgfx.shrink(gated, round_to=multiple)
    for name, gate in gated.gates.items():
        assert torch.equal(gate.is_open(), before[name])  # asking for round sizes does not move the gates
        count = int(before[name].sum())
        rounded = min(-(-count // multiple) * multiple, len(before[name]))
        dead = torch.where(before[name], -torch.inf, gate.weight)  # the best of the dead, first come first
        revived = before[name].clone()
        revived[torch.sort(dead, descending=True, stable=True).indices[: rounded - count]] = True
        gate.set_open_(revived)
        assert gate.open_count() == rounded
    promises.exact_cut(case, gated, compact)
    promises.exact_price(case, gated, compact)


@examples(40)
@given(cases(), densities, seeds)
def test_dead_channels_count_for_nothing(case: Case, density: float, seed: int) -> None:
    promises.dead_count_for_nothing(case, gated_at(case, density, seed))


@examples(40)
@given(cases(), densities, seeds)
def test_price_is_exact(case: Case, density: float, seed: int) -> None:
    gated = gated_at(case, density, seed)
    promises.exact_price(case, gated, tgfx.shrink(gated, verify=False))
    promises.price_as_polynomial(gated)
    promises.marginal_is_the_slope(gated)
    promises.price_has_gradients(gated)


@examples(10)
@given(cases())
def test_price_of_the_whole(case: Case) -> None:
    model = build(case)
    gated = tgfx.transform(model, case.example())
    promises.whole_price(model, gated)
    promises.exact_price(case, gated, tgfx.shrink(gated))
    assert all(gated.cheapest(kind) < 1 for kind in ("flops", "params"))


def test_budget_loss_is_equation_8() -> None:
    case = Case("image", (("Residual", {"project": False, "inplace": False}),), "pool")
    gated = gated_at(case, 0.5, 0)
    used = float(gated.cost("flops")) / gated.total("flops")
    assert 0 < used < 1
    assert float(gated.budget_loss(flops=0.3)) == pytest.approx((0.3 - used) ** 2, rel=1e-6)
    both = (0.3 - used) ** 2 + (0.9 - float(gated.ratio("params"))) ** 2
    assert float(gated.budget_loss(flops=0.3, params=0.9, weight=7.0)) == pytest.approx(7 * both, rel=1e-6)


@examples(20)
@given(cases(), st.booleans())
def test_the_input_is_untouched(case: Case, training: bool) -> None:
    model = build(case).train(training)
    first = next(m for m in model.modules() if not list(m.children()))
    first.training = not training  # a layer in a mode of its own
    next(model.parameters()).requires_grad_(False)
    before, x = promises.snapshot(model), case.example()
    given_x = x.clone()
    rng = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    gated = tgfx.transform(model, x)
    assert {n: m.training for n, m in gated.named_modules() if n in before["modes"] and n}.items() <= before[
        "modes"
    ].items()
    promises.gate_at_random(gated, 0.5, 0)
    kept = promises.snapshot(gated)
    tgfx.shrink(gated)
    promises.assert_same_snapshot(kept, promises.snapshot(gated))
    promises.assert_same_snapshot(before, promises.snapshot(model))
    assert torch.equal(x, given_x)
    assert torch.equal(rng[0], torch.get_rng_state())
    assert rng[1] == np.random.get_state()[1].tolist() and rng[2] == random.getstate()
    # and no memory is shared: training one does not move the other
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.add_(1)
    promises.assert_same_snapshot(before, promises.snapshot(model))


@examples(15)
@given(cases(), densities, seeds)
def test_same_plan_every_time(case: Case, density: float, seed: int) -> None:
    one, two = gated_at(case, density, seed), gated_at(case, density, seed)
    assert str(one.report()) == str(two.report())
    assert one.groups.keys() == two.groups.keys()
    for name, group in one.groups.items():
        other = two.groups[name]
        assert (group.size, group.members, group.ties, group.frozen) == (
            other.size, other.members, other.ties, other.frozen,
        )  # fmt: skip
    assert one.code == two.code
    first, second = tgfx.shrink(one), tgfx.shrink(two)
    assert first.code == second.code
    left, right = first.state_dict(), second.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


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


# -- G4: never wrong, never dead ---------------------------------------------------------------------------


class Stack(nn.Module):
    """free -> met -> (something) -> last: `met` reaches the unknown, `free` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.met, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.met(torch.relu(self.free(x)))))


class Sorted(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=1)[0]  # line of sort


class Summed(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 1)  # line of cumsum


class Spectral(Stack):
    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1).real  # line of fft


class Inverted(Stack):
    def middle(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        gram = torch.linalg.inv(flat @ flat.transpose(1, 2) + 5 * torch.eye(8))  # line of inv
        return (gram @ flat).reshape(x.shape)


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        tokens, _ = self.lstm(x.flatten(2).transpose(1, 2))  # line of lstm
        return tokens.transpose(1, 2).reshape(x.shape)


def line_of(what: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (found,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# line of {what}")]
    return found


UNKNOWN = [(Sorted, "sort"), (Summed, "cumsum"), (Spectral, "fft"), (Inverted, "inv"), (Recurrent, "lstm")]
each_unknown = pytest.mark.parametrize(("kind", "op"), UNKNOWN, ids=[op for _, op in UNKNOWN])


@each_unknown
def test_what_reaches_an_unknown_operator_is_kept_with_the_reason(kind: type[Stack], op: str) -> None:
    model, x = randomised(kind()).eval(), torch.randn(2, 3, 4, 4)
    gated = tgfx.transform(model, x).eval()
    assert list(gated.gates) == ["free"]  # the rest of the model is gated all the same
    assert gated.gates["free"].weight.shape == (8,)
    refusal = gated.groups["met"].frozen
    assert isinstance(refusal, tgfx.Refusal)
    assert refusal.reason and refusal.node and refusal.op
    assert op in f"{refusal.reason} {refusal.op} {refusal.node}".lower()
    file, _, line = refusal.source.rpartition(":")
    assert (Path(file), int(line)) == (Path(__file__), line_of(op))
    assert refusal.source in gated.explain("met")
    assert refusal.reason in str(gated.report()).replace("\n", " ") or refusal.reason in gated.explain("met")
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated).eval()
    assert compact.met.weight.shape[0] == 8 and compact.met.weight.shape[1] < 8
    with torch.no_grad():
        promises.assert_close(compact(x), gated(x), 1e-5, "compact output")


@each_unknown
def test_strict_raises_instead(kind: type[Stack], op: str) -> None:
    with pytest.raises(StrictError, match=op) as caught:
        tgfx.transform(kind().eval(), torch.randn(2, 3, 4, 4), strict=True)
    assert caught.value.found and caught.value.expected and caught.value.fix


@pytest.mark.parametrize("name", ["Residual", "Dense", "Shuffle", "WindowAttention", "ConvNext", "SqueezeExcite"])
def test_strict_is_content_where_all_is_known(name: str) -> None:
    case = Case("image", ((name, BLOCKS[name].variants()[0]),), "pool")
    assert tgfx.transform(build(case), case.example(), strict=True).gates


class DependsOnData(nn.Module):
    """Which convolution runs is decided by the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.sum()) > 0 else self.two(x)


class PartlyOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.choice, self.after = nn.Conv2d(3, 8, 1), DependsOnData(), nn.Conv2d(8, 8, 1)
        self.free, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.after(self.choice(self.before(torch.sigmoid(self.free(x)[:, :3]))))))


def test_a_submodule_that_cannot_be_traced_stays_closed() -> None:
    model = randomised(PartlyOpaque()).eval()
    x = torch.randn(4, 3, 4, 4)
    gated = tgfx.transform(model, x).eval()
    (refusal,) = gated.facts.source.refusals
    assert refusal.node == "choice" and "traced" in refusal.reason
    assert "choice" in str(gated.report())
    assert gated.groups["before"].frozen is not None  # it feeds the closed box
    assert "after" in gated.gates  # behind the box all goes on
    assert not any(m.name.startswith("choice") for g in gated.facts.coupling.groups for m in g.members)
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated).eval()
    with torch.no_grad():
        for data in (x, -x, x.abs() * 3, torch.randn(1, 3, 4, 4)):  # both ways through the box
            promises.assert_close(compact(data), gated(data), 1e-5, "compact output")
    with pytest.raises(StrictError, match="choice"):
        tgfx.transform(model, x, strict=True)


# -- mode must not be baked in -----------------------------------------------------------------------------


class Moded(nn.Module):
    """`middle` behaves differently in training."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 1), middle or nn.Identity(), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return self.middle(x)


class FunctionalDropout(Moded):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class FunctionalDropout2d(Moded):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout2d(x, 0.5, self.training)


class FunctionalBatchNorm(Moded):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def between(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class AttentionDropout(Moded):
    def between(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
        y = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5 if self.training else 0.0)
        return y.squeeze(1).transpose(1, 2).reshape(x.shape)


class OwnBranch(Moded):
    def between(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class WithRange(Moded):
    """Plain fx cannot follow this: the export front end does."""

    def between(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :4] = x[:, 4:]
        for _ in range(x.ndim - 3):
            y = y + self.middle(x)
        return y


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype) > 0.5)


MODED = {
    "dropout": FunctionalDropout,
    "dropout2d": FunctionalDropout2d,
    "batch_norm": FunctionalBatchNorm,
    "attention_dropout": AttentionDropout,
    "own_branch": OwnBranch,
    **{
        f"{front}-{type(layer).__name__}": lambda kind=kind, layer=layer: kind(copy.deepcopy(layer))
        for front, kind in (("fx", Moded), ("export", WithRange))
        for layer in (
            nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.RReLU(), nn.BatchNorm2d(8),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), DropPath(),
        )
    },
}  # fmt: skip


TWO_GRAPHS = {"batch_norm", "own_branch", "export-DropPath"}


@pytest.mark.parametrize("name", MODED)
def test_modes_stay_switchable(name: str) -> None:
    model = randomised(MODED[name]().double())
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    gated = tgfx.transform(model.eval(), x)
    if name in TWO_GRAPHS:  # cannot be one graph of torch's own layers: the user is told, and eval mode is exact
        with pytest.warns(UserWarning, match="another path in train mode"):
            compact = tgfx.shrink(gated)
    else:
        compact = tgfx.shrink(gated)  # all gates open
    # where compact sits out the training step its statistics do not move: compare in eval mode first
    for training in (False, True) if name in TWO_GRAPHS else (True, False):
        model.train(training)
        torch.manual_seed(0)
        with torch.no_grad():
            expected = model(x)
        for what, other in (("gated", gated), ("compact", compact)):
            if what == "compact" and training and name in TWO_GRAPHS:
                continue
            other.train(training)
            torch.manual_seed(0)
            with torch.no_grad():
                promises.assert_close(other(x), expected, promises.IDENTITY, f"{what}, training={training}")
