"""A request as the scheduler sees it: numbers only. Knows no text, no tensor and no thread."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Status(Enum):
    WAITING = "waiting"  # in the queue; holds no slot and no block
    RUNNING = "running"  # holds a slot, or (ended by length) has its last tokens in flight
    FINISHED = "finished"  # every token has landed, or the rest will be dropped


class Sequence:
    """One prompt and the tokens that grow behind it.

    ``payload`` is the caller's own object, handed back untouched with every landed token. ``max_len`` is the total
    length at which the sequence ends. ``sampling_bits`` (int32) goes to the device with the slot, and ``flags`` are
    OR-ed over a step; the scheduler reads neither.

    ``epoch`` names one residence in a slot and is unique over the scheduler's life; 0 means none. A row of a plan
    counts only while the sequence still has the epoch that the row was planned with: preemption, abort and every
    finish but the one by length end it.
    """

    __slots__ = (
        "arrival",
        "epoch",
        "flags",
        "max_len",
        "num_landed",
        "num_preemptions",
        "num_prompt_tokens",
        "payload",
        "sampling_bits",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        prompt_token_ids: NDArray[np.int32],
        max_len: int,
        *,
        stop_token_ids: Iterable[int] = (),
        sampling_bits: NDArray[np.int32] | None = None,
        flags: int = 0,
        payload: object = None,
    ) -> None:
        self.token_ids = prompt_token_ids  # while waiting: all that is known; while running the slot's row is newer
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_len = max_len
        self.stop_token_ids = frozenset(stop_token_ids)
        self.sampling_bits = sampling_bits
        self.flags = flags
        self.payload = payload
        self.status = Status.WAITING
        self.arrival = -1
        self.epoch = 0
        self.slot = -1
        self.num_landed = len(prompt_token_ids)
        self.num_preemptions = 0
