"""Greedy translation, word after word: keys and values of what was written are kept, not computed again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.translation.data import Sentence, padded
from examples.translation.model import END, START, KeysValues, Translator

BATCH = 100


@torch.no_grad()
def greedy(model: Translator, source: Tensor, most: int, *, until_end: bool = True) -> Tensor:
    """The likeliest next piece again and again: (batch, up to `most`). What follows an END is of no meaning.

    until_end=False writes `most` pieces in any case, so that two models can be timed on the same work.
    """
    memory, mask = model.encode(source)
    crossed = [layer.cross.keys_values(memory) for layer in model.decoder]
    before: list[KeysValues | None] = [None] * len(model.decoder)
    last = source.new_full((len(source), 1), START)
    written, ended = [], torch.zeros(len(source), dtype=torch.bool)
    for place in range(most):
        x = model.embed(last, model.positions[place : place + 1])
        for index, layer in enumerate(model.decoder):
            # one position, the last: it may look at all that were written, so there is no mask
            x, before[index] = layer(x, crossed[index], mask, None, before[index])
        last = F.linear(model.decoder_norm(x), model.pieces.weight).argmax(2)
        written.append(last)
        ended |= last[:, 0] == END
        if until_end and ended.all():
            break
    return torch.cat(written, 1)


def translate(model: Translator, sentences: list[Sentence]) -> list[Sentence]:
    """In eval mode; sentences of similar length together."""
    was = model.training
    model.eval()
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    translations: list[Sentence] = [[] for _ in sentences]
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        source = padded([[*sentences[i], END] for i in chosen])
        most = min(model.sizes.longest, 10 + 3 * source.shape[1] // 2)
        for i, row in zip(chosen, greedy(model, source, most).tolist(), strict=True):
            translations[i] = row[: row.index(END)] if END in row else row
    model.train(was)
    return translations
