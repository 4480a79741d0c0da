"""Changes logits before sampling: masks, bans, biases, penalties. In Triton.

Contract as in ``sampling``. ``slot_layout`` defines a slot's words, counts and lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import slot_layout as layout
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from cbatch.kernels.sampling import CHUNK, COUNTED, FEATURES, NUM_RECENT, RECENT

REPETITION = tl.constexpr(layout.REPETITION)
PRESENCE = tl.constexpr(layout.PRESENCE)
FREQUENCY = tl.constexpr(layout.FREQUENCY)
NUM_BIASES = tl.constexpr(layout.NUM_BIASES)
NUM_BAD_WORDS = tl.constexpr(layout.NUM_BAD_WORDS)
ALLOWED = tl.constexpr(layout.ALLOWED)
BIASES = tl.constexpr(layout.BIASES)
MAX_BIASES = tl.constexpr(layout.MAX_BIASES)
BAD_WORDS = tl.constexpr(layout.BAD_WORDS)
MAX_BAD_WORDS = tl.constexpr(layout.MAX_BAD_WORDS)
MASK = tl.constexpr(layout.MASK)
ENTRIES = tl.constexpr(256)  # biases that are read at once, one per thread


@triton.jit
def _look_up(logits, counts, lists, token, mask, num_counted, num_limited):
    """The tokens' logits, -inf if not allowed, and their counts. num_counted and num_limited are 0 or num_columns."""
    logit = tl.load(logits + token, mask=mask, other=0.0).to(tl.float32)
    count = tl.load(counts + token, mask=mask & (token < num_counted), other=0)
    allowed = tl.load(lists + MASK + token // 32, mask=mask & (token < num_limited), other=-1)
    return tl.where(((allowed >> (token % 32)) & 1) != 0, logit, -float("inf")), count


@triton.jit
def _penalised(logit, count, repetition, presence, frequency):
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    times = (count >> 1).to(tl.float32)
    return tl.where(count > 0, repeated, logit) - (times * frequency + tl.where(times > 0, presence, 0.0))


@triton.jit
def _process_kernel(
    logits,
    slot_params,
    counts,
    lists,
    positions,
    sample_rows,
    out_slots,
    out,
    num_columns,
    row_stride,
    count_stride,
    list_stride,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one chunk of one row.

    Each program scans the row's lists for entries in its chunk, so that one launch suffices: a biased logit is computed
    again and overwrites the chunk's, and a ban overwrites that.
    """
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    end = tl.minimum(start + BLOCK, num_columns)
    slot = tl.load(out_slots + row).to(tl.int64)
    logits += row * row_stride
    out += row * num_columns
    counts += slot * count_stride
    lists += slot * list_stride
    words = slot_params + slot * NUM_WORDS
    features = tl.load(words + FEATURES)
    num_counted = tl.where((features & COUNTED) != 0, num_columns, 0)
    num_limited = tl.where((features & ALLOWED) != 0, num_columns, 0)
    repetition = tl.load(words + REPETITION).to(tl.float32, bitcast=True)
    presence = tl.load(words + PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(words + FREQUENCY).to(tl.float32, bitcast=True)
    num_biases = tl.minimum(tl.load(words + NUM_BIASES), MAX_BIASES)  # a padding row's words are arbitrary
    num_bad_words = tl.load(words + NUM_BAD_WORDS)

    columns = start + tl.arange(0, BLOCK)
    inside = columns < end
    logit, count = _look_up(logits, counts, lists, columns, inside, num_counted, num_limited)
    if PDL:
        gdc_launch_dependents()
    tl.store(out + columns, _penalised(logit, count, repetition, presence, frequency), mask=inside)

    if (num_biases > 0) | (num_bad_words > 0):
        position = tl.load(positions + tl.load(sample_rows + row)) + 1
        tl.debug_barrier()  # other threads overwrite the stores above
        for first in range(0, num_biases, ENTRIES):
            entry = lists + BIASES + first + tl.arange(0, ENTRIES)
            token = tl.load(entry, mask=first + tl.arange(0, ENTRIES) < num_biases, other=-1)
            here = (token >= start) & (token < end)
            value = tl.load(entry + MAX_BIASES, mask=here, other=0).to(tl.float32, bitcast=True)
            until = tl.load(entry + 2 * MAX_BIASES, mask=here, other=0)
            biased, times = _look_up(logits, counts, lists, token, here, num_counted, num_limited)
            biased = tl.where(position < until, -float("inf"), biased + value)
            tl.store(out + token, _penalised(biased, times, repetition, presence, frequency), mask=here)
        if num_bad_words > 0:
            tl.debug_barrier()
            word, place = tl.arange(0, MAX_BAD_WORDS), tl.arange(0, NUM_RECENT)
            row_of_words = lists + BAD_WORDS + word * NUM_RECENT
            is_word = word < num_bad_words
            tokens = tl.load(row_of_words[:, None] + place[None, :], mask=is_word[:, None], other=-1)
            # The last place is the token to be sampled; the place before it is the token before that.
            recent = tl.load(lists + RECENT + ((position + place - (NUM_RECENT - 1)) & (NUM_RECENT - 1)))
            differs = (tokens >= 0) & (tokens != recent[None, :]) & (place[None, :] < NUM_RECENT - 1)
            last = tl.load(row_of_words + NUM_RECENT - 1, mask=is_word, other=-1)
            here = (tl.sum(differs.to(tl.int32), 1) == 0) & (last >= start) & (last < end)
            tl.store(out + last, -float("inf"), mask=here)


def process_logits(
    logits: Tensor,  # [num_rows, num_columns]
    slot_params: Tensor,  # [num_slots, NUM_WORDS] int32
    counts: Tensor,  # [num_slots, num_columns] int32
    lists: Tensor,  # [num_slots, num_list_words(num_columns)] int32
    positions: Tensor,  # [num_tokens] int32
    sample_rows: Tensor,  # [num_rows] int32: the step's token behind which a row samples
    out_slots: Tensor,  # [num_rows] int32: each row's slot
) -> Tensor:
    """The logits to sample from, [num_rows, num_columns] float32. One launch."""
    num_rows, num_columns = logits.shape
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=logits.device)
    _process_kernel[(num_rows, triton.cdiv(num_columns, CHUNK))](
        logits,
        slot_params,
        counts,
        lists,
        positions,
        sample_rows,
        out_slots,
        out,
        num_columns,
        logits.stride(0),
        counts.stride(0),
        lists.stride(0),
        NUM_WORDS=slot_params.shape[1],
        BLOCK=CHUNK,
        num_warps=8,
        **launch_options(logits.device),
    )
    return out
