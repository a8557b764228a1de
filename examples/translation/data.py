"""Sentence pairs as lists of piece numbers, in batches of similar length; a made-up language for --quick."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from examples.mistakes import reading
from examples.translation.model import END, PAD, START, UNKNOWN

SPLITS = ("train", "val", "test_2016_flickr")
WORDS = 12  # of the made-up language
FIRST_WORD = UNKNOWN + 1
Sentence = list[int]
Batch = tuple[tuple[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pairs:
    """Sentences of pieces, and their translations."""

    source: list[Sentence]
    target: list[Sentence]

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def digest(self) -> str:
        """Tells these sentences from others."""
        return hashlib.sha256(repr((self.source, self.target)).encode()).hexdigest()[:12]


class Batches:
    """A loader of ((source, target so far), target): shuffled, but each batch holds pairs of similar length.

    `budget`: largest number of pieces in a batch, padding and both languages counted. Each pass draws from
    `generator`, which tgfx.fit saves and restores: a run that is resumed sees the same batches.
    """

    def __init__(self, pairs: Pairs, budget: int, *, longest: int = 128, seed: int = 0) -> None:
        self.pairs, self.budget = pairs, budget
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = [
            (len(source) + 1, len(target) + 1) for source, target in zip(pairs.source, pairs.target, strict=True)
        ]
        self.used = [i for i, both in enumerate(self.lengths) if max(both) <= longest and sum(both) <= budget]
        # With the same lengths, whatever the order among equals, there are as many batches in every pass.
        self.count = len(self._cut(sorted(self.used, key=self._length)))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.used), generator=self.generator).tolist()
        batches = self._cut(sorted((self.used[i] for i in order), key=self._length))
        for place in torch.randperm(len(batches), generator=self.generator).tolist():
            source = padded([[*self.pairs.source[i], END] for i in batches[place]])
            target = [self.pairs.target[i] for i in batches[place]]
            yield (source, padded([[START, *one] for one in target])), padded([[*one, END] for one in target])

    def _length(self, index: int) -> tuple[int, int]:
        source, target = self.lengths[index]
        return source + target, source

    def _cut(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        widest = (0, 0)
        for index in order:
            source, target = self.lengths[index]
            widest = max(widest[0], source), max(widest[1], target)
            if not batches or sum(widest) * (len(batches[-1]) + 1) > self.budget:
                batches.append([])
                widest = source, target
            batches[-1].append(index)
        return batches


def padded(sentences: list[Sentence]) -> Tensor:
    longest = max(len(one) for one in sentences)
    return torch.tensor([one + [PAD] * (longest - len(one)) for one in sentences])


def read(folder: Path, split: str, language: str) -> list[str]:
    """Lines of Multi30k, packed as in its repository or unpacked."""
    plain, packed = folder / f"{split}.{language}", folder / f"{split}.{language}.gz"
    if packed.is_file():
        with reading(packed, "text packed by gzip"):
            text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    elif plain.is_file():
        text = plain.read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(
            f"{packed} is missing: --data is a folder with the English and German files of Multi30k, task 1, raw "
            f"({', '.join(SPLITS)}; .en and .de, with or without .gz) from https://github.com/multi30k/dataset"
        )
    return [line.strip() for line in text.rstrip("\n").split("\n")]


def made(count: int, seed: int = 0) -> Pairs:
    """A language of numbers: the translation has the words backwards, each with another number. No file needed."""
    generator = torch.Generator().manual_seed(seed)
    source = []
    for _ in range(count):
        length = int(torch.randint(3, 8, (), generator=generator))
        source.append((FIRST_WORD + torch.randint(WORDS, (length,), generator=generator)).tolist())
    return Pairs(source, [translated(one) for one in source])


def translated(words: Sentence) -> Sentence:
    """What is right in the made-up language."""
    return [FIRST_WORD + (word - FIRST_WORD + 5) % WORDS for word in reversed(words)]
