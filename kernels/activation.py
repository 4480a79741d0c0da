"""The activation of an MLP in Triton, with the product of a gated one. Knows rows of numbers; knows no model.

Contract:
- x: [num_rows, num_columns], for a gated MLP [num_rows, 2 * num_columns] with the gate first: what one fused projection
  gives. Last dimension contiguous, any stride between rows.
- computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


@triton.jit
def apply_act(value, ACT: tl.constexpr):
    """ACT(value) in float32. ``ACT`` is one of ``reference.ACTIVATIONS``."""
    if ACT == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACT == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 0.5 (1 + tanh(u)) = 1 - 1 / (e^2u + 1), right at both ends
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value * (1.0 - 1.0 / (tl.exp(inner) + 1.0))
    elif ACT == "relu":
        value = tl.maximum(value, 0.0)
    else:
        tl.static_assert(ACT == "relu2")
        value = tl.maximum(value, 0.0)
        value = value * value
    return value


@triton.jit
def _act_kernel(
    x,
    out,
    x_stride,
    NUM_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one piece of one row."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = apply_act(value, ACT)
    if GATED:
        value = value * tl.load(x + row * x_stride + NUM_COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + row * NUM_COLUMNS + columns, value.to(out.dtype.element_ty), mask=mask)


def act_and_mul(
    x: Tensor,  # [num_rows, 2 * num_columns]: gate, up
    act: str,
) -> Tensor:
    """act(gate) * up, [num_rows, num_columns]."""
    return _launch(x, x.shape[1] // 2, act, gated=True)


def activate(
    x: Tensor,  # [num_rows, num_columns]
    act: str,
) -> Tensor:
    """act(x). ``act`` is one of ``reference.ACTIVATIONS``."""
    return _launch(x, x.shape[1], act, gated=False)


def _launch(x: Tensor, num_columns: int, act: str, gated: bool) -> Tensor:
    out = x.new_empty(x.shape[0], num_columns)
    if out.numel():
        block = min(1024, triton.next_power_of_2(num_columns))
        _act_kernel[(x.shape[0], triton.cdiv(num_columns, block))](
            x,
            out,
            x.stride(0),
            NUM_COLUMNS=num_columns,
            BLOCK=block,
            ACT=act,
            GATED=gated,
            num_warps=4,
            **launch_options(x.device),
        )
    return out
