"""Runs a scheduler against a model that is a pure function of the tokens so far, so that every run is exact."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbatch.scheduler.plan import Bucket, HostBatch, StepPlan, StepShape
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence


def next_token(tokens: list[int]) -> int:
    """The model: any function of the whole history shows a lost, doubled or misplaced token at once."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % 97


def solo(prompt: list[int], max_len: int, stop: tuple[int, ...] = ()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Driver:
    """Holds ``depth`` steps in flight, as the engine does, and keeps KV pages to read the history back from.

    A step reads each row's history out of the pages through its own block table, so a table, slot mapping, position
    or carry-over that is wrong anywhere changes a token.
    """

    scheduler: Scheduler
    depth: int = 2
    check: bool = True

    def __post_init__(self) -> None:
        s = self.scheduler
        self.shape = StepShape(s.num_groups, s.block_size, 1)
        rows = s.tables.max_num_seqs + 1
        self.tables = np.zeros((s.num_groups, rows, s.tables.max_blocks_per_seq), np.int64)  # the device's copy
        self.pages = np.full((s.blocks.num_blocks * s.block_size,), -1, np.int64)
        self.last_tokens = np.full(rows, -1, np.int64)
        self.in_flight: deque[tuple[StepPlan, np.ndarray[Any, Any]]] = deque()
        self.results: dict[int, Result] = {}
        self.num_wasted = 0
        self.num_steps = 0

    def add(self, prompt: list[int], max_len: int, stop: tuple[int, ...] = ()) -> Sequence:
        result = Result()
        sequence = Sequence(np.array(prompt, np.int32), max_len, stop_token_ids=stop, payload=result)
        self.scheduler.add(sequence)
        self.results[sequence.arrival] = result
        return sequence

    def step(self) -> bool:
        """Launch and land as the engine's loop does; False if nothing was left to do."""
        plan = self.scheduler.plan(self._host_batch)
        self._check()
        if plan is not None:
            self.num_steps += 1
            self.in_flight.append((plan, self._compute(plan)))
        if self.in_flight and (len(self.in_flight) >= self.depth or plan is None):
            self._land(*self.in_flight.popleft())
            return True
        return plan is not None

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert not self.scheduler.has_work and not self.in_flight, "work is left, but nothing runs"
        assert self.scheduler.num_in_flight == 0

    def _check(self) -> None:
        if self.check:
            self.scheduler.check()

    def _host_batch(self, num_tokens: int, num_rows: int) -> HostBatch:
        bucket = Bucket(-(-num_tokens // 4) * 4, -(-num_rows // 4) * 4)
        words = HostBatch(np.zeros(1 << 16, np.int32), self.shape, bucket).num_words
        return HostBatch(np.full(words, -7, np.int32), self.shape, bucket)  # poison: what is not written shows

    def _compute(self, plan: StepPlan) -> np.ndarray[Any, Any]:
        host, s = plan.host, self.scheduler
        self.tables.reshape(-1)[host.table_index] = host.table_value
        carry = host.carry_slots
        ids = np.where(carry >= 0, self.last_tokens[np.maximum(carry, 0)], host.input_ids)
        assert not host.input_ids[carry >= 0].any(), "a placeholder is not zero"
        for group in range(s.num_groups):
            self.pages[host.slot_mapping[group]] = ids  # padding lands in the dummy block
        sampled = np.zeros(plan.sizes.num_samples, np.int32)
        for i in range(plan.sizes.num_samples):
            token = int(host.sample_rows[i])
            row = int(np.searchsorted(host.cu_seqlens_q[: plan.sizes.num_rows + 1], token, side="right")) - 1
            length = int(host.context_lens[row])
            histories = []
            for group in range(s.num_groups):
                blocks = self.tables[group, host.row_slots[row], : -(-length // s.block_size)]
                where = (blocks[:, None] * s.block_size + np.arange(s.block_size)).ravel()[:length]
                histories.append(self.pages[where].tolist())
            assert all(h == histories[0] for h in histories)
            assert host.positions[token] == length - 1
            sampled[i] = next_token(histories[0])
        self.last_tokens[host.out_slots[: plan.sizes.num_samples]] = sampled
        assert np.all(host.out_slots[plan.sizes.num_samples :] == s.tables.dummy_slot)
        return sampled

    def _land(self, plan: StepPlan, sampled: np.ndarray[Any, Any]) -> None:
        landed = self.scheduler.land(plan, sampled)
        self._check()
        self.num_wasted += landed.num_wasted
        for sequence, token in zip(landed.sequences.tolist(), landed.tokens.tolist(), strict=True):
            assert sequence.payload.finish is None, "a token came after the end"
            sequence.payload.tokens.append(token)
        for finish in landed.finished:
            finish.sequence.payload.finish = finish.reason


def make(**options: int) -> Scheduler:
    defaults = {
        "num_blocks": 64, "block_size": 4, "num_groups": 1, "max_num_seqs": 8, "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }  # fmt: skip
    return Scheduler(**{**defaults, **options})
