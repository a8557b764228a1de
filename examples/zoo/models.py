"""The models of the zoo: name -> a function that builds the model and an example of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any]
LARGEST = 150_000_000  # parameters

TIMM = (
    *("resnet18", "resnet50d", "resnext50_32x4d", "res2net50_26w_4s", "densenet121", "dpn68"),
    *("efficientnet_b0", "mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv4_conv_small"),
    *("mixnet_s", "ghostnet_100", "hrnet_w18_small", "regnetx_002", "repvgg_a0", "convnext_atto"),
    *("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "maxvit_tiny_tf_224", "levit_128s"),
    *("poolformer_s12", "mixer_s16_224"),
)
HUGGING_FACE = ("bert", "gpt2", "t5", "marian", "vit", "llama")


def torchvision_models() -> Iterator[tuple[str, Callable[[], Built]]]:
    """Every classification and segmentation builder under 150M parameters."""
    import torchvision.models as tv

    for module in (tv, tv.segmentation):
        for name in tv.list_models(module=module):
            backbone = {} if module is tv else {"weights_backbone": None}
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            size = next(iter(tv.get_model_weights(name))).meta["num_params"]
            if size < LARGEST:
                yield f"torchvision/{name}", lambda n=name, b=backbone, o=options: _torchvision(n, b, o)


def _torchvision(name: str, backbone: dict, options: dict) -> Built:
    import torchvision.models as tv

    model = tv.get_model(name, weights=None, **backbone, **options)
    size = 299 if name == "inception_v3" else 224
    return model, torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))


def timm_models(names: list[str] | None = None) -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in names or TIMM:
        yield f"timm/{name}", lambda n=name: _timm(n)


def _timm(name: str) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg["input_size"]
    return model, torch.randn(1, *size, generator=torch.Generator().manual_seed(1))


def hugging_face_models() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in HUGGING_FACE:
        yield f"hf/{name}", lambda n=name: _hugging_face(n)


def _hugging_face(name: str) -> Built:
    import transformers as hf

    ids = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(1))
    answer = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(2))
    small = {"vocab_size": 99}
    if name == "bert":
        config = hf.BertConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, **small
        )
        return hf.BertForSequenceClassification(config), {"input_ids": ids}
    if name == "gpt2":
        config = hf.GPT2Config(n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, **small)
        return hf.GPT2LMHeadModel(config), {"input_ids": ids, "use_cache": False}
    if name == "t5":
        config = hf.T5Config(d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, **small)
        return hf.T5ForConditionalGeneration(config), {
            "input_ids": ids,
            "decoder_input_ids": answer,
            "use_cache": False,
        }
    if name == "marian":
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
        tokens = {"pad_token_id": 0, "eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 0}
        config = hf.MarianConfig(d_model=48, max_position_embeddings=64, **heads, **layers, **tokens, **small)
        return hf.MarianMTModel(config), {"input_ids": ids, "decoder_input_ids": answer, "use_cache": False}
    if name == "vit":
        config = hf.ViTConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=32,
            patch_size=8,
        )
        pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        return hf.ViTForImageClassification(config), {"pixel_values": pixels}
    config = hf.LlamaConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        **small,
    )
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "use_cache": False}


def zoo() -> Iterator[tuple[str, Callable[[], Built]]]:
    yield from torchvision_models()
    yield from timm_models()
    yield from hugging_face_models()
