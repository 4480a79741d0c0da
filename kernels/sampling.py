"""What a step opens and ends with, in Triton: placeholders filled in and tables brought up to date; tokens chosen.

Knows rows of numbers; knows no request.

Contract:
- logits: [num_rows, num_columns] in bfloat16, float16 or float32, last dimension contiguous, any stride between rows.
- all that is not logits is int32 and contiguous; floats among the params travel as their bits. Indices are trusted.
- a row's token is a function of that row: it has the same bits alone and in any batch. No float is added up in an order
  that could vary.
- nothing is sorted. A filter is a threshold on the logit, which is searched for from the highest bits of it down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_options

# No kernel may call an argument "params": the launcher that Triton 3.6 generates has a variable of that name.
FMA = {"enable_fp_fusion": True}  # said at every launch: Triton 3.9 warns where it is left to the default
CHUNK = 4096  # columns of one program that chooses: 32 rows of 128,256 are one wave of programs
TILE = 4096  # columns that a program which searches a row looks at together


@triton.jit(do_not_specialize=["num_tokens", "num_updates", "num_param_words"])
def _begin_step_kernel(
    input_ids,
    carry_slots,
    last_tokens,
    tables,
    table_index,
    table_value,
    slot_params,
    param_slots,
    param_values,
    out,
    num_tokens,
    num_updates,
    num_param_words,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one piece of each of the three lists, which have nothing to do with each other."""
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_update, is_word = at < num_tokens, at < num_updates, at < num_param_words
    carry_slot = tl.load(carry_slots + at, mask=is_token, other=-1)
    token = tl.load(input_ids + at, mask=is_token)
    carried = tl.load(last_tokens + carry_slot, mask=carry_slot >= 0)
    index = tl.load(table_index + at, mask=is_update)
    block = tl.load(table_value + at, mask=is_update)
    slot = tl.load(param_slots + at // NUM_WORDS, mask=is_word)
    word = tl.load(param_values + at, mask=is_word)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + at, tl.where(carry_slot >= 0, carried, token), mask=is_token)
    tl.store(tables + index, block, mask=is_update)
    tl.store(slot_params + slot * NUM_WORDS + at % NUM_WORDS, word, mask=is_word)


def begin_step(
    input_ids: Tensor,  # [num_tokens] int32
    carry_slots: Tensor,  # [num_tokens] int32
    last_tokens: Tensor,  # [num_slots] int32
    tables: Tensor,  # flat int32, changed in place
    table_index: Tensor,  # [num_updates] int32
    table_value: Tensor,  # [num_updates] int32
    slot_params: Tensor,  # [num_slots, num_words] int32, changed in place
    param_slots: Tensor,  # [num_new] int32
    param_values: Tensor,  # [num_new, num_words] int32
) -> Tensor:
    """Scatter what is new into tables and parameters, and return the step's tokens with the placeholders filled in."""
    out = torch.empty_like(input_ids)
    sizes = out.numel(), table_index.numel(), param_values.numel()
    block = 256
    _begin_step_kernel[(max(1, triton.cdiv(max(sizes), block)),)](
        input_ids,
        carry_slots,
        last_tokens,
        tables,
        table_index,
        table_value,
        slot_params,
        param_slots,
        param_values,
        out,
        *sizes,
        NUM_WORDS=slot_params.shape[1],
        BLOCK=block,
        num_warps=2,
        **FMA,
        **pdl_options(out.device),
    )
    return out


@triton.jit
def _mix(x):
    """MurmurHash3's 32-bit finaliser."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _choose_kernel(
    logits,
    slot_params,
    positions,
    sample_rows,
    out_slots,
    thresholds,
    best,
    num_columns,
    row_stride,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best column of one chunk of one row, as score << 32 | how far the column is from the last one.

    So the larger of two such words is the better one, or the first of two as good. The score is an integer that orders
    as the float does, with NaN above all.
    """
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    score = tl.load(logits + row * row_stride + columns, mask=mask, other=-float("inf")).to(tl.float32)
    if NOISE:
        words = slot_params + tl.load(out_slots + row) * NUM_WORDS
        temperature = tl.load(words).to(tl.float32, bitcast=True)
        random = temperature > 0
        if FILTERED:
            score = tl.where(score < tl.load(thresholds + row), -float("inf"), score)
            random = random & (tl.max(score, 0) > -float("inf"))  # few chunks have any of the top k
        if random:
            position = (tl.load(positions + tl.load(sample_rows + row)) + 1).to(tl.uint32, bitcast=True)
            low = tl.load(words + 3).to(tl.uint32, bitcast=True)
            high = tl.load(words + 4).to(tl.uint32, bitcast=True)
            first = _mix(_mix(position * 0x9E3779B9 + low) ^ high)
            second = _mix(_mix(position ^ high) + low * 0x85EBCA6B)
            bits = _mix(_mix(columns.to(tl.uint32, bitcast=True) * 0x9E3779B9 + first) ^ second)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
            score -= temperature * tl.log(-tl.log(uniform))
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0: they are as good
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - columns)
    chosen = tl.max(tl.where(mask, packed, -(2**63)), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(best + row * tl.num_programs(1) + chunk, chosen)


@triton.jit(do_not_specialize=["num_chunks"])
def _finish_kernel(
    best,
    out_slots,
    last_tokens,
    sampled,
    num_chunks,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best chunk of one row."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0)
    chunks = tl.arange(0, PADDED)
    packed = tl.load(best + row * num_chunks + chunks, mask=chunks < num_chunks, other=-(2**63))
    token = (0x7FFFFFFF - (tl.max(packed, 0) & 0x7FFFFFFF)).to(tl.int32)
    slot = tl.load(out_slots + row)
    if PDL:
        gdc_launch_dependents()
    tl.store(sampled + row, token)
    tl.store(last_tokens + slot, token)


def greedy(
    logits: Tensor,  # [num_rows, num_columns]
    out_slots: Tensor,  # [num_rows] int32
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
) -> None:
    """Put the first column of each row's largest logit into last_tokens[out_slots] and sampled. NaN is the largest.

    Two launches.
    """
    _choose(logits, out_slots, last_tokens, sampled)


def draw(
    logits: Tensor,  # [num_rows, num_columns]
    slot_params: Tensor,  # [num_slots, 5] int32: float bits of temperature and top_p, top_k, two halves of the seed
    positions: Tensor,  # [num_tokens] int32
    sample_rows: Tensor,  # [num_rows] int32: the token behind which a row draws
    out_slots: Tensor,  # [num_rows] int32: whose parameters, and whose token it is
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
    *,
    filtered: bool,  # whether some row asks for top-k or top-p
) -> None:
    """Draw a token of each row from softmax(logits / temperature) over what ``thresholds`` keeps of it.

    Rows of temperature 0 take the first largest logit. Two launches, three if ``filtered``.
    """
    limits = thresholds(logits, slot_params, out_slots) if filtered else None
    _choose(logits, out_slots, last_tokens, sampled, slot_params, positions, sample_rows, limits)


def _choose(
    logits: Tensor,
    out_slots: Tensor,
    last_tokens: Tensor,
    sampled: Tensor,
    slot_params: Tensor | None = None,  # and what follows: to draw
    positions: Tensor | None = None,
    sample_rows: Tensor | None = None,
    limits: Tensor | None = None,
) -> None:
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    pdl = pdl_options(logits.device)
    _choose_kernel[(num_rows, num_chunks)](
        logits,
        out_slots if slot_params is None else slot_params,
        out_slots if positions is None else positions,
        out_slots if sample_rows is None else sample_rows,
        out_slots,
        out_slots if limits is None else limits,
        best,
        num_columns,
        logits.stride(0),
        NUM_WORDS=0 if slot_params is None else slot_params.shape[1],
        BLOCK=CHUNK,
        NOISE=slot_params is not None,
        FILTERED=limits is not None,
        num_warps=8,
        **FMA,
        **pdl,
    )
    _finish_kernel[(num_rows,)](
        best,
        out_slots,
        last_tokens,
        sampled,
        num_chunks,
        PADDED=triton.next_power_of_2(num_chunks),
        num_warps=1,
        **FMA,
        **pdl,
    )


# The search for a threshold. A key is an unsigned integer of as many bits as the logits have, which orders as they do:
# a positive number's bits above the sign bit, a negative number's that far below it, so that -0.0 meets 0.0.


@triton.jit
def _logit(key, DTYPE: tl.constexpr):
    """The logit of a key, as float32. Some integers are the key of none: NaN, which no logit reaches."""
    SIGN: tl.constexpr = 1 << (DTYPE.primitive_bitwidth - 1)
    bits = tl.where(key >= SIGN, key - SIGN, (SIGN - 1) - key + SIGN + 1)
    if DTYPE.primitive_bitwidth == 16:
        bits = bits.to(tl.uint16)
    return bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _weigh(logits, num, top, scale, first, second, third, TILE: tl.constexpr):
    """What the logits from ``first`` up weigh, 2^((logit - top) scale) each, and those from ``second``, from ``third``.

    Added up in an order that ``num`` fixes.
    """
    lane = tl.arange(0, TILE)
    from_first = tl.zeros((TILE,), tl.float32)
    from_second = tl.zeros((TILE,), tl.float32)
    from_third = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, num, TILE, loop_unroll_factor=4):  # four tiles of loads in flight
        logit = tl.load(logits + start + lane, mask=start + lane < num, other=-float("inf")).to(tl.float32)
        weight = tl.exp2((logit - top) * scale)
        from_first = tl.where(logit >= first, from_first + weight, from_first)
        from_second = tl.where(logit >= second, from_second + weight, from_second)
        from_third = tl.where(logit >= third, from_third + weight, from_third)
    return tl.sum(from_first, 0), tl.sum(from_second, 0), tl.sum(from_third, 0)


@triton.jit
def _search(logits, num, top, scale, target, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """The largest key from which up the logits weigh ``target``, and what those above it weigh. Two bits a pass.

    At scale 0 each logit weighs 1. Where all of them weigh less: no key of a logit above -inf.
    """
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    key = tl.full((), 0, tl.uint32)
    above = 0.0
    for digit in range(BITS // 2):
        step = tl.full((), 1, tl.uint32) << (BITS - 2 - 2 * digit)
        one, two, three = _logit(key + step, DTYPE), _logit(key + 2 * step, DTYPE), _logit(key + 3 * step, DTYPE)
        from_one, from_two, from_three = _weigh(logits, num, top, scale, one, two, three, TILE)
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

    A row is some tiles of lanes. The largest logit of each lane is a logit, so as soon as these alone are k, or
    weigh top_p of all, the threshold is none of those below, and only the lanes that reach it are searched: few, unless
    the filter keeps much of the row.
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
    temperature = tl.load(words).to(tl.float32, bitcast=True)
    top_p = tl.load(words + 1).to(tl.float32, bitcast=True)
    k = tl.load(words + 2)
    in_k = (k > 0) & (k < num_columns)
    floor = tl.full((), LOWEST, tl.uint32)
    if (temperature > 0) & (in_k | (top_p < 1)):
        lane = tl.arange(0, TILE)
        best = tl.full((TILE,), -float("inf"), tl.float32)
        for start in tl.range(0, num_columns, TILE, loop_unroll_factor=4):
            logit = tl.load(row + start + lane, mask=start + lane < num_columns, other=-float("inf"))
            best = tl.maximum(best, logit.to(tl.float32))
        top = tl.max(best, 0)
        scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
        none = float("inf")
        first_top, first_scale, target = 0.0, 0.0, k.to(tl.float32)
        if not in_k:
            first_top, first_scale = top, scale
            target = top_p * _weigh(row, num_columns, top, scale, -none, none, none, TILE)[0]

        tl.store(candidates + lane, best.to(DTYPE))
        tl.debug_barrier()  # a thread reads what others have written
        bound, _ = _search(candidates, TILE, first_top, first_scale, target, DTYPE, TILE)
        kept = best >= _logit(tl.maximum(bound, LOWEST), DTYPE)
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        num_kept = tl.sum(kept.to(tl.int32), 0)
        for tile in range(num_tiles):
            columns = tile * TILE + lane
            logit = tl.load(row + columns, mask=kept & (columns < num_columns), other=-float("inf"))
            tl.store(candidates + tile * num_kept + place, logit, mask=kept)
        tl.store(candidates + num_tiles * num_kept + lane, tl.full((TILE,), -float("inf"), DTYPE))
        tl.debug_barrier()

        num = tl.cdiv(num_tiles * num_kept, TILE) * TILE
        key, above = _search(candidates, num, first_top, first_scale, target, DTYPE, TILE)
        floor = tl.maximum(floor, key)
        if in_k & (top_p < 1):
            total = _weigh(candidates, num, top, scale, _logit(floor + 1, DTYPE), none, none, TILE)[0]
            tied = tl.exp2((_logit(floor, DTYPE) - top) * scale)  # each of those that equal the k-th largest
            total += (k - above) * tied
            floor = tl.maximum(floor, _search(candidates, num, top, scale, top_p * total, DTYPE, TILE)[0])
    if PDL:
        gdc_launch_dependents()
    tl.store(thresholds + program, _logit(floor, DTYPE))


def thresholds(
    logits: Tensor,  # [num_rows, num_columns]
    slot_params: Tensor,  # [num_slots, 5] int32
    out_slots: Tensor,  # [num_rows] int32
) -> Tensor:
    """The smallest logit that each row keeps, [num_rows] float32; -inf where it asks for all, or is greedy."""
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
        **FMA,
        **pdl_options(logits.device),
    )
    return out
