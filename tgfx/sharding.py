"""Parameters that FSDP2 has spread over ranks (DTensor): read as a whole, write as a part, refuse where it matters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from tgfx.errors import InputError


def is_sharded(tensor: Any) -> bool:
    return not isinstance(tensor, fx.Proxy) and hasattr(tensor, "full_tensor")  # a proxy has every attribute


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. If it is sharded this is a collective: every rank must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """`values`, equal on all ranks, spread the way that `parameter` is."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(values, mesh, placements, src_data_rank=None)


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raise where parameters must be whole."""
    sharded = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if sharded is not None:
        raise InputError(
            f"{what} needs whole parameters, and these are sharded over ranks",
            expected="a gated model that is not sharded",
            found=f"{sharded} as a DTensor",
            fix="gather it on every rank first: tgfx.distributed.gather(gated)",
        )
