"""The first and last kernels of a step, in Triton: fill in placeholders and update tables; sample tokens.

Knows rows of numbers; knows no request.

Contract:
- logits: [num_rows, num_columns] in bfloat16, float16 or float32, last dimension contiguous, any stride between rows.
- all other tensors are int32 and contiguous; floats among the parameters are stored as their bits. Indices are not
  checked. ``slot_layout`` defines the words of a slot.
- a row's token depends on that row alone, bit for bit: no float sum has a varying order, and neither the logits' dtype
  nor the other rows' choice of graph changes it.
- nothing is sorted. A filter is a threshold on the logit (``filters``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import slot_layout as layout
from cbatch.kernels.filters import TEMPERATURE, thresholds
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

# No kernel may call an argument "params": the launcher that Triton 3.6 generates has a variable of that name.
CHUNK = 4096  # columns per program of _choose_kernel: 32 rows of 128,256 columns are 1,024 programs, one wave

SEED = tl.constexpr(layout.SEED)
FEATURES = tl.constexpr(layout.FEATURES)
COUNTED = tl.constexpr(layout.COUNTED)
OUTPUT = tl.constexpr(layout.OUTPUT)
RECENT = tl.constexpr(layout.RECENT)
NUM_RECENT = tl.constexpr(layout.MAX_BAD_WORD_LEN)


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
    """One program: a piece of each of the three independent lists."""
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
    """Scatter updates into tables and parameters. Returns the step's tokens with the placeholders filled in."""
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
        **launch_options(out.device),
    )
    return out


@triton.jit
def _mix(x):
    """MurmurHash3's 32-bit finaliser."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def pack(score, column):
    """score << 32 | (last column - column): the maximum is the best score, and of ties the first column.

    The score becomes an integer of the same order, with NaN above all.
    """
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0: a tie
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - column)


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
    """One program: the best column of one chunk of one row, packed."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    score = tl.load(logits + row * row_stride + columns, mask=mask, other=-float("inf")).to(tl.float32)
    if NOISE:
        words = slot_params + tl.load(out_slots + row) * NUM_WORDS
        temperature = tl.load(words + TEMPERATURE).to(tl.float32, bitcast=True)
        random = temperature > 0
        if FILTERED:
            score = tl.where(score < tl.load(thresholds + row), -float("inf"), score)
            random = random & (tl.max(score, 0) > -float("inf"))  # most chunks keep no token: skip their noise
        if random:
            position = (tl.load(positions + tl.load(sample_rows + row)) + 1).to(tl.uint32, bitcast=True)
            low = tl.load(words + SEED).to(tl.uint32, bitcast=True)
            high = tl.load(words + SEED + 1).to(tl.uint32, bitcast=True)
            first = _mix(_mix(position * 0x9E3779B9 + low) ^ high)
            second = _mix(_mix(position ^ high) + low * 0x85EBCA6B)
            bits = _mix(_mix(columns.to(tl.uint32, bitcast=True) * 0x9E3779B9 + first) ^ second)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
            score -= temperature * tl.log(-tl.log(uniform))
    chosen = tl.max(tl.where(mask, pack(score, columns), -(2**63)), 0)
    if PDL:
        gdc_launch_dependents()
    tl.store(best + row * tl.num_programs(1) + chunk, chosen)


@triton.jit(do_not_specialize=["num_chunks"])
def _finish_kernel(
    best,
    out_slots,
    last_tokens,
    sampled,
    slot_params,
    positions,
    sample_rows,
    counts,
    lists,
    num_chunks,
    count_stride,
    list_stride,
    PADDED: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best chunk of one row. With KEEP, updates the slot's count and recent tokens."""
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
    if KEEP:
        position = tl.load(positions + tl.load(sample_rows + row)) + 1
        tl.store(lists + slot.to(tl.int64) * list_stride + RECENT + position % NUM_RECENT, token)
        if tl.load(slot_params + slot * NUM_WORDS + FEATURES) & COUNTED:
            count = counts + slot.to(tl.int64) * count_stride + token
            tl.store(count, tl.load(count) + OUTPUT)


def greedy(
    logits: Tensor,  # [num_rows, num_columns]
    out_slots: Tensor,  # [num_rows] int32
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
) -> None:
    """Write each row's argmax, of ties the first, to last_tokens[out_slots] and sampled. NaN is the largest.

    Two launches.
    """
    _choose(logits, out_slots, last_tokens, sampled)


def draw(
    logits: Tensor,  # [num_rows, num_columns]
    slot_params: Tensor,  # [num_slots, NUM_WORDS] int32
    positions: Tensor,  # [num_tokens] int32
    sample_rows: Tensor,  # [num_rows] int32: the step's token behind which a row samples
    out_slots: Tensor,  # [num_rows] int32: each row's slot
    last_tokens: Tensor,  # [num_slots] int32, changed in place
    sampled: Tensor,  # [at least num_rows] int32, changed in place
    *,
    filtered: bool,  # whether some row asks for top-k, top-p or min-p
    counts: Tensor | None = None,  # with lists: updated in place
    lists: Tensor | None = None,
) -> None:
    """Draw each row's token from softmax(logits / temperature) over the logits that ``thresholds`` keeps.

    Rows of temperature 0 take the first largest logit. A row whose logits are all -inf takes token 0. Two launches,
    three if ``filtered``.
    """
    limits = thresholds(logits, slot_params, out_slots) if filtered else None
    _choose(logits, out_slots, last_tokens, sampled, slot_params, positions, sample_rows, limits, counts, lists)


def _choose(
    logits: Tensor,
    out_slots: Tensor,
    last_tokens: Tensor,
    sampled: Tensor,
    slot_params: Tensor | None = None,  # None: greedy, and all below is None too
    positions: Tensor | None = None,
    sample_rows: Tensor | None = None,
    limits: Tensor | None = None,
    counts: Tensor | None = None,
    lists: Tensor | None = None,
) -> None:
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    num_words = 0 if slot_params is None else slot_params.shape[1]
    words = out_slots if slot_params is None else slot_params  # any tensor serves as an unused argument
    places = [out_slots if tensor is None else tensor for tensor in (positions, sample_rows)]
    _choose_kernel[(num_rows, num_chunks)](
        logits,
        words,
        *places,
        out_slots,
        out_slots if limits is None else limits,
        best,
        num_columns,
        logits.stride(0),
        NUM_WORDS=num_words,
        BLOCK=CHUNK,
        NOISE=slot_params is not None,
        FILTERED=limits is not None,
        num_warps=8,
        **options,
    )
    _finish_kernel[(num_rows,)](
        best,
        out_slots,
        last_tokens,
        sampled,
        words,
        *places,
        out_slots if counts is None else counts,
        out_slots if lists is None else lists,
        num_chunks,
        0 if counts is None else counts.stride(0),
        0 if lists is None else lists.stride(0),
        PADDED=triton.next_power_of_2(num_chunks),
        NUM_WORDS=num_words,
        KEEP=counts is not None,
        num_warps=1,
        **options,
    )
