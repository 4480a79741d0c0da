"""A request as the scheduler sees it: numbers only. Knows no text, no tensor and no thread."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.prefix_cache import Key, Node

MAX_PRIORITY = 2**22 - 1  # in absolute value: priority and arrival together make one 64-bit rank


class Status(Enum):
    WAITING = "waiting"  # in the queue; holds no slot and no block
    RUNNING = "running"  # holds a slot, or (ended by length) has its last tokens in flight
    FINISHED = "finished"  # every token has landed, or the rest will be dropped


class Sequence:
    """A prompt, ``prompt_token_ids [num_tokens]`` int32 (not written to any more), and the output that grows behind it.

    - ``max_len``: the total length at which the sequence ends.
    - ``payload``: the caller's object, which comes back with every landed token; the scheduler does not look at it.
    - ``param_values`` (int32) go to the device with the slot, and ``flags`` are OR-ed over a step; the scheduler reads
      neither.
    - ``priority``: the smaller goes first, under the policy ``"priority"``.
    - ``cache_salt``: cached prefixes are shared only between sequences of the same salt.
    - ``skip_reading_prefix_cache``: compute every token, for something is wanted of each; others may still hit them.
    - ``wants_prompt_logits``: the logits of all prompt tokens are made, so a step takes few of them at once.
    - ``pauses``: when its known tokens are computed it stays in its slot, and is in no step until ``unpause``.
    - ``num_cached_tokens``: tokens that its last admission did not compute: they were in the prefix cache, in host
      memory, or in the sequence that it was forked from.
    - ``epoch`` names one stay in a slot, unique over the scheduler's life; 0: none. A row of a plan counts only while
      the sequence has the epoch that the row was planned with. Preemption, abort, and every finish but the one by
      length end it.
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
        self.token_ids = prompt_token_ids  # all known tokens while it waits; while it runs, the slot's row is newer
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
        # Running: its last published block, as a node of the prefix cache. Waiting: the longest prefix matched so far.
        self.node: Node | None = None
        # Waiting: the host blocks [groups, columns] of its first ``swapped_len`` tokens (-1: none); None: not swapped.
        self.swapped: NDArray[np.int32] | None = None
        self.swapped_len = 0
        self.pending: Key | None = None  # the block it is announced to compute, for which others may wait
