"""Log-probabilities of the sampled tokens and of the most likely ones, in Triton. Nothing is sorted.

Contract as in ``sampling``. A chunk of a row is some groups of columns. The best of each group is kept, packed with its
column, so that no two are equal; the best of these is the row's, and then its group is looked at once more for the next
best it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from cbatch.kernels.sampling import pack

GROUP = 128  # columns: of 128,256 there are 1,002 groups, one more load for each of the k that are wanted
GROUPS = 32  # of a program

LOWEST = tl.constexpr(-(2**63))  # below whatever is packed


@triton.jit
def _parts_kernel(
    logits,
    sampled,
    best,
    parts,
    num_columns,
    row_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one chunk of one row. Its largest logit, the sum of exp(logit - that), and how many are above."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += row * row_stride
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < num_columns
    logit = tl.load(logits + columns, mask=mask, other=-float("inf")).to(tl.float32)
    token = tl.load(sampled + row)
    own = pack(tl.load(logits + token).to(tl.float32), token)
    packed = tl.where(mask, pack(logit, columns), LOWEST)
    num_above = tl.sum(tl.sum((packed > own).to(tl.int32), 1), 0)
    top = tl.max(tl.max(logit, 1), 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.exp(logit - base), 1), 0)
    part = parts + (row * tl.num_programs(1) + chunk) * 3
    if PDL:
        gdc_launch_dependents()
    tl.store(best + row * tl.num_programs(1) * GROUPS + groups, tl.max(packed, 1))
    tl.store(part, top)
    tl.store(part + 1, total)
    tl.store(part + 2, num_above.to(tl.float32))


@triton.jit(do_not_specialize=["num_chunks"])
def _logprobs_kernel(
    logits,
    sampled,
    best,
    parts,
    records,
    num_columns,
    row_stride,
    num_chunks,
    K: tl.constexpr,
    RECORD: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    ids = records + row * RECORD
    values = ids + K + 2
    chunks = tl.arange(0, PADDED)
    part = parts + (row * num_chunks + chunks) * 3
    is_chunk = chunks < num_chunks
    top = tl.load(part, mask=is_chunk, other=-float("inf"))
    largest = tl.max(top, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.load(part + 1, mask=is_chunk, other=0.0) * tl.exp(top - base), 0)
    log_total = tl.log(total)
    rank = 1 + tl.sum(tl.load(part + 2, mask=is_chunk, other=0.0).to(tl.int32), 0)
    token = tl.load(sampled + row)
    own = tl.load(logits + token).to(tl.float32)

    groups = tl.arange(0, PADDED * GROUPS)
    candidates = tl.load(best + row * num_chunks * GROUPS + groups, mask=groups < num_chunks * GROUPS, other=LOWEST)
    for i in range(1, K + 1):
        chosen = tl.max(candidates, 0)
        found = chosen > LOWEST
        column = (0x7FFFFFFF - (chosen & 0x7FFFFFFF)).to(tl.int32)
        key = (chosen >> 32).to(tl.int32)
        logit = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(ids + i, tl.where(found, column, -1))
        tl.store(values + i, tl.where(found, logit - base - log_total, -float("inf")).to(tl.int32, bitcast=True))
        group = column // GROUP
        columns = group * GROUP + tl.arange(0, GROUP)
        mask = columns < tl.where(found, num_columns, 0)
        packed = pack(tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32), columns)
        following = tl.max(tl.where(mask & (packed < chosen), packed, LOWEST), 0)
        candidates = tl.where(groups == group, following, candidates)
    if PDL:
        gdc_launch_dependents()
    tl.store(ids, token)
    tl.store(ids + K + 1, rank)
    tl.store(values, (own - base - log_total).to(tl.int32, bitcast=True))


def logprobs(
    logits: Tensor,  # [num_rows, num_columns]
    sampled: Tensor,  # [at least num_rows] int32
    records: Tensor,  # [at least num_rows, num_record_words(k)] int32, changed in place
) -> None:
    """log_softmax of each row at the sampled token and at the k largest, in order, the lower id first of equals.

    The sampled token's rank is its place in that order, from 1. Where there are fewer than k tokens, the last columns
    have id -1 and -inf. Two launches.
    """
    num_rows, num_columns = logits.shape
    num_chunks = triton.cdiv(num_columns, GROUPS * GROUP)
    best = torch.empty(num_rows, num_chunks * GROUPS, dtype=torch.int64, device=logits.device)
    parts = torch.empty(num_rows, num_chunks, 3, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    _parts_kernel[(num_rows, num_chunks)](
        logits,
        sampled,
        best,
        parts,
        num_columns,
        logits.stride(0),
        GROUPS=GROUPS,
        GROUP=GROUP,
        num_warps=8,
        **options,
    )
    _logprobs_kernel[(num_rows,)](
        logits,
        sampled,
        best,
        parts,
        records,
        num_columns,
        logits.stride(0),
        num_chunks,
        K=records.shape[1] // 2 - 2,
        RECORD=records.shape[1],
        PADDED=triton.next_power_of_2(num_chunks),
        GROUPS=GROUPS,
        GROUP=GROUP,
        num_warps=4,
        **options,
    )
