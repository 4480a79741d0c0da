"""Norms in Triton, alone or fused with the residual sum before them. Knows rows of numbers; knows no model.

Contract:
- x, residual: [num_rows, num_columns] in one dtype, last dimension contiguous, any stride between rows. In a residual
  sum x may be partial sums of a matrix product, [num_splits, num_rows, num_columns] float32: they are added in order,
  in float32, and not rounded.
- weights and biases: [num_columns] float32. Sums are float32; the residual sum is rounded to the residual's dtype, and
  the norm is of the rounded sum, which is what later layers add to.
- one program per row, which it reads once: num_columns up to 65,536.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


@triton.jit
def load_parts(at, mask, split_stride, NUM_SPLITS: tl.constexpr):
    """Load the partial sums of a split matrix product; ``at`` points to the first. ``add_up`` is separate, so that all
    loads are issued first: if each part were added at once, the loads would wait for one another."""
    parts = (tl.load(at, mask=mask, other=0.0),)
    for _ in tl.static_range(1, NUM_SPLITS):
        at += split_stride
        parts += (tl.load(at, mask=mask, other=0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def add_up(parts):
    """The sum of the parts, in order, float32."""
    total = parts[0].to(tl.float32)
    for i in tl.static_range(1, len(parts)):
        total += parts[i]
    return total


@triton.jit
def _norm_kernel(
    x,
    residual,
    rows,
    weight,
    bias,
    post_weight,
    out,
    total,
    split_stride,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    scale,
    NUM_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,  # LayerNorm: subtract the mean, add a bias
    HAS_ROWS: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: out = norm(total), total = residual + scale * post_norm(x), or the parts of this that are asked for.

    All loads come before the sums, so that the program waits for memory once; weights are loaded before gdc_wait.
    """
    columns = tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    if HAS_NORM:
        by = tl.load(weight + columns, mask=mask, other=0.0)
        if HAS_BIAS:
            shift = tl.load(bias + columns, mask=mask, other=0.0)
    if HAS_POST:
        post_by = tl.load(post_weight + columns, mask=mask, other=0.0)
    if PDL:
        gdc_wait()

    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row).to(tl.int64)
    if HAS_RESIDUAL:
        before = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    parts = load_parts(x + source * x_stride + columns, mask, split_stride, NUM_SPLITS)
    if PDL:  # reading is most of the work; this also keeps ptxas from moving loads behind the sums
        gdc_launch_dependents()
    value = add_up(parts)
    if HAS_POST:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / NUM_COLUMNS + eps) * post_by
    if HAS_RESIDUAL:
        rounded = (before + scale * value).to(total.dtype.element_ty)
        value = rounded.to(tl.float32)
    if HAS_NORM:
        if CENTERED:
            value = tl.where(mask, value - tl.sum(value, 0) / NUM_COLUMNS, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / NUM_COLUMNS + eps) * by
        if HAS_BIAS:
            value = value + shift

    if HAS_RESIDUAL:
        tl.store(total + row * NUM_COLUMNS + columns, rounded, mask=mask)
    if HAS_NORM:
        tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,  # [num_rows, num_columns]
    weight: Tensor,  # [num_columns] float32
    eps: float,
    *,
    out: Tensor | None = None,  # x itself for in place
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _launch(x, eps, weight=weight, out=out)
    return out


def layer_norm(
    x: Tensor,  # [num_rows, num_columns]
    weight: Tensor,  # [num_columns] float32
    bias: Tensor | None,  # [num_columns] float32
    eps: float,
) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, eps, weight=weight, bias=bias, out=out, centered=True)
    return out


def add_rms_norm(
    x: Tensor,  # [num_rows, num_columns], or its parts [num_splits, num_rows, num_columns] float32
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor | None,  # [num_columns] float32; None: no norm
    eps: float,
    *,
    scale: float = 1.0,
    post_weight: Tensor | None = None,  # [num_columns] float32: normalise x before it is added
    rows: Tensor | None = None,  # [num_out] int32 or int64: compute only these rows
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(total), total) where total = residual + scale * x; without a weight, (total, total).

    Both are in the residual's dtype. With ``rows``, both have num_out rows.
    """
    return _add_norm(x, residual, weight, None, eps, scale, post_weight, rows, centered=False)


def add_layer_norm(
    x: Tensor,  # [num_rows, num_columns], or its parts [num_splits, num_rows, num_columns] float32
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor,  # [num_columns] float32
    bias: Tensor | None,  # [num_columns] float32
    eps: float,
    *,
    scale: float = 1.0,
    rows: Tensor | None = None,  # [num_out] int32 or int64: compute only these rows
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(total), total) where total = residual + scale * x.

    Both are in the residual's dtype. With ``rows``, both have num_out rows.
    """
    return _add_norm(x, residual, weight, bias, eps, scale, None, rows, centered=True)


def _add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: float,
    post_weight: Tensor | None,
    rows: Tensor | None,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    num_rows = residual.shape[0] if rows is None else rows.shape[0]
    total = residual.new_empty(num_rows, residual.shape[1])
    out = total if weight is None else torch.empty_like(total)
    _launch(
        x, eps, residual=residual, rows=rows, weight=weight, bias=bias, post_weight=post_weight, out=out, total=total,
        scale=scale, centered=centered,
    )  # fmt: skip
    return out, total


def _launch(
    x: Tensor,
    eps: float,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    rows: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    post_weight: Tensor | None = None,
    total: Tensor | None = None,
    scale: float = 1.0,
    centered: bool = False,
) -> None:
    num_rows, num_columns = out.shape
    if not num_rows:
        return
    block = triton.next_power_of_2(num_columns)
    _norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        x if rows is None else rows,
        x if weight is None else weight,
        x if bias is None else bias,
        x if post_weight is None else post_weight,
        out,
        out if total is None else total,
        x.stride(0),  # between splits, if there are any
        x.stride(-2),
        x.stride(-2) if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        scale,
        NUM_COLUMNS=num_columns,
        NUM_SPLITS=x.shape[0] if x.dim() == 3 else 1,
        BLOCK=block,
        CENTERED=centered,
        HAS_ROWS=rows is not None,
        HAS_POST=post_weight is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=min(16, max(1, block // 256)),  # 16 bytes per thread and load in 16 bits, up to 4,096 columns
        **launch_options(x.device),
    )
