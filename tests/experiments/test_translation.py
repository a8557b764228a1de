"""Translation in quick mode, its decoding and its batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.translation import data as sentences
from examples.translation import run as translation
from examples.translation.data import padded
from examples.translation.decoding import greedy
from examples.translation.model import END, PAD, START, Sizes, Translator


def test_translation_quick() -> None:
    report = translation.main(["--quick", "--quiet"])
    assert list(report) == ["whole", "taught", "heads-0.75", "heads-0.5", "speed"]
    whole, taught, *cut = (report[step] for step in list(report)[:-1])
    for one in (whole, taught):
        assert one["heads"] == 1 and sum(one["kept"].values()) == 24
        assert one["right"] >= 0.9
    for one, share in zip(cut, (0.75, 0.5), strict=True):
        assert abs(one["heads"] - share) <= 0.01 * share
        assert sum(one["kept"].values()) == round(24 * one["heads"])  # counted in the weights
        assert one["difference"] < 1e-5
        assert one["params"] < 1 and one["flops"] < 1
        assert one["right"] >= 0.8
    assert cut[1]["params"] < cut[0]["params"]
    rates = report["speed"]["pieces_per_second"]
    assert list(rates) == ["whole", "heads-0.75", "heads-0.5"] and rates["whole"]["decoding_ratio"] == 1


def test_translations_are_the_likeliest_pieces() -> None:
    """Written one after the other, with keys and values kept, they are those that one pass over them all gives."""
    torch.manual_seed(0)
    model = Translator(Sizes.alike(30, layers=2, width=16, heads=4, inner=8, dropout=0.3)).eval()
    source = padded([[5, 6, 7, 8, END], [9, END]])
    written = greedy(model, source, 6, until_end=False)
    so_far = torch.cat([torch.full((2, 1), START), written[:, :-1]], 1)
    assert torch.equal(model(source, so_far).argmax(2), written)
    alone = greedy(model, source[1:, :2], 6, until_end=False)  # padding changes nothing
    assert torch.equal(alone, written[1:])


def test_batches_of_sentences_hold_every_pair_once(tmp_path: Path) -> None:
    pairs = sentences.made(300)
    loader = sentences.Batches(pairs, 256, seed=1)
    seen = []
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(source.numel() + target.numel() <= 256 for (source, target), _ in batches)
        assert all(torch.equal(so_far[:, 1:][target[:, 1:] != PAD], target[:, :-1][target[:, 1:] != PAD])
                   for (_, so_far), target in batches)  # fmt: skip
        rows = [row[: row.index(END)] for (source, _), _ in batches for row in source.tolist()]
        assert sorted(rows) == sorted(pairs.source)
        seen.append(rows)
    assert seen[0] != seen[1]
    (tmp_path / "val.en").write_text("a house .\nzwölf\n", encoding="utf-8")
    assert sentences.read(tmp_path, "val", "en") == ["a house .", "zwölf"]
    with pytest.raises(FileNotFoundError, match=r"github\.com/multi30k/dataset"):
        sentences.read(tmp_path, "val", "de")
