"""Top-k, top-p and min-p as a threshold on the logit, in Triton. Nothing is sorted.

Contract as in ``sampling``. The threshold is found by a search over its bits, from the highest down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import slot_layout as layout
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

TILE = 4096  # columns that a program reads at once

TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
TOP_P = tl.constexpr(layout.TOP_P)
TOP_K = tl.constexpr(layout.TOP_K)
MIN_P_MARGIN = tl.constexpr(layout.MIN_P_MARGIN)

# A key is an unsigned integer with the logits' width and order: SIGN plus a positive number's bits, SIGN minus a
# negative number's, so that -0.0 equals 0.0. A row's threshold is the same for 16-bit logits as for the same logits in
# float32.


@triton.jit
def _logit(key, DTYPE: tl.constexpr):
    """The logit of a key, as float32. Integers that are no logit's key give NaN, which no logit reaches."""
    SIGN: tl.constexpr = 1 << (DTYPE.primitive_bitwidth - 1)
    bits = tl.where(key >= SIGN, key - SIGN, (SIGN - 1) - key + SIGN + 1)
    if DTYPE.primitive_bitwidth == 16:
        bits = bits.to(tl.uint16)
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _key(logit, DTYPE: tl.constexpr):
    """The key of a logit that is not NaN."""
    SIGN: tl.constexpr = 1 << (DTYPE.primitive_bitwidth - 1)
    value = logit.to(DTYPE)
    if DTYPE.primitive_bitwidth == 16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >= SIGN, SIGN - (bits - SIGN), bits + SIGN)


@triton.jit
def _weight(logit, top, scale):
    """2^((logit - top) scale) as an integer multiple of 2^-40, so that the order of a sum does not matter.

    The compiler orders the lanes differently for float32 logits. The sum of 2^22 tokens still fits into 64 bits.
    """
    return (tl.where(logit > -float("inf"), tl.exp2((logit - top) * scale), 0.0) * 2.0**40).to(tl.int64)


@triton.jit
def _sum(lanes):
    return tl.sum(lanes, 0).to(tl.float32) * 2.0**-40


@triton.jit
def _weigh(logits, num, top, scale, first, second, third, TILE: tl.constexpr):
    """The weights of the logits >= ``first``, >= ``second`` and >= ``third``."""
    lane = tl.arange(0, TILE)
    from_first = tl.zeros((TILE,), tl.int64)
    from_second = tl.zeros((TILE,), tl.int64)
    from_third = tl.zeros((TILE,), tl.int64)
    for start in tl.range(0, num, TILE, loop_unroll_factor=4):  # four tiles of loads in flight
        logit = tl.load(logits + start + lane, mask=start + lane < num, other=-float("inf")).to(tl.float32)
        weight = _weight(logit, top, scale)
        from_first = tl.where(logit >= first, from_first + weight, from_first)
        from_second = tl.where(logit >= second, from_second + weight, from_second)
        from_third = tl.where(logit >= third, from_third + weight, from_third)
    return _sum(from_first), _sum(from_second), _sum(from_third)


@triton.jit
def _common(low, high):
    """The common prefix of two keys, and the number of zero bits below it, which is even."""
    shift = tl.full((), 0, tl.uint32)
    key = low
    differ = low ^ high
    while differ > 0:
        key -= key & (tl.full((), 3, tl.uint32) << shift)
        differ = differ >> 2
        shift += 2
    return key, shift


@triton.jit
def _next(key, above, step, from_one, from_two, from_three, target):
    """The key with its next two bits, from the weights 1, 2 and 3 steps up; and the weight above the key's range."""
    if from_three >= target:
        key += 3 * step
    elif from_two >= target:
        key += 2 * step
        above = from_three
    elif from_one >= target:
        key += step
        above = from_two
    else:
        above = from_one
    return key, above


# Both searches return the largest key such that the logits from it up weigh at least ``target``, and the weight of
# those above it; two bits per pass. The logits from ``low`` up weigh that much too, unless low is 0; none is above
# ``high``. At scale 0 each logit weighs 1. If all weigh less, the key is below that of any logit above -inf.


@triton.jit
def _search(logits, num, top, scale, target, low, high, DTYPE: tl.constexpr, TILE: tl.constexpr):
    key, shift = _common(low, high)
    above = 0.0
    while shift > 0:
        shift -= 2
        step = tl.full((), 1, tl.uint32) << shift
        one, two, three = _logit(key + step, DTYPE), _logit(key + 2 * step, DTYPE), _logit(key + 3 * step, DTYPE)
        from_one, from_two, from_three = _weigh(logits, num, top, scale, one, two, three, TILE)
        key, above = _next(key, above, step, from_one, from_two, from_three, target)
    return key, above


@triton.jit
def _search_tile(logit, top, scale, target, low, high, last, DTYPE: tl.constexpr, COUNTED: tl.constexpr):
    """Search one tile, which stays in registers. The key's last ``last`` bits stay zero.

    COUNTED: each logit weighs 1. A pass then packs its three counts into one sum, 21 bits each.
    """
    weight = _weight(logit, top, scale)
    key, shift = _common(low, high)
    above = 0.0
    while shift > last:
        shift -= 2
        step = tl.full((), 1, tl.uint32) << shift
        one, two, three = _logit(key + step, DTYPE), _logit(key + 2 * step, DTYPE), _logit(key + 3 * step, DTYPE)
        if COUNTED:
            counts = (logit >= one).to(tl.int64) + ((logit >= two).to(tl.int64) << 21)
            count = tl.sum(counts + ((logit >= three).to(tl.int64) << 42), 0)
            from_one = (count & 0x1FFFFF).to(tl.float32)
            from_two = ((count >> 21) & 0x1FFFFF).to(tl.float32)
            from_three = (count >> 42).to(tl.float32)
        else:
            from_one = _sum(tl.where(logit >= one, weight, 0))
            from_two = _sum(tl.where(logit >= two, weight, 0))
            from_three = _sum(tl.where(logit >= three, weight, 0))
        key, above = _next(key, above, step, from_one, from_two, from_three, target)
    return key, above


@triton.jit
def _threshold_kernel(
    logits,
    slot_params,
    out_slots,
    candidates,
    thresholds,
    num_columns,
    row_stride,
    NUM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. A row without filters is not read.

    A row is several tiles of TILE lanes. If the lanes' maxima from some key up already number k, or weigh top_p of the
    row, the threshold is not below that key. So only the lanes whose maximum reaches it are searched: few, unless the
    filter keeps much of the row.
    """
    DTYPE: tl.constexpr = logits.dtype.element_ty
    LOWEST: tl.constexpr = 1 << DTYPE.fp_mantissa_width  # the key of -inf
    if PDL:
        gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    num_tiles = tl.cdiv(num_columns, TILE)
    candidates += program * ((num_tiles + 1) * TILE)
    words = slot_params + tl.load(out_slots + program) * NUM_WORDS
    temperature = tl.load(words + TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(words + TOP_P).to(tl.float32, bitcast=True)
    margin = tl.load(words + MIN_P_MARGIN).to(tl.float32, bitcast=True)
    k = tl.load(words + TOP_K)
    in_k = (k > 0) & (k < num_columns)
    near = -float("inf")
    floor = tl.full((), LOWEST, tl.uint32)
    if (temperature > 0) & (in_k | (top_p < 1) | (margin > near)):
        lane = tl.arange(0, TILE)
        best = tl.full((TILE,), -float("inf"), tl.float32)
        for start in tl.range(0, num_columns, TILE, loop_unroll_factor=4):
            logit = tl.load(row + start + lane, mask=start + lane < num_columns, other=-float("inf"))
            best = tl.maximum(best, logit.to(tl.float32))
        top = tl.max(best, 0)
        if margin > near:
            near = top + margin
        # If no token is allowed, there is nothing to weigh: -inf - -inf is NaN.
        if (in_k | (top_p < 1)) & (top > -float("inf")):
            scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
            none = float("inf")
            first_top, first_scale, target = 0.0, 0.0, k.to(tl.float32)
            if not in_k:
                first_top, first_scale = top, scale
                target = top_p * _weigh(row, num_columns, top, scale, -none, none, none, TILE)[0]

            lowest, highest = tl.full((), 0, tl.uint32), _key(top, DTYPE)
            # 16 bits suffice for a bound, which need not be exact.
            half = tl.full((), DTYPE.primitive_bitwidth - 16, tl.uint32)
            bound = lowest
            if in_k:
                bound, _ = _search_tile(best, top, scale, target, lowest, highest, half, DTYPE, True)
            else:
                bound, _ = _search_tile(best, top, scale, target, lowest, highest, half, DTYPE, False)
            # Skip lanes that are all -inf: most are, if few tokens are allowed.
            kept = (best >= _logit(tl.maximum(bound, LOWEST), DTYPE)) & (best > -none)
            place = tl.cumsum(kept.to(tl.int32), 0) - 1
            num_kept = tl.sum(kept.to(tl.int32), 0)
            for tile in range(num_tiles):
                columns = tile * TILE + lane
                logit = tl.load(row + columns, mask=kept & (columns < num_columns), other=-float("inf"))
                tl.store(candidates + tile * num_kept + place, logit, mask=kept)
            tl.store(candidates + num_tiles * num_kept + lane, tl.full((TILE,), -float("inf"), DTYPE))
            tl.debug_barrier()  # threads read what others have written

            num = tl.cdiv(num_tiles * num_kept, TILE) * TILE
            few = num <= TILE
            logit = tl.load(candidates + lane).to(tl.float32)
            key, above = bound, 0.0
            if few & in_k:
                key, above = _search_tile(logit, top, scale, target, bound, highest, lowest, DTYPE, True)
            elif few:
                key, above = _search_tile(logit, top, scale, target, bound, highest, lowest, DTYPE, False)
            else:
                key, above = _search(candidates, num, first_top, first_scale, target, bound, highest, DTYPE, TILE)
            floor = tl.maximum(floor, key)
            if in_k & (top_p < 1):
                total = _weigh(candidates, num, top, scale, _logit(floor + 1, DTYPE), none, none, TILE)[0]
                tied = tl.exp2((_logit(floor, DTYPE) - top) * scale)  # the weight of each logit tied with the k-th
                target = top_p * (total + (k - above) * tied)
                if few:
                    key, _ = _search_tile(logit, top, scale, target, floor, highest, lowest, DTYPE, False)
                else:
                    key, _ = _search(candidates, num, top, scale, target, floor, highest, DTYPE, TILE)
                floor = tl.maximum(floor, key)
    if PDL:
        gdc_launch_dependents()
    tl.store(thresholds + program, tl.maximum(_logit(floor, DTYPE), near))


def thresholds(
    logits: Tensor,  # [num_rows, num_columns]
    slot_params: Tensor,  # [num_slots, NUM_WORDS] int32
    out_slots: Tensor,  # [num_rows] int32
) -> Tensor:
    """The smallest logit that each row keeps, [num_rows] float32; -inf for rows without filters and greedy rows."""
    num_rows, num_columns = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _threshold_kernel[(num_rows,)](
        logits,
        slot_params,
        out_slots,
        logits.new_empty(num_rows, (triton.cdiv(num_columns, TILE) + 1) * TILE),
        out,
        num_columns,
        logits.stride(0),
        NUM_WORDS=slot_params.shape[1],
        TILE=TILE,
        num_warps=16,
        **launch_options(logits.device),
    )
    return out
