"""What the FlowNet example is made of: scenes with known motion, its files, its net under gates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tgfx
from examples.flownet.casting import random_scene
from examples.flownet.error import end_point_errors, multiscale_error, still_error
from examples.flownet.model import FlowNetSimple
from examples.flownet.pairs import PairBatches, Pairs, made_pairs, read_chairs, read_flo
from examples.flownet.photos import digest_of, made_photos, read_photos
from examples.flownet.scene import sampled

TWO_PATHS = "ignore:FlowNetSimple takes another path in train mode:UserWarning"


@pytest.mark.parametrize("seed", range(6))
def test_flow_leads_to_the_same_point_of_the_second_image(seed: int) -> None:
    """Warping the second image by the flow gives the first, wherever nothing is hidden."""
    scene = random_scene(made_photos(4), 96, 128, np.random.default_rng(seed))
    first, seen = scene.render(0)
    second, seen_later = scene.render(1)
    flow = scene.flow(seen)
    shown = unoccluded(flow, seen, seen_later)
    assert shown.any()
    warped = sampled(second, (torch.arange(128.0) + flow[0], torch.arange(96.0).unsqueeze(1) + flow[1]))
    wrong, still = ((image - first).abs().mean(0)[shown] for image in (warped, second))
    # interpolated twice instead of once, and pixels at outlines that are covered in part
    assert wrong.mean() < 0.02 and wrong.quantile(0.9) < 0.05
    assert wrong.mean() < 0.4 * still.mean()


def unoccluded(flow: Tensor, seen: Tensor, seen_later: Tensor) -> Tensor:
    """Pixels of the first frame whose point is in the second frame too: all four neighbours show the same layer."""
    height, width = seen.shape
    x = torch.arange(float(width)) + flow[0]
    y = torch.arange(float(height)).unsqueeze(1) + flow[1]
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    for column in (x.floor(), x.ceil()):
        for row in (y.floor(), y.ceil()):
            found = seen_later[row.clamp(0, height - 1).long(), column.clamp(0, width - 1).long()]
            inside &= found == seen
    return inside


def test_pairs_are_kept_on_disk_and_made_once(tmp_path: Path) -> None:
    photos = made_photos(2)
    stored = made_pairs(photos, (64, 64), 3, 5, tmp_path / "pairs")
    again = made_pairs(photos, (64, 64), 3, 5, tmp_path / "pairs")
    fresh = made_pairs(photos, (64, 64), 3, 5)
    for other in (stored, again):
        assert np.array_equal(other.images, fresh.images) and np.array_equal(other.flows, fresh.flows)
    assert not np.array_equal(fresh.images[0], fresh.images[1])
    others = made_photos(2, seed=1)
    assert digest_of(photos) == digest_of(made_photos(2)) != digest_of(others)
    for own, number in ((photos, 4), (others, 3)):
        with pytest.raises(SystemExit, match="holds other pairs"):
            made_pairs(own, (64, 64), number, 5, tmp_path / "pairs")
    (tmp_path / "pairs" / "made_of.json").unlink()  # pairs of an earlier version do not say it
    assert len(made_pairs(others, (64, 64), 3, 5, tmp_path / "pairs")) == 3


def test_mirrored_crops_keep_flow_and_images_together() -> None:
    """The second image is the first, moved by (3, -2): so it must be after any crop and mirror, with flow +-3, +-2."""
    image = (made_photos(1)[0][:, :80, :112] * 255).byte().numpy()
    moved = np.roll(image, (-2, 3), (1, 2))
    flow = np.broadcast_to(np.float32([3, -2]).reshape(2, 1, 1), (2, 80, 112))
    pairs = Pairs(np.concatenate([image, moved])[None].repeat(8, 0), flow[None].repeat(8, 0))
    found = set()
    for images, flows in PairBatches(pairs, (64, 64), 4, seed=1):
        for both, own in zip(images, flows, strict=True):
            x, y = int(own[0, 0, 0]), int(own[1, 0, 0])
            found.add((x, y))
            first, second = both[:3, 8:-8, 8:-8], both[3:, 8 + y : 56 + y, 8 + x : 56 + x]
            assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1] > 0.999
    assert found <= {(3, -2), (-3, -2), (3, 2), (-3, 2)} and len(found) > 1


def test_batches_begin_again_from_the_generators_state() -> None:
    loader = PairBatches(made_pairs(made_photos(2), (80, 80), 6, 0), (64, 64), 2)
    state = loader.generator.get_state()
    once = list(loader)
    other = list(loader)
    loader.generator.set_state(state)
    assert len(once) == 3
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(once, loader, strict=True))
    assert not torch.equal(once[0][0], other[0][0])


def test_chairs_are_read_from_their_files(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    images, flow = rng.integers(0, 256, (2, 8, 12, 3), dtype=np.uint8), rng.normal(size=(8, 12, 2)).astype("<f4")
    for index in (0, 1):
        Image.fromarray(images[index]).save(tmp_path / f"0000000-img{index}.ppm")
    header = np.float32(202021.25).tobytes() + np.int32([12, 8]).tobytes()
    (tmp_path / "0000000-gt.flo").write_bytes(header + flow.tobytes())
    pairs = read_chairs(tmp_path)
    assert np.array_equal(pairs.images[0], images.transpose(0, 3, 1, 2).reshape(6, 8, 12))
    assert np.array_equal(pairs.flows[0], flow.transpose(2, 0, 1))
    (tmp_path / "broken.flo").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"not a \.flo file"):
        read_flo(tmp_path / "broken.flo")
    with pytest.raises(FileNotFoundError, match="lmb-freiburg/flownet2"):
        read_chairs(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="BIDS/BSDS500"):
        read_photos(tmp_path)


def test_errors_are_in_pixels() -> None:
    flows = np.broadcast_to(np.float32([3, 4]).reshape(2, 1, 1), (1, 2, 64, 64))
    pairs = Pairs(np.zeros((1, 6, 64, 64), np.uint8), flows)

    class Says(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.tensor([3.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 16, 16) / FlowNetSimple.SCALE

    assert still_error(pairs) == pytest.approx(5)
    assert end_point_errors(Says(), pairs) == pytest.approx([2] * len(pairs), rel=1e-5)
    truth = torch.from_numpy(flows.copy())
    right = [truth[:, :, :side, :side] / FlowNetSimple.SCALE for side in (16, 8, 4, 2, 1)]
    assert multiscale_error(right, truth).item() == pytest.approx(0, abs=1e-5)
    assert multiscale_error([0 * flow for flow in right], truth) > 0.1


@pytest.mark.filterwarnings(TWO_PATHS)
def test_flownet_is_gated_and_cut_exactly(tmp_path: Path) -> None:
    """Five flows in train mode, one in eval, skips joined to transposed convolutions: what makes a flow stays."""
    torch.manual_seed(0)
    model, x = FlowNetSimple(0.0625), torch.randn(2, 6, 64, 128)
    gated = tgfx.transform(model, x)
    for whole, same in zip(model.train()(x), gated.train()(x), strict=True):
        assert torch.equal(whole, same)
    assert torch.equal(model.eval()(x), gated.eval()(x))
    kept = {group.name for group in gated.groups if group.frozen is not None}
    assert kept == {f"predict_flow{level}" for level in range(2, 7)}
    generator = torch.Generator().manual_seed(0)
    for gate in gated.gates.values():
        opened = torch.rand(len(gate.weight), generator=generator) < 0.45
        opened[0] = True
        gate.set_open_(opened)
    compact = tgfx.shrink(gated).eval()
    torch.testing.assert_close(compact(x), gated(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gated.train()(x)[0], compact(x), rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in compact.parameters()) == round(gated.eval().cost("params").item())
    report = tgfx.export_onnx(compact, tmp_path / "compact.onnx", x, measure=False)
    assert max(report.max_delta.values()) < 1e-4
