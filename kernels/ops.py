"""The operations of a decoder layer besides matrix products and attention, chosen once by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch.kernels import reference


@dataclass(frozen=True)
class Ops:
    """Signatures and meaning are those in ``reference``. None of them waits for the device."""

    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[..., None]
    act_and_mul: Callable[[Tensor, str], Tensor]
    activate: Callable[[Tensor, str], Tensor]


TORCH = Ops(
    rms_norm=reference.rms_norm,
    layer_norm=reference.layer_norm,
    add_rms_norm=reference.add_rms_norm,
    add_layer_norm=reference.add_layer_norm,
    qk_norm_rope=reference.qk_norm_rope,
    act_and_mul=reference.act_and_mul,
    activate=reference.activate,
)


def make_ops(device: torch.device) -> Ops:
    """Triton on CUDA, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type != "cuda":
        return TORCH
    from cbatch.kernels import activation, norm, rope

    return Ops(
        rms_norm=norm.rms_norm,
        layer_norm=norm.layer_norm,
        add_rms_norm=norm.add_rms_norm,
        add_layer_norm=norm.add_layer_norm,
        qk_norm_rope=rope.qk_norm_rope,
        act_and_mul=activation.act_and_mul,
        activate=activation.activate,
    )
