"""What is translated and how it is judged: Multi30k by BLEU, or the made-up language by words that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from examples.translation.data import FIRST_WORD, WORDS, Pairs, made, read
from examples.translation.decoding import translate
from examples.translation.model import Translator
from examples.translation.subwords import Subwords

TEST = "test_2016_flickr"


class Task(Protocol):
    pieces: int
    train: Pairs
    held_out: Pairs

    def score(self, model: Translator) -> dict[str, float]: ...


class Multi30k:
    """English to German, cased, as it stands in the files; BLEU of sacrebleu on detokenised text."""

    def __init__(self, folder: Path, out: Path, size: int) -> None:
        english, german = read(folder, "train", "en"), read(folder, "train", "de")
        self._sacrebleu = _sacrebleu()
        self._subwords = Subwords(out / "subwords.json", [*english, *german], size)
        self.pieces = len(self._subwords)
        self.train = self._pairs(english, german)
        self._texts = {split: (read(folder, split, "en"), read(folder, split, "de")) for split in (TEST, "val")}
        self.held_out = self._pairs(*self._texts["val"])  # the test sentences are for BLEU alone

    def score(self, model: Translator) -> dict[str, float]:
        return {f"bleu_{split}": self._bleu(model, *texts) for split, texts in self._texts.items()}

    def _bleu(self, model: Translator, english: list[str], german: list[str]) -> float:
        translations = self._subwords.join(translate(model, self._subwords.split(english)))
        return round(self._sacrebleu.corpus_bleu(translations, [german]).score, 2)

    def _pairs(self, english: list[str], german: list[str]) -> Pairs:
        return Pairs(self._subwords.split(english), self._subwords.split(german))


class Made:
    """No files and no packages: numbers backwards."""

    def __init__(self) -> None:
        self.pieces = FIRST_WORD + WORDS
        self.train, self.held_out = made(4000), made(200, seed=1)

    def score(self, model: Translator) -> dict[str, float]:
        """Share of held-out sentences that are right to the last word."""
        found = translate(model, self.held_out.source)
        right = sum(own == wanted for own, wanted in zip(found, self.held_out.target, strict=True))
        return {"right": right / len(self.held_out)}


def _sacrebleu():  # type: ignore[no-untyped-def]
    try:
        import sacrebleu
    except ImportError as error:
        raise SystemExit("BLEU needs sacrebleu: pip install sacrebleu==2.6.0") from error
    return sacrebleu
