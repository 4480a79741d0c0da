"""Decides what runs next. Knows sequences and blocks; knows nothing of tensors, devices or text.

Running sequences are rows of ``SlotTables``. What all of them do every step is numpy over rows; Python loops touch
only the few that differ: a prefill chunk, a new block, a finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.blocks import DUMMY_BLOCK, BlockManager
from cbatch.scheduler.plan import Finish, HostBatch, Landed, StepPlan, StepSizes
from cbatch.scheduler.sequence import Sequence, Status
from cbatch.scheduler.slots import SlotTables

_NO_FINISHES: list[Finish] = []


class Scheduler:
    """First come, first served, with chunked prefill under a token budget and preemption by recomputation.

    A step takes every decoding sequence (one token each), then the chunks of running prefills in order of arrival,
    then new sequences, while ``max_num_batched_tokens``, slots and blocks last. When blocks run out, the youngest
    running sequence goes back to the queue. So the oldest always advances, and since a sequence that cannot fit alone
    is refused by ``blocks_for``'s caller, everything finishes.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}")
        self.blocks = BlockManager(num_blocks, block_size)
        self.tables = SlotTables(max_num_seqs, max_model_len, num_groups, block_size)
        self.block_size = block_size
        self.num_groups = num_groups
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_waiting = 0
        self.num_in_flight = 0  # sequences that ended by length when planned, and have tokens to land
        self.num_preemptions = 0
        # Blocks that stay free when a sequence is admitted beside others, so that they can grow a while before one
        # must be preempted.
        self._watermark = num_blocks // 100
        self._waiting: deque[Sequence] = deque()  # by arrival; aborted ones stay as tombstones until they surface
        self._prefilling: list[Sequence] = []  # running with prompt tokens left, by arrival
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0
        self._last_epoch = 0
        self._arange = np.arange(max(max_num_seqs, 1) + 1, dtype=np.int32)
        stride = (max_num_seqs + 1) * self.tables.max_blocks_per_seq
        assert num_groups * stride < 2**31, "the block tables outgrow 32-bit indices"
        self._group_base = (np.arange(num_groups, dtype=np.int64) * stride)[:, None]
        self._table_updates: list[tuple[int, NDArray[np.int64], NDArray[np.int32]]] = []

    # ---- life of a sequence

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of context take, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    @property
    def num_running(self) -> int:
        return self.tables.max_num_seqs - len(self._free_slots)

    @property
    def has_work(self) -> bool:
        """Whether a step can be planned, now or after what is in flight has landed."""
        return self.num_waiting > 0 or self.num_running > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The caller has made sure that it fits into an empty pool."""
        assert 0 < sequence.num_prompt_tokens < sequence.max_len <= self.max_model_len
        assert self.blocks_for(sequence.max_len - 1) <= self.blocks.num_usable
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(sequence)
        self.num_waiting += 1

    def abort(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, in constant time. Its rows in flight will be dropped."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.num_waiting -= 1
            sequence.token_ids = sequence.token_ids[:0].copy()  # it may stay in the queue for long
        elif sequence.slot >= 0:
            self._release_slot(sequence)
        else:
            self.num_in_flight -= 1
        sequence.status = Status.FINISHED
        sequence.epoch = 0

    def _take_slot(self, sequence: Sequence) -> None:
        t, slot = self.tables, self._free_slots.pop()
        self._last_epoch += 1
        sequence.slot, sequence.epoch, sequence.status = slot, self._last_epoch, Status.RUNNING
        num_tokens = len(sequence.token_ids)
        t.epoch[slot] = sequence.epoch
        t.arrival[slot] = sequence.arrival
        t.decoding[slot] = False
        t.num_computed[slot] = 0
        t.num_tokens[slot] = num_tokens
        t.num_landed[slot] = num_tokens
        t.max_len[slot] = sequence.max_len
        t.num_blocks[slot] = 0
        t.flags[slot] = sequence.flags
        t.set_stop_ids(slot, sequence.stop_token_ids)
        t.sequences[slot] = sequence
        t.tokens[slot, :num_tokens] = sequence.token_ids
        self._prefilling.append(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        """Give slot and blocks back. A step in flight may still use them: any reuse is a later step, ordered behind."""
        t, slot = self.tables, sequence.slot
        if not t.decoding[slot]:
            self._prefilling.remove(sequence)
        self.blocks.give_back(t.block_tables[:, slot, : t.num_blocks[slot]])
        sequence.num_landed = int(t.num_landed[slot])
        sequence.slot = -1
        t.epoch[slot] = 0
        t.arrival[slot] = -1
        t.decoding[slot] = False
        t.num_blocks[slot] = 0
        t.sequences[slot] = None
        self._free_slots.append(slot)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue with the tokens that have landed; those in flight are void."""
        t, slot = self.tables, sequence.slot
        sequence.token_ids = t.tokens[slot, : t.num_landed[slot]].copy()
        self._release_slot(sequence)
        self._table_updates = [update for update in self._table_updates if update[0] != slot]
        sequence.status, sequence.epoch = Status.WAITING, 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        # Victims are the youngest of the running, and whoever waits is younger still: the front keeps the order.
        self._waiting.appendleft(sequence)
        self.num_waiting += 1

    def _preempt_youngest(self, after: int = -1) -> bool:
        """Preempt the youngest running sequence that arrived after ``after``; False if there is none."""
        slot = int(self.tables.arrival.argmax())
        if self.tables.arrival[slot] <= after:
            return False
        self._preempt(self.tables.sequences[slot])
        return True

    # ---- planning

    def plan(self, host_batch: Callable[[int, int], HostBatch]) -> StepPlan | None:
        """Choose the next step and write its arrays.

        ``host_batch(num_tokens, num_rows)`` hands out the views to write. None if nothing can run before something
        lands (or nothing is there).
        """
        self._table_updates.clear()
        admitted: list[Sequence] = []
        chunks = self._schedule(admitted)
        slots = np.flatnonzero(self.tables.decoding)
        if not chunks and not slots.size:
            return None
        return self._write(host_batch, slots, chunks, admitted)

    def _schedule(self, admitted: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Find blocks for everything that runs in this step; the prefill chunks as (sequence, num_tokens)."""
        num_preemptions = self.num_preemptions
        num_decodes = self._grow_decodes()
        budget = self.max_num_batched_tokens - num_decodes
        chunks: list[tuple[Sequence, int]] = []
        for sequence in tuple(self._prefilling):
            if budget <= 0:
                break
            if sequence.slot >= 0 and (num_tokens := self._grow_prefill(sequence, budget)):
                chunks.append((sequence, num_tokens))
                budget -= num_tokens
        # A slot freed by preemption is not given away in the same step: its block table would change twice.
        if budget > 0 and self.num_waiting and self._free_slots and self.num_preemptions == num_preemptions:
            self._admit(budget, chunks, admitted)
        if self.num_preemptions != num_preemptions:
            chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[Sequence, int]], admitted: list[Sequence]) -> None:
        """Give slots to waiting sequences, each if all its known tokens fit beside what running prefills still take."""
        reserved = sum(self._outstanding(sequence) for sequence in self._prefilling)
        while budget > 0 and self._free_slots and (candidate := self._head_of_queue()) is not None:
            spare = self._watermark if self.num_running else 0
            if reserved + self.blocks_for(len(candidate.token_ids)) + spare > self.blocks.num_free:
                break
            self._waiting.popleft()
            self.num_waiting -= 1
            self._take_slot(candidate)
            admitted.append(candidate)
            num_tokens = self._grow_prefill(candidate, budget)
            chunks.append((candidate, num_tokens))
            budget -= num_tokens
            reserved += self._outstanding(candidate)

    def _outstanding(self, sequence: Sequence) -> int:
        """Blocks that the rest of a running prefill will take."""
        t, slot = self.tables, sequence.slot
        return self.blocks_for(int(t.num_tokens[slot])) - int(t.num_blocks[slot]) * self.num_groups

    def _grow_decodes(self) -> int:
        """One more block for each decoding sequence whose blocks are full; preempts until they suffice."""
        t = self.tables
        while True:
            slots = np.flatnonzero(t.decoding)
            held = t.num_blocks[slots]
            full = slots[t.num_computed[slots] == held * self.block_size]
            count = full.size * self.num_groups
            if count <= self.blocks.num_free:
                break
            self._preempt_youngest()
        if count:
            blocks = self.blocks.take(count).reshape(full.size, self.num_groups).T
            columns = t.num_blocks[full]
            t.block_tables[:, full, columns] = blocks
            index = self._group_base + (full * t.max_blocks_per_seq + columns)
            for column, slot in enumerate(full.tolist()):
                self._table_updates.append((slot, index[:, column], blocks[:, column]))
            t.num_blocks[full] = columns + 1
        return int(slots.size)

    def _grow_prefill(self, sequence: Sequence, budget: int) -> int:
        """Blocks for the next chunk of a prefill; the number of its tokens, 0 if it must wait for blocks."""
        t, slot = self.tables, sequence.slot
        computed, held = int(t.num_computed[slot]), int(t.num_blocks[slot])
        num_tokens = min(int(t.num_tokens[slot]) - computed, budget)
        wanted = -(-(computed + num_tokens) // self.block_size) - held
        while wanted * self.num_groups > self.blocks.num_free:
            if not self._preempt_youngest(after=sequence.arrival):
                wanted = self.blocks.num_free // self.num_groups
                num_tokens = max(0, (held + wanted) * self.block_size - computed)
                break
        if wanted > 0:
            blocks = self.blocks.take(wanted * self.num_groups).reshape(self.num_groups, wanted)
            t.block_tables[:, slot, held : held + wanted] = blocks
            index = self._group_base + (slot * t.max_blocks_per_seq + np.arange(held, held + wanted))
            self._table_updates.append((slot, index.ravel(), blocks.ravel()))
            t.num_blocks[slot] = held + wanted
        return num_tokens

    def _head_of_queue(self) -> Sequence | None:
        while self._waiting and self._waiting[0].status is not Status.WAITING:
            self._waiting.popleft()  # aborted while it waited
        return self._waiting[0] if self._waiting else None

    def _write(
        self,
        host_batch: Callable[[int, int], HostBatch],
        slots: NDArray[np.intp],
        chunks: list[tuple[Sequence, int]],
        admitted: list[Sequence],
    ) -> StepPlan:
        """Fill the views of a step: decode rows in one go, then a loop over the prefill chunks."""
        t, size = self.tables, self.block_size
        num_decodes = int(slots.size)
        num_tokens = num_decodes + sum(count for _, count in chunks)
        num_rows = num_decodes + len(chunks)
        host = host_batch(num_tokens, num_rows)

        n = num_decodes
        positions = t.num_computed[slots]
        block_index, offset = np.divmod(positions, size)
        contexts = positions + 1
        host.input_ids[:n] = 0
        host.positions[:n] = positions
        host.carry_slots[:n] = slots
        host.slot_mapping[:, :n] = t.block_tables[:, slots, block_index] * size + offset
        host.row_slots[:n] = slots
        host.cu_seqlens_q[: n + 1] = self._arange[: n + 1]
        host.context_lens[:n] = contexts
        host.sample_rows[:n] = self._arange[:n]
        host.out_slots[:n] = slots
        t.num_computed[slots] = contexts
        t.num_tokens[slots] = contexts + 1
        max_query_len, max_context_len = (1, int(contexts.max())) if n else (0, 0)

        if chunks:
            sampled = []
            token, row, sample = n, n, n
            for sequence, count in chunks:
                slot = sequence.slot
                start = int(t.num_computed[slot])
                end = start + count
                where = np.arange(start, end)
                stop = token + count
                host.input_ids[token:stop] = t.tokens[slot, start:end]
                host.positions[token:stop] = where
                host.carry_slots[token:stop] = -1
                host.slot_mapping[:, token:stop] = t.block_tables[:, slot, where // size] * size + where % size
                host.row_slots[row] = slot
                host.cu_seqlens_q[row + 1] = stop
                host.context_lens[row] = end
                t.num_computed[slot] = end
                max_query_len, max_context_len = max(max_query_len, count), max(max_context_len, end)
                if end == t.num_tokens[slot]:  # the whole prompt is computed: its last token is sampled from
                    host.sample_rows[sample] = stop - 1
                    host.out_slots[sample] = slot
                    t.num_tokens[slot] = end + 1
                    t.decoding[slot] = True
                    sampled.append(slot)
                    sample += 1
                token, row = stop, row + 1
            self._prefilling = [sequence for sequence in self._prefilling if not t.decoding[sequence.slot]]
            slots = np.concatenate((slots, np.array(sampled, np.intp)))
        num_samples = int(slots.size)

        num_updates = 0
        for _, index, blocks in self._table_updates:
            host.table_index[num_updates : num_updates + index.size] = index
            host.table_value[num_updates : num_updates + index.size] = blocks
            num_updates += index.size
        for i, sequence in enumerate(admitted):
            host.param_slots[i] = sequence.slot
            if sequence.sampling_bits is not None:
                host.param_values[i] = sequence.sampling_bits
        self._pad(host, num_tokens, num_rows, num_samples, num_updates, len(admitted))

        plan = StepPlan(
            host=host,
            sizes=StepSizes(
                num_tokens=num_tokens,
                num_rows=num_rows,
                num_decodes=num_decodes,
                num_samples=num_samples,
                num_table_updates=num_updates,
                num_param_updates=len(admitted),
                max_query_len=max_query_len,
                max_context_len=max_context_len,
            ),
            flags=int(np.bitwise_or.reduce(t.flags[slots])) if num_samples else 0,
            slots=slots,
            epochs=t.epoch[slots],
            sequences=t.sequences[slots],
            admitted=admitted,
        )
        ended = slots[t.num_tokens[slots] == t.max_len[slots]]
        for slot in ended.tolist():  # by length: known before the token is, so nothing is computed in vain
            self._release_slot(t.sequences[slot])
            self.num_in_flight += 1
        return plan

    def _pad(self, host: HostBatch, tokens: int, rows: int, samples: int, updates: int, params: int) -> None:
        """Make what the bucket has beyond the step harmless: empty rows, the dummy slot, the dummy block."""
        dummy = self.tables.dummy_slot
        if tokens < host.bucket.num_tokens:
            host.input_ids[tokens:] = 0
            host.positions[tokens:] = 0
            host.carry_slots[tokens:] = -1
            host.slot_mapping[:, tokens:] = DUMMY_BLOCK * self.block_size
        if rows < host.bucket.num_rows:
            host.row_slots[rows:] = dummy
            host.cu_seqlens_q[rows + 1 :] = tokens
            host.context_lens[rows:] = 0
        if samples < host.bucket.num_rows:
            host.sample_rows[samples:] = 0
            host.out_slots[samples:] = dummy
        host.table_index[updates:] = dummy * self.tables.max_blocks_per_seq
        host.table_value[updates:] = DUMMY_BLOCK
        host.param_slots[params:] = dummy

    # ---- landing

    def land(self, plan: StepPlan, tokens: NDArray[np.int32]) -> Landed:
        """Take in the sampled tokens ``[num_samples]`` of a step, one or more steps after it was planned."""
        t, slots = self.tables, plan.slots
        live = t.epoch[slots] == plan.epochs
        finished = _NO_FINISHES
        keep = None
        if not live.all():
            finished = []
            keep = live.copy()
            for row in np.flatnonzero(~live).tolist():
                sequence: Sequence = plan.sequences[row]
                if sequence.epoch == plan.epochs[row]:  # out of its slot only because it ends by length
                    keep[row] = True
                    self._land_last(sequence, int(tokens[row]), finished)
            rows = np.flatnonzero(live)
            slots, live_tokens = slots[rows], tokens[rows]
        else:
            rows, live_tokens = None, tokens
        columns = t.num_landed[slots]
        t.tokens[slots, columns] = live_tokens
        t.num_landed[slots] = columns + 1
        stopped = (t.stop_ids[slots] == live_tokens[:, None]).any(axis=1)
        more = t.has_more_stops[slots]
        if more.any():
            for i in np.flatnonzero(more).tolist():
                stopped[i] = int(live_tokens[i]) in t.sequences[slots[i]].stop_token_ids
        if stopped.any():
            if finished is _NO_FINISHES:
                finished = []
            for i in np.flatnonzero(stopped).tolist():
                sequence = plan.sequences[i if rows is None else rows[i]]
                self._release_slot(sequence)
                self._finish(sequence, "stop", int(live_tokens[i]), finished)
        if keep is None:
            return Landed(plan.sequences, tokens, finished, 0, None)
        kept = np.flatnonzero(keep)
        return Landed(plan.sequences[kept], tokens[kept], finished, keep.size - kept.size, kept)

    def _land_last(self, sequence: Sequence, token: int, finished: list[Finish]) -> None:
        sequence.num_landed += 1
        if token in sequence.stop_token_ids:
            reason = "stop"
        elif sequence.num_landed == sequence.max_len:
            reason = "length"
        else:
            return
        self.num_in_flight -= 1
        self._finish(sequence, reason, token, finished)

    def _finish(self, sequence: Sequence, reason: str, token: int, finished: list[Finish]) -> None:
        sequence.status, sequence.epoch = Status.FINISHED, 0
        finished.append(Finish(sequence, reason, token if reason == "stop" else None))

    # ---- invariants

    def check(self) -> None:
        """Assert that blocks and slots add up. For tests: walks everything."""
        t, blocks = self.tables, self.blocks
        running = np.flatnonzero(t.epoch)
        held = [t.block_tables[:, slot, : t.num_blocks[slot]].ravel() for slot in running]
        every = np.concatenate([blocks.free_blocks(), *held])
        assert np.array_equal(np.sort(every), np.arange(1, blocks.num_blocks)), "a block is lost, doubled or shared"
        assert sorted([*self._free_slots, *running.tolist()]) == list(range(t.max_num_seqs)), "slots do not add up"
        assert t.epoch[t.dummy_slot] == 0 and not t.decoding[t.dummy_slot], "the dummy slot runs"
        assert len(set(t.epoch[running].tolist())) == len(running), "two slots share an epoch"
        prefilling = []
        for slot in running.tolist():
            sequence: Sequence = t.sequences[slot]
            assert sequence.slot == slot and sequence.epoch == t.epoch[slot] and sequence.status is Status.RUNNING
            assert t.arrival[slot] == sequence.arrival
            computed, total = int(t.num_computed[slot]), int(t.num_tokens[slot])
            assert computed <= t.num_blocks[slot] * self.block_size, "a token was computed without a block"
            assert t.num_landed[slot] <= total < t.max_len[slot] or not t.decoding[slot]
            if t.decoding[slot]:
                assert computed == total - 1, "a decoding sequence lags"
            else:
                assert computed < total, "a prefill has nothing left"
                prefilling.append(sequence)
        assert self._prefilling == sorted(prefilling, key=lambda s: s.arrival), "prefills out of order"
        waiting = [s for s in self._waiting if s.status is Status.WAITING]
        assert len(waiting) == self.num_waiting
        assert all(s.slot == -1 and s.epoch == 0 for s in waiting)
        arrivals = [s.arrival for s in waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"
        assert self.num_in_flight >= 0
