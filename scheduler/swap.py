"""Blocks of preempted sequences in host memory: which they are, and whether swapping is cheaper than recomputing.

Knows block numbers only. A step's plan says what is copied: first what goes out, then what comes in, then it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.blocks import DUMMY_BLOCK
from cbatch.scheduler.sequence import Sequence

Ints = NDArray[np.int32]
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """The copies of a step: ``out_blocks`` of the pool to ``out_host``, then ``in_host`` to ``in_blocks``.

    Blocks of ``out_host`` are all different. A block of the pool may occur in both: it is swapped out, and reused for
    what comes in. The step overwrites what went out. It uses what comes in only if ``is_needed``; otherwise the next
    step is the first to.
    """

    out_blocks: Ints
    out_host: Ints
    in_host: Ints
    in_blocks: Ints
    is_needed: bool


class SwapSpace:
    """Owns the blocks of host memory. A preempted sequence has some of them while it waits to go on.

    A host block that is copied in is free from the next plan on: within a plan, copies out come first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_blocks_out = 0  # copied out, and in, since the start
        self.num_blocks_in = 0
        self.ms_per_block = 0.0  # of one copy, one way; measured by the owner of the memory
        self.ms_per_token: float | None = None  # to compute a prompt, from past steps; None: unknown so far
        self._most_prefill = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._freed: list[int] = []  # by copies in before the next step
        self._out: list[tuple[Ints, Ints]] = []
        self._in: dict[Sequence, tuple[Ints, Ints]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    # ---- which is cheaper

    def note(self, num_prefill: int, num_tokens: int, ms: float) -> None:
        """Learn from a landed step: ``num_prefill`` of its ``num_tokens`` tokens were of prompts, and it took ``ms``.

        Only steps that are mostly prefill count, and not those with far fewer prompt tokens than the largest so far: a
        step takes a while even for one token.
        """
        self._most_prefill = max(self._most_prefill, num_prefill)
        if 2 * num_prefill > num_tokens and 4 * num_prefill >= self._most_prefill:
            each = ms / num_tokens
            self.ms_per_token = each if self.ms_per_token is None else 0.8 * self.ms_per_token + 0.2 * each

    def is_cheaper(self, num_copies: int, num_tokens: int) -> bool:
        """Whether ``num_copies`` copies of a block take less time than computing ``num_tokens`` tokens."""
        return self.ms_per_token is not None and num_copies * self.ms_per_block < num_tokens * self.ms_per_token

    # ---- out and in

    def save(self, sequence: Sequence, blocks: Ints, num_tokens: int) -> None:
        """Copy blocks ``[groups, columns]`` out, the first ``num_tokens`` tokens of a sequence; skips dummies."""
        mask = blocks != DUMMY_BLOCK
        count = int(mask.sum())
        host = np.array([self._free.pop() for _ in range(count)], np.int32)
        sequence.swapped = np.full(blocks.shape, -1, np.int32)
        sequence.swapped[mask] = host
        sequence.swapped_len = num_tokens
        self._out.append((blocks[mask], host))
        self.num_blocks_out += count

    def load(self, sequence: Sequence, columns: int, blocks: Ints) -> None:
        """Copy a sequence's columns from ``columns`` on into blocks of the pool. It has nothing here afterwards."""
        assert sequence.swapped is not None
        wanted = sequence.swapped[:, columns:]
        host = wanted[wanted >= 0]
        self._in[sequence] = host, blocks
        self.num_blocks_in += host.size
        self._freed += sequence.swapped[sequence.swapped >= 0].tolist()
        sequence.swapped, sequence.swapped_len = None, 0

    def drop(self, sequence: Sequence) -> None:
        """Free what a sequence has here: it was aborted, or will be recomputed."""
        if sequence.swapped is None:
            return
        gone = sequence.swapped[sequence.swapped >= 0]
        for i, (blocks, host) in enumerate(self._out):  # copies that were not planned yet
            stays = ~np.isin(host, gone)
            self._out[i] = blocks[stays], host[stays]
        self._free += gone.tolist()
        sequence.swapped, sequence.swapped_len = None, 0

    def cancel(self, sequence: Sequence) -> None:
        """A sequence releases its blocks before any step has copied in: they may be another's in that step."""
        self._in.pop(sequence, None)

    def take_plan(self, chunks: list[tuple[Sequence, int]]) -> Swaps | None:
        """The copies for the step that is being written, with these chunks; None: there are none."""
        self._free += self._freed  # the copies out have their places already
        self._freed.clear()
        if not self._out and not self._in:
            return None
        out, into = (
            [np.concatenate(arrays) for arrays in zip(*pairs, strict=True)] if pairs else [_NONE, _NONE]
            for pairs in (self._out, list(self._in.values()))
        )
        is_needed = any(sequence in self._in for sequence, _ in chunks)
        self._out.clear()
        self._in.clear()
        if not out[0].size and not into[0].size:
            return None
        return Swaps(out[0], out[1], into[0], into[1], is_needed)

    def check(self, waiting: list[Sequence]) -> None:
        held = [host for s in waiting if s.swapped is not None for host in s.swapped[s.swapped >= 0].tolist()]
        assert sorted([*self._free, *self._freed, *held]) == list(range(self.num_blocks)), (
            "a host block is lost or doubled"
        )
        assert all(s.swapped is None or 0 < s.swapped_len < len(s.token_ids) for s in waiting)
