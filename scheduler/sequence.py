"""A request as the scheduler sees it: numbers only. Knows no text, no tensor and no thread."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.prefix_cache import Key, Node

MAX_PRIORITY = 2**22 - 1  # in absolute value: priority and arrival together make one 64-bit rank


class Status(Enum):
    WAITING = "waiting"  # in the queue; holds no slot and no block
    RUNNING = "running"  # holds a slot, or (ended by length) has its last tokens in flight
    FINISHED = "finished"  # every token has landed, or the rest will be dropped


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, and the output that grows behind it. The second half of the fields is the scheduler's own."""

    # [num_tokens], not written to: the prompt, later all tokens known when it began to wait. While it runs, the slot's
    # row is newer.
    token_ids: NDArray[np.int32]
    max_len: int  # total number of tokens at which the sequence ends
    _: KW_ONLY
    stop_token_ids: frozenset[int] = frozenset()
    param_values: NDArray[np.int32] | None = None  # go to the device with the slot; the scheduler does not read them
    flags: int = 0  # OR-ed over a step; likewise
    priority: int = 0  # the smaller goes first, under the policy "priority"
    cache_salt: bytes = b""  # cached prefixes are shared only between sequences of the same salt
    skip_reading_prefix_cache: bool = False  # something is wanted of every token, so each is computed; others may hit
    wants_prompt_logits: bool = False  # those of all prompt tokens are made, so a step takes few of them at once
    pauses: bool = False  # once its known tokens are computed, it is in its slot but in no step until ``unpause``
    payload: object = None  # the caller's: comes back with every landed token, and is not looked at

    status: Status = field(default=Status.WAITING, init=False)
    num_prompt_tokens: int = field(init=False)
    num_landed: int = field(init=False)
    num_preemptions: int = field(default=0, init=False)
    # Tokens that its last admission did not compute: they were in the prefix cache, in host memory, or in the sequence
    # that it was forked from.
    num_cached_tokens: int = field(default=0, init=False)
    arrival: int = field(default=-1, init=False)
    rank: int = field(default=-1, init=False)  # the smaller goes first; unique
    slot: int = field(default=-1, init=False)
    # One stay in a slot, unique over the scheduler's life; 0: none. A row of a plan counts only while the sequence has
    # the epoch that the row was planned with. Preemption, abort, and every finish but the one by length end it.
    epoch: int = field(default=0, init=False)
    # Running: its last published block, as a node of the prefix cache. Waiting: the longest prefix matched so far.
    node: Node | None = field(default=None, init=False)
    pending: Key | None = field(default=None, init=False)  # the block it will compute, for which others may wait
    # Waiting: the host blocks [groups, columns] of its first ``swapped_len`` tokens (-1: none); None: not swapped.
    swapped: NDArray[np.int32] | None = field(default=None, init=False)
    swapped_len: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_landed = len(self.token_ids)
