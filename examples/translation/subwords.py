"""A vocabulary of subwords (byte pair encoding, Sennrich et al. 2016), one for both languages."""

from __future__ import annotations

from pathlib import Path

from examples.translation.data import Sentence
from examples.translation.model import END, PAD, START, UNKNOWN
from tgfx.whole_file import whole_file

SPECIAL = {PAD: "<pad>", START: "<s>", END: "</s>", UNKNOWN: "<unk>"}


class Subwords:
    """Learnt from lines of text once, and kept in a file."""

    def __init__(self, file: Path, lines: list[str] | None = None, size: int = 0) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise SystemExit("the full experiment needs tokenizers: pip install tokenizers==0.23.3") from error
        if not file.is_file():
            with whole_file(file) as aside:
                _learnt(lines or [], size).save(str(aside))
        self._model = Tokenizer.from_file(str(file))

    def __len__(self) -> int:
        return self._model.get_vocab_size()

    def split(self, lines: list[str]) -> list[Sentence]:
        return [one.ids for one in self._model.encode_batch(lines)]

    def join(self, sentences: list[Sentence]) -> list[str]:
        return self._model.decode_batch(sentences)


def _learnt(lines: list[str], size: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.NFC()
    # a piece never spans words, and full stops and commas are pieces of their own
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SPECIAL[i] for i in range(len(SPECIAL))], show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer
