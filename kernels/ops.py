"""The operations of a decoder layer besides attention, chosen once by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch.kernels import reference, torch_linear


@dataclass(frozen=True)
class Ops:
    """Signatures and meaning are those in ``reference``. None of them waits for the device."""

    pack: Callable[[Tensor], Tensor]  # a weight as ``linear`` reads it fastest: of use to it and ``linear_act`` alone
    linear: Callable[..., Tensor]
    linear_act: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[..., None]
    rope_and_store: Callable[..., Tensor]


TORCH = Ops(
    pack=torch_linear.pack,
    linear=torch_linear.linear,
    linear_act=torch_linear.linear_act,
    rms_norm=reference.rms_norm,
    layer_norm=reference.layer_norm,
    add_rms_norm=reference.add_rms_norm,
    add_layer_norm=reference.add_layer_norm,
    qk_norm_rope=reference.qk_norm_rope,
    rope_and_store=reference.rope_and_store,
)


def make_ops(device: torch.device) -> Ops:
    """Triton on CUDA, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type != "cuda":
        return TORCH
    from cbatch.kernels import linear, norm, rope

    return Ops(
        pack=lambda weight: weight,
        linear=linear.linear,
        linear_act=linear.linear_act,
        rms_norm=norm.rms_norm,
        layer_norm=norm.layer_norm,
        add_rms_norm=norm.add_rms_norm,
        add_layer_norm=norm.add_layer_norm,
        qk_norm_rope=rope.qk_norm_rope,
        rope_and_store=rope.rope_and_store,
    )
