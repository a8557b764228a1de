"""Gates on the attention heads of models as torchvision, timm and Hugging Face write them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.head_promises import keep_promises


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _images(side: int = 32, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(2))


def _torchvision_vit() -> tuple:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 24, 32, num_classes=5), _images(), _images(batch=3)


def _torchvision_swin() -> tuple:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 24, [1, 2], [2, 4], [4, 4], num_classes=5), _images(), _images(batch=2)


def _timm_vit() -> tuple:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 4, "num_classes": 5}
    return VisionTransformer(**sizes, qk_norm=True), _images(), _images(batch=3)


def _timm_beit() -> tuple:
    from timm.models.beit import Beit

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 4, "num_classes": 5}
    return Beit(**sizes, use_rel_pos_bias=True, use_abs_pos_emb=False), _images(), _images(batch=3)


def _timm_levit() -> tuple:
    from timm.models.levit import Levit

    model = Levit(64, embed_dim=(16, 24), key_dim=4, depth=(1, 1), num_heads=(2, 3), num_classes=5)
    return model, _images(64), _images(64, 2)


@pytest.mark.parametrize("build", [_torchvision_vit, _torchvision_swin, _timm_vit, _timm_beit, _timm_levit])
def test_vision_transformers(build: Any) -> None:
    with warnings.catch_warnings():  # the libraries' own
        warnings.simplefilter("ignore")
        keep_promises(*build())


def _tokens(batch: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    return {"input_ids": torch.randint(3, 50, (batch, length), generator=generator)}


def _sequences() -> Iterator[Any]:
    import transformers as hf

    vocabulary = {"vocab_size": 50}
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    yield "bert", hf.BertModel, hf.BertConfig(**sizes, **vocabulary), {"heads": 4, "size": 4}
    gpt = hf.GPT2Config(n_embd=24, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2, **vocabulary)
    yield "gpt2", hf.GPT2Model, gpt, {"heads": 4, "size": 4, "use_cache": False}
    llama = hf.LlamaConfig(**sizes, num_key_value_heads=2, **vocabulary)
    yield "llama", hf.LlamaModel, llama, {"heads": 4, "size": 2, "use_cache": False}
    t5 = hf.T5Config(d_model=24, d_kv=6, d_ff=16, num_layers=2, num_heads=4, **vocabulary)
    yield "t5", hf.T5EncoderModel, t5, {"heads": 8, "size": 4}


@pytest.mark.parametrize(("kind", "config", "expected"), [pytest.param(*c[1:], id=c[0]) for c in _sequences()])
def test_language_models(kind: Any, config: Any, expected: dict[str, Any]) -> None:
    more = {key: value for key, value in expected.items() if key == "use_cache"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(config)
        gated, _ = keep_promises(model, _tokens(2, 8) | more, _tokens(3, 5) | more, _tokens(1, 11) | more)
    assert gated.total("heads") == expected["heads"]
    (group,) = gated.facts.coupling.groups
    assert group.size == expected["size"]


def test_marian_decoder_attends_twice() -> None:
    import transformers as hf

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    tokens = {"pad_token_id": 0, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 0}
    config = hf.MarianConfig(d_model=24, vocab_size=50, **layers, **heads, **tokens)
    example = {**_tokens(1, 8), "decoder_input_ids": _tokens(1, 6)["input_ids"], "use_cache": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gated, _ = keep_promises(hf.MarianModel(config), example)
    names = [g.name for g in gated.facts.coupling.groups]
    assert names == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]
