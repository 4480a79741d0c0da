"""A request as the scheduler sees it: numbers only. Knows no text, no tensor and no thread."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.prefix_cache import Key, Node

MAX_PRIORITY = 2**22 - 1  # and no less than its negative: priority and arrival together are one 64-bit rank


class Status(Enum):
    WAITING = "waiting"  # in the queue; holds no slot and no block
    RUNNING = "running"  # holds a slot, or (ended by length) has its last tokens in flight
    FINISHED = "finished"  # every token has landed, or the rest will be dropped


class Sequence:
    """One prompt, ``prompt_token_ids [num_tokens]`` int32 (nobody writes them again), and what grows behind it.

    ``payload`` is the caller's own object, handed back untouched with every landed token. ``max_len`` is the total
    length at which the sequence ends. ``param_values`` (int32) go to the device with the slot, and ``flags`` are
    OR-ed over a step; the scheduler reads neither. Of two sequences, the one with the smaller ``priority`` goes first
    where the policy heeds it. Sequences share cached prefixes only with those of the same ``cache_salt``. One that has
    ``skip_reading_prefix_cache`` computes every token itself, as where something is wanted of each; others may hit it.

    ``num_cached_tokens`` says how many tokens its last admission did not compute: they were in the prefix cache, or in
    host memory, or are those of the sequence that it was forked from.

    ``wants_prompt_logits``: logits are made of all its prompt's tokens, so a step takes few of them at once. One that
    ``pauses`` stays in its slot when its known tokens are computed, and takes part in no step until ``unpause``.

    ``epoch`` names one residence in a slot and is unique over the scheduler's life; 0 means none. A row of a plan
    counts only while the sequence still has the epoch that the row was planned with: preemption, abort and every
    finish but the one by length end it.
    """

    __slots__ = (
        "arrival",
        "cache_salt",
        "epoch",
        "flags",
        "max_len",
        "node",
        "num_cached_tokens",
        "num_landed",
        "num_preemptions",
        "num_prompt_tokens",
        "param_values",
        "pauses",
        "payload",
        "pending",
        "priority",
        "rank",
        "skip_reading_prefix_cache",
        "slot",
        "status",
        "stop_token_ids",
        "swapped",
        "swapped_len",
        "token_ids",
        "wants_prompt_logits",
    )

    def __init__(
        self,
        prompt_token_ids: NDArray[np.int32],
        max_len: int,
        *,
        stop_token_ids: Iterable[int] = (),
        param_values: NDArray[np.int32] | None = None,
        flags: int = 0,
        priority: int = 0,
        cache_salt: bytes = b"",
        wants_prompt_logits: bool = False,
        pauses: bool = False,
        skip_reading_prefix_cache: bool = False,
        payload: object = None,
    ) -> None:
        self.token_ids = prompt_token_ids  # while waiting: all that is known; while running the slot's row is newer
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_len = max_len
        self.stop_token_ids = frozenset(stop_token_ids)
        self.param_values = param_values
        self.flags = flags
        self.priority = priority
        self.cache_salt = cache_salt
        self.wants_prompt_logits = wants_prompt_logits
        self.pauses = pauses
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.payload = payload
        self.status = Status.WAITING
        self.arrival = -1
        self.rank = -1  # the smaller goes first; unique
        self.epoch = 0
        self.slot = -1
        self.num_landed = len(prompt_token_ids)
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        # Running: the prefix that ends with its last published block. Waiting: the longest one that it matched so far.
        self.node: Node | None = None
        # Waiting: host blocks [groups, columns] with its first tokens, or -1; None: it has none.
        self.swapped: NDArray[np.int32] | None = None
        self.swapped_len = 0
        self.pending: Key | None = None  # the block that others wait for it to compute
