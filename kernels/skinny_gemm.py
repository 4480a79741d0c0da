"""Matrix products of few rows in Triton: x @ weight.T, bound by the time to read the weight. Knows no model.

Contract:
- x: [num_rows, K] with at most 192 rows; weight: [N, K], for a gated MLP [2 * N, K] with the gate's rows first; both in
  one dtype of 16 bits, K a multiple of 8, elements of a row contiguous, rows and start aligned to 16 bytes: what the
  tensor memory accelerator asks for. (The interpreter runs float32.)
- float32 sums, in an order that K, ``block_k`` and ``split_k`` fix: a row's bits do not depend on the rows beside it.

The weight stands on the left, so that its rows fill the 64-row side of Hopper's tensor-core instruction and x only
its free side, which goes down to 16. Both come in tiles through tensor descriptors, which need no registers and no
address arithmetic, and whatever lies beyond K, N or num_rows arrives as zero. Where N gives too few tiles to keep
every multiprocessor reading, K is split over several programs, whose partial sums stay in float32 for the kernel
behind to add: it reads them anyway, and no semaphore or second pass is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor, dtype, float32
from triton.tools.tensor_descriptor import TensorDescriptor

from cbatch.kernels.activation import apply_act
from cbatch.kernels.norm import add_up, load_parts
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

# num_rows is rounded up to one of these, so that there are few variants to compile. A size that is no power of two is
# two tiles of rows, the larger first: if 65 rows cost as much as 128, a step would take a tenth longer than with 64.
# There is no 48: as 32 and 16 rows, it took 1% longer than 64 at the 8B shape. Over 128 rows cuBLAS is faster, except
# for products that it splits along K and sums itself, which here the norm behind adds up; and with 256, no step gained.
ROWS = (16, 32, 64, 80, 96, 128, 144, 160, 192)
SHARED_BYTES = 227 * 1024  # of a block on Hopper
MAX_ACCUMULATORS = 128  # float32 registers of a thread's 255 that sums may take


@dataclass(frozen=True)
class Config:
    """How a product is cut into programs."""

    block_n: int  # rows of the weight in a tile
    block_k: int
    num_stages: int  # tiles on their way at once
    split_k: int
    num_warps: int

    def fits(self, rows: int, gated: bool) -> bool:
        """Whether the kernel exists: whole warpgroups, tiles in shared memory, sums in registers."""
        num_sums = self._num_weight_rows(gated) * rows // (32 * self.num_warps)
        return (
            all(n > 0 and n & (n - 1) == 0 for n in (self.block_n, self.block_k, self.num_warps))
            and (self.block_n % 64, self.block_k % 64, self.num_warps % 4) == (0, 0, 0)
            and max(self.block_n, self.block_k) <= 256
            and self.num_stages > 0
            and self.split_k > 0
            and not (gated and self.split_k > 1)
            and self.shared_bytes(rows, gated) <= SHARED_BYTES
            and num_sums <= MAX_ACCUMULATORS
        )

    def shared_bytes(self, rows: int, gated: bool) -> int:
        """Shared memory of a block, at most: the tiles of all stages, and their barriers."""
        return self.num_stages * (2 * (self._num_weight_rows(gated) + rows) * self.block_k + 32)

    def _num_weight_rows(self, gated: bool) -> int:
        return self.block_n * (2 if gated else 1)


@triton.jit
def _store(
    out,
    sums,  # [BLOCK_N, SIZE]
    up_sums,
    bias,
    columns,  # [BLOCK_N, 1]
    bias_columns,
    first_row,
    num_rows,
    num_columns,
    SIZE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Apply bias and activation, and store BLOCK_N columns of SIZE rows."""
    if HAS_BIAS:
        mask = columns < bias_columns
        sums += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias + num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    if ACT is not None:
        sums = apply_act(sums, ACT)
    if GATED:
        sums = sums * up_sums
    # Triton turns the sums around through shared memory, so that a warp stores whole lines of a row.
    row = first_row + tl.arange(0, SIZE)[None, :]
    mask = (columns < num_columns) & (row < num_rows)
    tl.store(out + row * num_columns + columns, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "K", "part_k"])
def _skinny_gemm_kernel(
    x,  # descriptor of [num_rows, K], tiles [BLOCK_M, BLOCK_K]
    more_x,  # the same with tiles [MORE_M, BLOCK_K], for the rows behind the first BLOCK_M
    weight,  # descriptor of [num_columns, K], gated [2 * num_columns, K], tiles [BLOCK_N, BLOCK_K]
    bias,
    out,  # [num_parts, num_rows, num_columns]
    num_rows,
    num_columns,
    K,
    part_k,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    MORE_M: tl.constexpr,  # 0: there are none
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,  # None, or a name of an activation
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N columns of all rows, over part_k of K. The last parts may have less of K, or none: then they
    store zeros."""
    first_column = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    start = part * part_k
    end = tl.minimum(start + part_k, K)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_sums = sums  # GATED alone changes it
    if MORE_M:
        more_sums = tl.zeros((BLOCK_N, MORE_M), tl.float32)
        more_up_sums = more_sums
    if PDL:
        gdc_wait()
    for k in range(start, end, BLOCK_K):
        # All loads stand before all uses: Triton then waits for them with one barrier.
        w = weight.load([first_column, k])
        if GATED:
            up = weight.load([num_columns + first_column, k])
        rows = x.load([0, k])
        if MORE_M:
            more_rows = more_x.load([BLOCK_M, k])
        sums = tl.dot(w, rows.T, sums, input_precision="ieee")
        if GATED:
            up_sums = tl.dot(up, rows.T, up_sums, input_precision="ieee")
        if MORE_M:
            more_sums = tl.dot(w, more_rows.T, more_sums, input_precision="ieee")
            if GATED:
                more_up_sums = tl.dot(up, more_rows.T, more_up_sums, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()

    out += part.to(tl.int64) * num_rows * num_columns
    columns = first_column + tl.arange(0, BLOCK_N)[:, None]
    bias_columns = tl.where(part == 0, num_columns, 0)  # once: in the first part
    _store(out, sums, up_sums, bias, columns, bias_columns, 0, num_rows, num_columns, BLOCK_M, ACT, GATED, HAS_BIAS)
    if MORE_M:
        _store(
            out, more_sums, more_up_sums, bias, columns, bias_columns, BLOCK_M, num_rows, num_columns, MORE_M, ACT,
            GATED, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def _sum_partials_kernel(partials, out, size, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: BLOCK elements of out, each the sum of NUM_PARTS elements that lie ``size`` apart."""
    if PDL:
        gdc_wait()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    value = add_up(load_parts(partials + index, mask, size, NUM_PARTS))
    if PDL:
        gdc_launch_dependents()
    tl.store(out + index, value.to(out.dtype.element_ty), mask=mask)


def skinny_gemm(
    x: Tensor,  # [num_rows, K]
    weight: Tensor,  # [N, K], gated [2 * N, K]
    bias: Tensor | None,  # [N], gated [2 * N]
    config: Config,
    *,
    act: str | None = None,  # one of ``reference.ACTIVATIONS``
    gated: bool = False,
) -> Tensor:
    """x @ weight.T + bias, [num_rows, N] in x's dtype; with split_k > 1 its parts, [split_k, num_rows, N] float32.

    With ``act``, act of that; gated, act(gate) * up: neither of a product that is split.
    """
    assert config.split_k == 1 or (act is None and not gated), "an activation wants the whole sum"
    (num_rows, k), num_columns = x.shape, weight.shape[0] // (2 if gated else 1)
    rows = next(size for size in ROWS if num_rows <= size)
    block_m = 1 << rows.bit_length() - 1
    more_m = rows - block_m
    if config.split_k == 1:
        out = x.new_empty(num_rows, num_columns)
    else:
        out = x.new_empty(config.split_k, num_rows, num_columns, dtype=float32)
    # Descriptors are made anew: 2.6 µs each beside some 30 of an eager launch, and a captured graph has them inside.
    _skinny_gemm_kernel[(triton.cdiv(num_columns, config.block_n), config.split_k)](
        TensorDescriptor.from_tensor(x, [block_m, config.block_k]),
        TensorDescriptor.from_tensor(x, [more_m or block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        x if bias is None else bias,
        out,
        num_rows,
        num_columns,
        k,
        triton.cdiv(k, config.split_k * config.block_k) * config.block_k,
        BLOCK_M=block_m,
        MORE_M=more_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        ACT=act,
        GATED=gated,
        HAS_BIAS=bias is not None,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        **launch_options(x.device),
    )
    return out


def sum_partials(
    partials: Tensor,  # [num_parts, num_rows, num_columns] float32, contiguous
    dtype: dtype,
) -> Tensor:
    """The sum over the first dimension, in its order, [num_rows, num_columns] rounded once to dtype."""
    num_parts, *shape = partials.shape
    out = partials.new_empty(shape, dtype=dtype)
    block = 1024
    _sum_partials_kernel[(triton.cdiv(out.numel(), block),)](
        partials, out, out.numel(), NUM_PARTS=num_parts, BLOCK=block, num_warps=4, **launch_options(out.device)
    )
    return out
