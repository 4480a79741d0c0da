"""Checks of the loop's own rules, switched on by ``CBATCH_DEBUG=1``. Knows buffers and plans; costs nothing when off.

A buffer is written, launched, landed and read in this order, once a step. What comes back is poisoned beforehand, so a
token that was read before it landed is seen, and blocks and slots are counted after every step.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from cbatch.buffers import IOBuffer, Logprobs
from cbatch.scheduler.plan import StepPlan
from cbatch.scheduler.scheduler import Scheduler
from cbatch.streams import Lane

POISON = -7


def enabled() -> bool:
    return os.environ.get("CBATCH_DEBUG", "") not in ("", "0")


class LoopChecks:
    """Asserts; a failing one ends the engine, and every waiter hears which rule broke."""

    def __init__(self, scheduler: Scheduler, lane: Lane) -> None:
        self._scheduler, self._lane = scheduler, lane
        self._in_flight: set[int] = set()

    def before_plan(self, io: IOBuffer) -> None:
        assert id(io) not in self._in_flight, "a buffer is planned into while its step is in flight"
        assert self._lane.copied_in(io), "a buffer is planned into before its last copy to the device is over"
        io.host_slab.fill_(POISON)

    def planned(self, io: IOBuffer, plan: StepPlan) -> None:
        """After the plan is written and before it is launched."""
        self._scheduler.check()
        host, sizes = plan.host, plan.sizes
        carried = host.carry_slots[: sizes.num_tokens] >= 0
        assert not host.input_ids[: sizes.num_tokens][carried].any(), "a placeholder is not zero"
        used = (host.positions, host.row_slots, host.context_lens, host.sample_rows, host.out_slots, host.table_value)
        assert all((array >= 0).all() for array in used), "an array of the step was not written to its end"
        io.host_landing.fill(POISON)
        self._in_flight.add(id(io))

    def landed(self, io: IOBuffer, tokens: NDArray[np.int32], logprobs: Logprobs | None) -> None:
        """After the wait, before the tokens are taken in."""
        assert id(io) in self._in_flight, "a step landed twice, or was never launched"
        self._in_flight.discard(id(io))
        assert not (tokens == POISON).any(), "tokens were read before they had landed"
        assert logprobs is None or not (logprobs.ids == POISON).any(), "log-probabilities were read before they landed"

    def taken_in(self) -> None:
        self._scheduler.check()
