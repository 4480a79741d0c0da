"""One step as numbers: the layout of its arrays in one int32 slab, its sizes, and the rows that will land.

The host slab and its twin on the device have the same layout, a function of the bucket alone, so that one copy of a
contiguous prefix carries a step over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.sequence import Sequence
from cbatch.scheduler.swap import Swaps


@dataclass(frozen=True)
class StepShape:
    """What all steps of an engine have in common; with the bucket, it determines the layout."""

    num_groups: int
    block_size: int
    num_params: int  # int32 words of sampling state a slot


@dataclass(frozen=True)
class Bucket:
    """Capacities of a layout: the most tokens and rows of a step in it."""

    num_tokens: int
    num_rows: int


@lru_cache(maxsize=4096)
def layout(shape: StepShape, bucket: Bucket) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Name -> (offset, dimensions) in int32 words, and the total. Every field is 16-byte aligned."""
    tokens, rows, groups = bucket.num_tokens, bucket.num_rows, shape.num_groups
    # A row of n new tokens needs at most ceil(n / block_size) new blocks in each group.
    updates = groups * (rows + tokens // shape.block_size)
    dimensions: dict[str, tuple[int, ...]] = {
        "input_ids": (tokens,),
        "positions": (tokens,),
        "carry_slots": (tokens,),
        "slot_mapping": (groups, tokens),
        "row_slots": (rows,),
        "cu_seqlens_q": (rows + 1,),
        "context_lens": (rows,),
        "sample_rows": (rows,),
        "out_slots": (rows,),
        "table_index": (updates,),
        "table_value": (updates,),
        "param_slots": (rows,),
        "param_values": (rows, shape.num_params),
    }
    fields, offset = {}, 0
    for name, dims in dimensions.items():
        fields[name] = (offset, dims)
        offset += -(-prod(dims) // 4) * 4
    return fields, offset


class HostBatch:
    """The arrays of one step as views of a slab, all int32.

    What few steps have lies behind the layout, in the slab's spare words, one array after the other: changes of the
    block tables that *overflow* the bucket (all indices, then all blocks), and the blocks to copy before the model runs
    (all sources, then all destinations; no block is both).
    """

    input_ids: NDArray[np.int32]  # [tokens]; 0 where the token is still in flight
    positions: NDArray[np.int32]  # [tokens]
    carry_slots: NDArray[np.int32]  # [tokens]; slot whose last token replaces the 0; -1: input_ids has the token
    slot_mapping: NDArray[np.int32]  # [groups, tokens]; where keys and values go: block * block_size + offset
    row_slots: NDArray[np.int32]  # [rows]; which row of the block tables; decode rows come first
    cu_seqlens_q: NDArray[np.int32]  # [rows + 1]; where each row's tokens begin
    context_lens: NDArray[np.int32]  # [rows]; length of the context, this step's tokens included
    sample_rows: NDArray[np.int32]  # [samples]; index of the token whose logits are sampled
    out_slots: NDArray[np.int32]  # [samples]; slot that the sampled token belongs to
    table_index: NDArray[np.int32]  # [updates]; entries of the resident block tables that change, as flat indices
    table_value: NDArray[np.int32]  # [updates]; their new blocks
    param_slots: NDArray[np.int32]  # [updates]; slots with a new owner
    param_values: NDArray[np.int32]  # [updates, num_params]; its sampling state

    def __init__(self, slab: NDArray[np.int32], shape: StepShape, bucket: Bucket) -> None:
        fields, self.num_words = layout(shape, bucket)
        self.bucket = bucket
        for name, (offset, dims) in fields.items():
            setattr(self, name, slab[offset : offset + prod(dims)].reshape(dims))
        self.spare_words = slab[self.num_words :]

    def write_spare(self, *arrays: NDArray[np.integer]) -> None:
        """Put arrays behind the layout."""
        words = np.concatenate(arrays)
        assert words.size <= self.spare_words.size, "a slab has too few spare words"
        self.spare_words[: words.size] = words


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much of a step's arrays is in use, and what a launch must know about their content."""

    num_tokens: int
    num_rows: int
    num_decodes: int  # leading rows of one token each, whose input is carried over on the device
    num_samples: int
    num_table_updates: int
    num_param_updates: int
    max_query_len: int
    max_context_len: int
    num_pairs: int = 0  # (token, key it attends to), over all chunks
    num_overflow: int = 0  # changes of the block tables behind the layout
    num_copies: int = 0  # blocks to copy

    @property
    def num_spare_words(self) -> int:
        """Words behind the layout that are in use."""
        return 2 * (self.num_overflow + self.num_copies)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: its arrays and sizes for the launch, and its sampled rows for the landing.

    A row is resolved through its sequence and epoch, never through its slot, which may have a new owner by then.
    """

    host: HostBatch
    sizes: StepSizes
    flags: int  # OR of the flags of the sampled sequences
    slots: NDArray[np.intp]  # [num_samples]
    epochs: NDArray[np.int64]  # [num_samples]
    sequences: NDArray[np.object_]  # [num_samples] of Sequence
    admitted: list[Sequence]  # in the first step of their stay in a slot
    chunks: list[tuple[Sequence, int]]  # (sequence, number of its tokens), in row order, behind the decode rows
    swaps: Swaps | None = None  # copies to and from host memory before the step


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    sequence: Sequence
    reason: str  # "stop" or "length"
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """The tokens of a step that count, in row order, and the sequences that ended with one of them."""

    sequences: NDArray[np.object_]  # [num_landed] of Sequence
    tokens: NDArray[np.int32]  # [num_landed]
    finished: list[Finish]
    num_wasted: int  # rows of sequences that had already ended, or were preempted or aborted
    rows: NDArray[np.intp] | None  # [num_landed], which of the step's sampled rows these are; None: all
