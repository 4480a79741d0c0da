"""Blocks of preempted sequences that wait in host memory: which, and whether that is cheaper than computing them again.

Knows block numbers; a plan says what is copied, in which order: what goes out first, then what comes in, then the step.
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
    """What is copied for a step. First ``out_blocks`` of the pool to ``out_host``, whose blocks are all different, then
    ``in_host`` to ``in_blocks``. A block may be among both: it went out, and is taken for what comes in.

    The step writes what went out. It uses what comes in only where ``is_needed``; else the next one is the first to.
    """

    out_blocks: Ints
    out_host: Ints
    in_host: Ints
    in_blocks: Ints
    is_needed: bool


class SwapSpace:
    """Owns the blocks of host memory. A sequence has some of them while it waits, preempted, to go on.

    A host block that comes in is free for others from the next plan on: within one, copies out come first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_blocks_out = 0  # that went out, and came in, since the start
        self.num_blocks_in = 0
        self.ms_per_block = 0.0  # one way; the owner of the memory measures it
        self.ms_per_token: float | None = None  # of a prompt, as steps have taken; None: none did yet
        self._most_prefill = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._freed: list[int] = []  # by what comes in before the next step
        self._out: list[tuple[Ints, Ints]] = []
        self._in: dict[Sequence, tuple[Ints, Ints]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    # ---- which is cheaper

    def note(self, num_prefill: int, num_tokens: int, ms: float) -> None:
        """A step with so many tokens of prompts among all took so long.

        Counts where most were theirs, and not much fewer than there were in another one: a token alone takes a step.
        """
        self._most_prefill = max(self._most_prefill, num_prefill)
        if 2 * num_prefill > num_tokens and 4 * num_prefill >= self._most_prefill:
            each = ms / num_tokens
            self.ms_per_token = each if self.ms_per_token is None else 0.8 * self.ms_per_token + 0.2 * each

    def is_cheaper(self, num_copies: int, num_tokens: int) -> bool:
        """Whether to copy blocks, out and in counted each, or to compute so many tokens."""
        return self.ms_per_token is not None and num_copies * self.ms_per_block < num_tokens * self.ms_per_token

    # ---- out and in

    def save(self, sequence: Sequence, blocks: Ints, num_tokens: int) -> None:
        """Send blocks ``[groups, columns]`` out, which hold ``num_tokens`` of a sequence; dummies are left out."""
        mask = blocks != DUMMY_BLOCK
        count = int(mask.sum())
        host = np.array([self._free.pop() for _ in range(count)], np.int32)
        sequence.swapped = np.full(blocks.shape, -1, np.int32)
        sequence.swapped[mask] = host
        sequence.swapped_len = num_tokens
        self._out.append((blocks[mask], host))
        self.num_blocks_out += count

    def load(self, sequence: Sequence, columns: int, blocks: Ints) -> None:
        """Bring what a sequence has from some column on into blocks of the pool; it has nothing here any more."""
        assert sequence.swapped is not None
        wanted = sequence.swapped[:, columns:]
        host = wanted[wanted >= 0]
        self._in[sequence] = host, blocks
        self.num_blocks_in += host.size
        self._freed += sequence.swapped[sequence.swapped >= 0].tolist()
        sequence.swapped, sequence.swapped_len = None, 0

    def drop(self, sequence: Sequence) -> None:
        """A sequence needs no more what it has here: it was aborted, or will compute it."""
        if sequence.swapped is None:
            return
        gone = sequence.swapped[sequence.swapped >= 0]
        for i, (blocks, host) in enumerate(self._out):  # what was not copied yet will not be
            stays = ~np.isin(host, gone)
            self._out[i] = blocks[stays], host[stays]
        self._free += gone.tolist()
        sequence.swapped, sequence.swapped_len = None, 0

    def cancel(self, sequence: Sequence) -> None:
        """A sequence gives its blocks back before a step brought anything in: they may be another's in that step."""
        self._in.pop(sequence, None)

    def take_plan(self, chunks: list[tuple[Sequence, int]]) -> Swaps | None:
        """What is to be copied for the step that is written now, with these chunks; None: nothing."""
        self._free += self._freed  # the copies out of this plan have their places already
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
