"""Decides what runs next. Knows sequences and blocks; knows nothing of tensors, devices or text.

Running sequences are rows of ``SlotTables``. What all of them do every step is numpy over rows; Python loops touch
only the few that differ: a prefill chunk, a complete block, a finish.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler import invariants
from cbatch.scheduler.batch_writer import pad, write_chunks, write_decodes
from cbatch.scheduler.block_tables import BlockTables
from cbatch.scheduler.blocks import BlockManager
from cbatch.scheduler.pace import Pace
from cbatch.scheduler.plan import Finish, HostBatch, Landed, StepPlan, StepSizes
from cbatch.scheduler.prefix_cache import Node, PrefixCache
from cbatch.scheduler.sequence import MAX_PRIORITY, Sequence, Status
from cbatch.scheduler.slots import FREE, NEVER, SlotTables
from cbatch.scheduler.swap import SwapSpace
from cbatch.scheduler.waiting import WaitingQueue

Policy = Literal["fcfs", "priority", "longest_prefix"]
POLICIES: tuple[Policy, ...] = ("fcfs", "priority", "longest_prefix")

LOOK_AHEAD = 64  # waiting sequences that may be looked at, and overtaken by others, in one step
ARRIVAL_BITS = 40


class Scheduler:
    """Chunked prefill under a token budget, a prefix cache, and preemption by recomputation or by swapping.

    A step takes every decoding sequence (one token each), then prefills by rank, chunks of running sequences and new
    ones, while ``max_num_batched_tokens``, slots and blocks last. The rank is the order of arrival; with the policy
    ``"priority"``, the priority comes first. When blocks run out, the running sequence of the last rank is preempted:
    it goes back to the queue. So the first in rank always advances; and every sequence finishes, since the caller
    refuses one that does not fit into the empty pool (``blocks_for``).

    Policies differ in which sequence starts next:

    - ``"fcfs"``: the first in rank.
    - ``"priority"``: the first in rank. If it has no room, running sequences of a lower priority are preempted for it,
      the last first. They come back when there is room, and preempt none of the same priority.
    - ``"longest_prefix"``: of the first and the 64 that arrived after it, the one with the longest cached prefix. So a
      sequence is overtaken by at most the 64 that arrived right after it.
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
        windows: tuple[int, ...] = (),
        policy: Policy = "fcfs",
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        max_prompt_logits: int = 512,
    ) -> None:
        """Args:
        windows: for each group of layers, how many positions a query sees, its own included; 0: all. ``()``: all,
            in every group.
        num_host_blocks: blocks of host memory that preempted sequences may be swapped out to.
        max_prompt_logits: most prompt tokens in one step whose logits are wanted (``wants_prompt_logits``).
        """
        assert max_num_seqs <= max_num_batched_tokens and (prefix_caching or policy != "longest_prefix")
        windows = tuple(window if window < max_model_len else 0 for window in windows) or (0,) * num_groups
        if len(windows) != num_groups or min(windows) < 0:
            raise ValueError(
                f"windows is {windows}, but must be {num_groups} numbers of at least 0, one for each group"
            )
        self.policy = policy
        self.blocks = BlockManager(num_blocks, block_size)
        self.slot_tables = SlotTables(max_num_seqs, max_model_len, block_size)
        self.block_tables = BlockTables(self.blocks, max_num_seqs, self.slot_tables.max_blocks_per_seq, windows)
        self.prefix_cache = PrefixCache(self.blocks, windows) if prefix_caching else None
        self.swap = SwapSpace(num_host_blocks) if num_host_blocks else None
        self.block_size = block_size
        self.num_groups = num_groups
        self.windows = windows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prompt_logits = max_prompt_logits
        self.max_model_len = max_model_len
        self.pace: Pace | None = None  # sizes the chunks in steps with decodes; None: they fill the token budget
        self.num_preemptions = 0
        # Tokens of all sequences when they first started, and how many of those were in the prefix cache.
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        # Most block table columns that the sequences starting in one step may bring along: what a slab has room for.
        self.max_shared_columns = max(self.slot_tables.max_blocks_per_seq, 4096)
        self._watermark = num_blocks // 100
        self._prompt_logits_left = 0  # of ``max_prompt_logits``, in the step that is being planned
        self._is_blocked = False  # in that step: a sequence may start, but has no room
        self._waiting = WaitingQueue()
        self._preempted: set[Sequence] = set()  # in the step that is being planned; they do not start again in it
        self._not_yet_run: set[Sequence] = set()  # in a slot, but in no step so far: forked, or being swapped in
        self._paused: set[Sequence] = set()  # in a slot, with all known tokens computed, until ``unpause``
        self._prefilling: list[Sequence] = []  # running with known tokens left to compute, by rank
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0
        self._last_epoch = 0

    # ---- life of a sequence

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that a sequence needs to reach ``num_tokens`` tokens of context."""
        return self.block_tables.blocks_for(num_tokens)

    @property
    def longest_len(self) -> int:
        """Largest ``max_len`` that fits into the empty pool (the last token is never computed); 1 if not even two."""
        least, most = 1, self.max_model_len
        while least < most:
            middle = (least + most + 1) // 2
            if self.blocks_for(middle - 1) <= self.blocks.num_usable:
                least = middle
            else:
                most = middle - 1
        return least

    @property
    def num_spare_words(self) -> int:
        """Most int32 words that a step has behind the layout of its slab."""
        # Cached and forked prefixes, and a few times what a step computes: shared and dropped blocks; and the copies.
        columns = self.max_num_batched_tokens // self.block_size + self.slot_tables.max_num_seqs
        return 2 * self.num_groups * (self.max_shared_columns + 5 * columns + self.slot_tables.max_num_seqs)

    @property
    def num_running(self) -> int:
        return self.slot_tables.max_num_seqs - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step can be planned, now or after what is in flight has landed."""
        return self.num_waiting > 0 or self.num_running > 0

    def add(self, sequence: Sequence, num_followers: int = 0) -> None:
        """Queue a new sequence. The caller has made sure that it fits into an empty pool.

        The next ``num_followers`` arrival numbers are reserved: sequences added later with an ``arrival`` of this one's
        plus 1 to ``num_followers`` (each once) rank right behind it.
        """
        assert 0 < sequence.num_prompt_tokens < sequence.max_len <= self.max_model_len
        assert self.blocks_for(sequence.max_len - 1) <= self.blocks.num_usable
        self._give_rank(sequence)
        self._num_arrivals += num_followers
        self._waiting.add(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Start a new sequence on the keys and values of a running one, as far as their tokens agree.

        Only tokens of the parent that have landed and been computed count. Whole blocks are shared, the tokens in the
        block behind them are copied before the next step, and at least one token is computed. The parent goes on.
        False, and nothing done, if there is no slot or no room: then ``add`` the child.
        """
        t, slot, num_tokens = self.slot_tables, parent.slot, len(child.token_ids)
        assert slot >= 0 and parent.cache_salt == child.cache_salt and num_tokens < child.max_len <= self.max_model_len
        assert self.blocks_for(child.max_len - 1) <= self.blocks.num_usable
        most = min(num_tokens - 1, int(t.num_computed[slot]), int(t.num_landed[slot]))
        departures = (child.token_ids[:most] != t.tokens[slot, :most]).nonzero()[0]
        num_computed = int(departures[0]) if departures.size else most
        num_shared = num_computed // self.block_size
        num_columns = num_shared + sum(other.num_cached_tokens for other in self._not_yet_run) // self.block_size
        wanted = (-(-num_tokens // self.block_size) - num_shared) * self.num_groups + self._reserved()
        if not self._free_slots or num_columns > self.max_shared_columns or wanted > self.blocks.num_free:
            return False
        prefix = self._published(parent, num_shared)
        if not self.block_tables.fork(slot, self._free_slots[-1], num_computed):
            return False
        self._give_rank(child)
        self._take_slot(child, prefix, num_computed)
        self._not_yet_run.add(child)
        return True

    def unpause(self, sequence: Sequence, token: int) -> None:
        """Let a paused sequence go on, with ``token`` in place of the one that it sampled, which has landed."""
        t, slot = self.slot_tables, sequence.slot
        assert sequence in self._paused and t.num_landed[slot] == t.num_tokens[slot]
        t.tokens[slot, t.num_tokens[slot] - 1] = token
        self._paused.discard(sequence)
        insort(self._prefilling, sequence, key=_rank)

    def _give_rank(self, sequence: Sequence) -> None:
        assert abs(sequence.priority) <= MAX_PRIORITY
        if sequence.arrival < 0:
            sequence.arrival = self._num_arrivals
            self._num_arrivals += 1
        sequence.rank = sequence.arrival
        if self.policy == "priority":
            sequence.rank += sequence.priority << ARRIVAL_BITS

    def abort(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, in constant time. Its rows in flight will be dropped."""
        if sequence.status is Status.FINISHED:
            return
        was_waiting = sequence.status is Status.WAITING
        if was_waiting:
            sequence.token_ids = sequence.token_ids[:0].copy()  # it may stay in the queue for long
            if self.swap is not None:
                self.swap.drop(sequence)
        elif sequence.slot >= 0:  # else it ended by length, and gave its slot back when its last step was planned
            self._release_slot(sequence)
        sequence.status = Status.FINISHED
        sequence.epoch = 0
        sequence.node = None
        if was_waiting:
            self._waiting.bury()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as when weights have changed. Running sequences go on, and publish no more.

        What preempted ones keep in host memory is forgotten too: once back, they would publish it.
        """
        if self.prefix_cache is None:
            return
        if self.swap is not None:
            for waiting in self._waiting.entries():
                self.swap.drop(waiting)
        for slot in np.flatnonzero(self.slot_tables.epoch).tolist():
            sequence: Sequence = self.slot_tables.sequences[slot]
            sequence.node = sequence.pending = None
            self.slot_tables.publish_at[slot] = NEVER
        self.prefix_cache.reset()

    def _take_slot(self, sequence: Sequence, prefix: Node | None, num_computed: int) -> None:
        """Run a sequence in the next free slot, whose block table holds its first ``num_computed`` tokens.

        ``prefix`` is the published part of these; None without a prefix cache.
        """
        t, slot = self.slot_tables, self._free_slots.pop()
        self._last_epoch += 1
        sequence.slot, sequence.epoch, sequence.status = slot, self._last_epoch, Status.RUNNING
        num_tokens = len(sequence.token_ids)
        t.epoch[slot] = sequence.epoch
        t.rank[slot] = sequence.rank
        t.decoding[slot] = False
        t.num_computed[slot] = num_computed
        t.num_tokens[slot] = num_tokens
        t.num_landed[slot] = num_tokens
        t.max_len[slot] = sequence.max_len
        t.publish_at[slot] = (prefix.depth + 1) * self.block_size if prefix is not None else NEVER
        t.flags[slot] = sequence.flags
        t.set_stop_ids(slot, sequence.stop_token_ids)
        t.sequences[slot] = sequence
        t.tokens[slot, :num_tokens] = sequence.token_ids
        insort(self._prefilling, sequence, key=_rank)
        sequence.node = prefix
        sequence.num_cached_tokens = num_computed
        if self.prefix_cache is not None and prefix is not None:
            self.prefix_cache.enter(prefix)
            self._announce(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        """Give slot and blocks back. A step in flight may still use them: whatever reuses them is a later step."""
        t, slot = self.slot_tables, sequence.slot
        if not t.decoding[slot] and sequence not in self._paused:
            self._prefilling.remove(sequence)
        self._paused.discard(sequence)
        self.block_tables.clear(slot)
        if self.swap is not None:
            self.swap.cancel(sequence)
        if self.prefix_cache is not None and sequence.node is not None:
            self._withdraw(sequence)
            self.prefix_cache.leave(sequence.node)
        sequence.num_landed = int(t.num_landed[slot])
        sequence.slot = -1
        t.epoch[slot] = 0
        t.rank[slot] = FREE
        t.decoding[slot] = False
        t.publish_at[slot] = NEVER
        t.set_stop_ids(slot, frozenset())
        t.sequences[slot] = None
        self._free_slots.append(slot)
        self._not_yet_run.discard(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue with the tokens that have landed; those in flight are void."""
        t, slot = self.slot_tables, sequence.slot
        sequence.token_ids = t.tokens[slot, : t.num_landed[slot]].copy()
        self._save(sequence)
        self._release_slot(sequence)
        sequence.status, sequence.epoch = Status.WAITING, 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(sequence)
        self._preempted.add(sequence)

    def _save(self, sequence: Sequence) -> None:
        """Swap a preempted sequence out to host memory, if there is room and copying is cheaper than computing again.

        Tokens in flight are void, so what was computed of them is not kept; and the last known token is computed again
        in any case, for its logits. The copies run behind the step that last wrote the blocks, which has been planned.
        (Not so for a fork that was in no step: its own block is still to be copied.) What was computed before the
        prefix cache was reset is not kept.
        """
        slot = sequence.slot
        num_tokens = min(int(self.slot_tables.num_computed[slot]), len(sequence.token_ids) - 1)
        if self.swap is None or num_tokens <= 0 or sequence.skip_reading_prefix_cache or sequence in self._not_yet_run:
            return
        if self.prefix_cache is not None and sequence.node is None:
            return
        blocks = self.block_tables.resumable_blocks(slot, num_tokens)
        if blocks is not None:
            count = int(np.count_nonzero(blocks))
            if count <= self.swap.num_free and self.swap.is_cheaper(2 * count, num_tokens):
                self.swap.save(sequence, blocks, num_tokens)

    def _preempt_last(self, after: int = FREE) -> bool:
        """Preempt the running sequence of the last rank, if it ranks behind ``after``; False if it does not."""
        slot = int(self.slot_tables.rank.argmax())
        if self.slot_tables.rank[slot] <= after:
            return False
        self._preempt(self.slot_tables.sequences[slot])
        return True

    # ---- planning

    def plan(self, host_batch: Callable[[int, int], HostBatch]) -> StepPlan | None:
        """Choose the next step and write its arrays into the views that ``host_batch(num_tokens, num_rows)`` gives.

        None if there is nothing to run, or nothing that can run before a step has landed.
        """
        admitted: list[Sequence] = []
        chunks = self._schedule(admitted)
        slots = self.slot_tables.decoding.nonzero()[0]
        if not chunks and not slots.size:
            return None
        return self._write(host_batch, slots, chunks, admitted)

    def _schedule(self, admitted: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Find blocks for everything that runs in this step. Returns the prefill chunks as (sequence, num_tokens)."""
        self._preempted.clear()
        self._prompt_logits_left = self.max_prompt_logits
        self._is_blocked = False
        num_decodes = self._grow_decodes()
        budget = self.max_num_batched_tokens - num_decodes
        if self.pace is not None and num_decodes and (self._prefilling or self.num_waiting):
            context = int(self.slot_tables.num_computed[self._prefilling[0].slot]) if self._prefilling else 0
            budget = min(budget, self.pace.tokens(num_decodes, context))
        chunks: list[tuple[Sequence, int]] = []
        for sequence in tuple(self._prefilling):
            budget = self._admit(budget, chunks, admitted, before=sequence)
            if budget > 0 and sequence.slot >= 0 and (num_tokens := self._grow_prefill(sequence, budget)):
                chunks.append((sequence, num_tokens))
                budget -= num_tokens
                if sequence in self._not_yet_run:
                    self._not_yet_run.discard(sequence)
                    admitted.append(sequence)
        self._admit(budget, chunks, admitted)
        return chunks

    def _grow_decodes(self) -> int:
        """One more block for each decoding sequence whose blocks are full; preempts until there are enough."""
        t, block_tables = self.slot_tables, self.block_tables
        while True:
            slots = t.decoding.nonzero()[0]
            full = slots[t.num_computed.take(slots) == block_tables.num_columns.take(slots) * self.block_size]
            if full.size * self.num_groups <= self.blocks.num_free:
                break
            self._preempt_last()
        if full.size:
            block_tables.extend_each(full)
        return int(slots.size)

    def _grow_prefill(self, sequence: Sequence, budget: int) -> int:
        """Find blocks for the next chunk of a prefill. Returns the number of its tokens; 0: it must wait for blocks."""
        t, slot = self.slot_tables, sequence.slot
        if sequence.wants_prompt_logits:
            budget = min(budget, self._prompt_logits_left)
        computed, held = int(t.num_computed[slot]), int(self.block_tables.num_columns[slot])
        num_tokens = min(int(t.num_tokens[slot]) - computed, budget)
        wanted = -(-(computed + num_tokens) // self.block_size) - held
        while wanted * self.num_groups > self.blocks.num_free:
            if not self._preempt_last(after=sequence.rank):
                wanted = self.blocks.num_free // self.num_groups
                num_tokens = max(0, (held + wanted) * self.block_size - computed)
                break
        if wanted > 0:
            self.block_tables.extend(slot, wanted)
        if sequence.wants_prompt_logits:
            self._prompt_logits_left -= num_tokens
        return num_tokens

    # ---- which sequences start

    def _admit(
        self, budget: int, chunks: list[tuple[Sequence, int]], admitted: list[Sequence], before: Sequence | None = None
    ) -> int:
        """Start waiting sequences in the policy's order: all, or those that rank before a running prefill.

        Returns what is left of the budget. A sequence without room blocks those behind it, and is not asked again in
        this step: what a chunk takes was reserved for it. One that must wait (``_must_wait``) is passed by others, but
        a slot and the blocks that it needs are kept for it.
        """
        num_kept = kept_blocks = 0
        reserved: int | None = None  # None: to be computed anew
        num_columns: int | None = None
        for sequence in self._candidates(before):
            if budget <= 0 or sequence in self._preempted:
                break
            if reserved is None:
                reserved = self._reserved()
            if num_columns is None:
                others = (*admitted, *self._not_yet_run)
                num_columns = sum(other.num_cached_tokens for other in others) // self.block_size
            prefix = None if self.prefix_cache is None else self._match(sequence)
            if self._must_wait(sequence, prefix):
                num_kept += 1
                kept_blocks += self._wanted(sequence, prefix)
                if num_kept == LOOK_AHEAD:
                    break
                continue
            prefix = self._prefix_to_start(sequence, prefix)
            num_columns += -(-self._num_ready(sequence, prefix) // self.block_size)
            if (admitted or self._not_yet_run) and num_columns > self.max_shared_columns:
                break
            if not self._has_room(sequence, prefix, num_kept, reserved + self._spare(sequence) + kept_blocks):
                if not self._preempt_for(sequence, prefix, num_kept, kept_blocks):
                    self._is_blocked = True
                    break
                reserved = None
            is_swapped = sequence.swapped is not None
            self._start(sequence, prefix)
            if is_swapped and (chunks or self.slot_tables.decoding.any()):  # copied in while others are computed
                self._not_yet_run.add(sequence)
                reserved = None
                continue
            admitted.append(sequence)
            num_tokens = self._grow_prefill(sequence, budget)
            assert num_tokens > 0, "a sequence started without room"
            chunks.append((sequence, num_tokens))
            budget -= num_tokens
            if num_tokens < len(sequence.token_ids) - sequence.num_cached_tokens:  # the rest is reserved from now on
                reserved = None
        return budget

    def _start(self, sequence: Sequence, prefix: Node | None) -> None:
        """Move a waiting sequence into a slot, on the blocks of a cached prefix and those it has in host memory."""
        self._waiting.remove(sequence)
        slot, num_ready = self._free_slots[-1], self._num_ready(sequence, prefix)
        if self.prefix_cache is not None and prefix is not None:
            self.block_tables.start(slot, [node.blocks for node in self.prefix_cache.path(prefix)])
        if self.swap is not None and sequence.swapped is not None:
            columns = int(self.block_tables.num_columns[slot])
            blocks = self.block_tables.restore(slot, sequence.swapped[:, columns:] >= 0, num_ready)
            self.swap.load(sequence, columns, blocks)
        self._take_slot(sequence, prefix, num_ready)
        if not sequence.num_preemptions:
            self.num_asked_tokens += len(sequence.token_ids)
            self.num_hit_tokens += num_ready

    def _candidates(self, before: Sequence | None) -> Iterator[Sequence]:
        """Waiting sequences in the order in which they may start. The caller takes out of the queue what it starts."""
        if self._is_blocked or not (self._free_slots or self._may_preempt()):
            return
        if self.policy == "longest_prefix":
            if before is None:
                yield from self._by_prefix()
            return
        index = 0
        while (sequence := self._waiting.peek(index)) is not None:
            if before is not None and sequence.rank > before.rank:
                return
            yield sequence
            index += sequence.status is Status.WAITING

    def _by_prefix(self) -> list[Sequence]:
        first = self._waiting.peek(0)
        if first is None:
            return []
        near: list[Sequence] = []
        while (sequence := self._waiting.peek(len(near))) is not None and sequence.rank <= first.rank + LOOK_AHEAD:
            near.append(sequence)
        return sorted(near, key=lambda sequence: (-self._match(sequence).depth, sequence.rank))

    def _match(self, sequence: Sequence) -> Node:
        """The longest cached prefix of a waiting sequence. Nearly free if nothing has changed since the last call."""
        assert self.prefix_cache is not None
        if sequence.skip_reading_prefix_cache:
            return self.prefix_cache.root
        sequence.node = self.prefix_cache.match(sequence.node, sequence.token_ids, sequence.cache_salt)
        return sequence.node

    def _must_wait(self, sequence: Sequence, prefix: Node | None) -> bool:
        """Whether a sequence starts in a later step, whatever room there is.

        A step makes few logits of prompts; and a running prefill that ranks before it may be computing the block behind
        its ``prefix``, which it will find in the cache.
        """
        if sequence.wants_prompt_logits and not self._prompt_logits_left:
            return True
        if self.prefix_cache is None or prefix is None:
            return False
        if sequence.skip_reading_prefix_cache or sequence.swapped is not None:
            return False
        return self.prefix_cache.is_coming(prefix, sequence.token_ids, sequence.cache_salt, sequence.rank)

    def _prefix_to_start(self, sequence: Sequence, prefix: Node | None) -> Node | None:
        """How much of the matched ``prefix`` a sequence starts on.

        With more in host memory, it starts on both; unless computing that part is cheaper than copying it, when it is
        dropped there. With windows, all comes from host memory: the cached prefix may lack their blocks.
        """
        if self.prefix_cache is None or prefix is None:
            return None
        resumable = self.prefix_cache.resumable(prefix)
        if self.swap is None or sequence.swapped is None:
            return resumable
        columns = sequence.swapped[:, 0 if self.block_tables.windows else prefix.depth :]
        if not self.swap.is_cheaper(
            int((columns >= 0).sum()), sequence.swapped_len - resumable.depth * self.block_size
        ):
            self.swap.drop(sequence)
            return resumable
        if self.block_tables.windows:
            return self.prefix_cache.root
        while prefix.depth * self.block_size > sequence.swapped_len and prefix.parent is not None:
            prefix = prefix.parent
        return prefix

    def _num_ready(self, sequence: Sequence, prefix: Node | None) -> int:
        """Tokens of a waiting sequence that need not be computed: in a cached prefix, or in host memory."""
        if sequence.swapped is not None:
            return sequence.swapped_len
        return prefix.depth * self.block_size if prefix is not None else 0

    def _wanted(self, sequence: Sequence, prefix: Node | None) -> int:
        """Most blocks that a waiting sequence holds until all its known tokens are computed."""
        num_tokens = len(sequence.token_ids)
        chunk = min(num_tokens - self._num_ready(sequence, prefix), self.max_num_batched_tokens)
        return self.block_tables.blocks_for(num_tokens, chunk)

    def _outstanding(self, sequence: Sequence) -> int:
        """Blocks that the rest of a running prefill will take."""
        t, slot = self.slot_tables, sequence.slot
        num_tokens = int(t.num_tokens[slot])
        chunk = min(num_tokens - int(t.num_computed[slot]), self.max_num_batched_tokens)
        return max(0, self.block_tables.blocks_for(num_tokens, chunk) - self.block_tables.num_held(slot))

    def _reserved(self) -> int:
        """Blocks that running prefills will still take. Otherwise each could hold a part of the pool, and all wait."""
        if not self._prefilling:
            return 0
        slots = np.array([sequence.slot for sequence in self._prefilling])
        computed = self.slot_tables.num_computed.take(slots)
        last = self.slot_tables.num_tokens.take(slots) - computed == 1  # all at once: beams are many, and ask often
        full = computed == self.block_tables.num_columns.take(slots) * self.block_size
        rest = [sequence for sequence, one in zip(self._prefilling, last.tolist(), strict=True) if not one]
        return int(np.count_nonzero(last & full)) * self.num_groups + sum(map(self._outstanding, rest))

    def _spare(self, sequence: Sequence) -> int:
        """Blocks that must stay free when a sequence starts beside others, so that those can grow for a while."""
        if sequence.num_preemptions:  # one each, or it would soon be preempted again
            return max(self._watermark, self.num_running * self.num_groups)
        return self._watermark

    def _has_room(self, sequence: Sequence, prefix: Node | None, num_kept: int, reserved: int) -> bool:
        """Whether a slot and blocks for all known tokens of a sequence are free beside those kept and reserved."""
        if len(self._free_slots) <= num_kept:
            return False
        if not self.num_running:  # as many tokens as fit, since all of them fit one after the other
            return True
        wanted, num_free = self._wanted(sequence, prefix) + reserved, self.blocks.num_free
        groups = self.block_tables.full_groups
        if wanted <= num_free or prefix is None or wanted - prefix.depth * len(groups) > num_free:
            return wanted <= num_free
        # Blocks of the prefix that running sequences hold are not among the free ones. They begin at the root.
        while prefix.parent is not None and not self.blocks.ref_counts[prefix.blocks[groups[0]]]:
            prefix = prefix.parent
        return wanted - prefix.depth * len(groups) <= num_free

    def _may_preempt(self) -> bool:
        """Whether some running sequence has a lower priority than the first waiting one."""
        if self.policy != "priority" or (first := self._waiting.peek(0)) is None:
            return False
        return bool(self.slot_tables.rank.max() >= (first.priority + 1) << ARRIVAL_BITS)

    def _preempt_for(self, sequence: Sequence, prefix: Node | None, num_kept: int, kept_blocks: int) -> bool:
        """Make room by preempting running sequences of a lower priority, the last first. False, and none is, if all of
        them would not do.

        Blocks that they share with others, or with ``prefix``, do not count as gained.
        """
        if self.policy != "priority":
            return False
        t = self.slot_tables
        lower = np.flatnonzero(t.rank >= (sequence.priority + 1) << ARRIVAL_BITS)
        if not lower.size or lower.size + len(self._free_slots) <= num_kept:
            return False
        blocks, counts = np.unique(self.block_tables.held(lower), return_counts=True)
        gained = np.count_nonzero(counts == self.blocks.ref_counts[blocks])
        stay = sum(self._outstanding(other) for other in self._prefilling if other.priority <= sequence.priority)
        wanted = self._wanted(sequence, prefix) + stay + kept_blocks
        if wanted > self.blocks.num_free + gained and lower.size < self.num_running:
            return False
        while not self._has_room(sequence, prefix, num_kept, self._reserved() + kept_blocks):
            self._preempt(t.sequences[t.rank.argmax()])
        return True

    # ---- publishing to the prefix cache

    def _publish_prompt(self, sequence: Sequence) -> None:
        """Publish the blocks of a prompt that the step completes. A sequence that hits them runs in a later step."""
        node = sequence.node
        num_complete = int(self.slot_tables.num_computed[sequence.slot]) // self.block_size
        if node is None or node.depth == num_complete:
            return
        self._withdraw(sequence)
        while node.depth < num_complete:
            node = self._publish_block(sequence)
        self._announce(sequence)

    def _publish_block(self, sequence: Sequence) -> Node:
        """Publish the block behind the last published one; a step that completes it has been planned.

        If the same prefix is cached already, the sequence goes on with those blocks, and gives its own back.
        """
        assert self.prefix_cache is not None and sequence.node is not None
        t, slot, column = self.slot_tables, sequence.slot, sequence.node.depth
        tokens = t.tokens_by_block[slot, column].tobytes()
        own: list[int] = self.block_tables.tables[:, slot, column].tolist()
        node = sequence.node = self.prefix_cache.publish(sequence.node, tokens, sequence.cache_salt, own)
        t.publish_at[slot] = (column + 2) * self.block_size
        if node.blocks is not own:
            self.block_tables.share(slot, column, node.blocks)
        return node

    def _published(self, sequence: Sequence, depth: int) -> Node | None:
        """The first ``depth`` blocks of a running sequence, all computed and landed, as a node of the prefix cache."""
        node = sequence.node
        if node is not None and node.depth < depth:  # one block, not published before one more token lands
            self._withdraw(sequence)
            node = self._publish_block(sequence)
            self._announce(sequence)
        while node is not None and node.depth > depth:
            node = node.parent
        return node

    def _announce(self, sequence: Sequence) -> None:
        """Let waiting sequences with the same prefix wait for the next block that this prefill computes."""
        t, slot, size = self.slot_tables, sequence.slot, self.block_size
        if self.prefix_cache is None or sequence.node is None or t.decoding[slot] or sequence in self._paused:
            return
        start = sequence.node.depth * size
        if start + size <= t.num_tokens[slot]:
            tokens = t.tokens[slot, start : start + size].tobytes()
            sequence.pending = self.prefix_cache.key(sequence.node, tokens, sequence.cache_salt)
            self.prefix_cache.announce(sequence.pending, sequence.rank)

    def _withdraw(self, sequence: Sequence) -> None:
        if self.prefix_cache is not None and sequence.pending is not None:
            self.prefix_cache.withdraw(sequence.pending, sequence.rank)
            sequence.pending = None

    # ---- writing a step

    def _write(
        self,
        host_batch: Callable[[int, int], HostBatch],
        slots: NDArray[np.intp],
        chunks: list[tuple[Sequence, int]],
        admitted: list[Sequence],
    ) -> StepPlan:
        """Fill the views of a step: decode rows in one go, then prefill chunks. What ends by length leaves its slot."""
        t = self.slot_tables
        num_decodes = int(slots.size)
        num_tokens = num_decodes + sum(count for _, count in chunks)
        num_rows = num_decodes + len(chunks)
        host = host_batch(num_tokens, num_rows)

        max_context_len = write_decodes(host, t, self.block_tables, slots)
        max_query_len, num_pairs = int(num_decodes > 0), 0
        if chunks:
            sampled = write_chunks(host, t, self.block_tables, chunks, num_decodes)
            self._end_prefill(sampled)
            slots = np.concatenate((slots, sampled))
            counts, ends = [count for _, count in chunks], host.context_lens[num_decodes:num_rows].tolist()
            max_query_len, max_context_len = max(max_query_len, *counts), max(max_context_len, *ends)
            num_pairs = sum(count * (2 * end - count) // 2 for count, end in zip(counts, ends, strict=True))
        num_samples = int(slots.size)

        num_updates, num_overflow, num_copies = self.block_tables.write_changes(host)
        for i, sequence in enumerate(admitted):
            host.param_slots[i] = sequence.slot
            if sequence.param_values is not None:
                host.param_values[i] = sequence.param_values
        pad(host, t, num_tokens, num_rows, num_samples, num_updates, len(admitted))

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
                num_pairs=num_pairs,
                num_overflow=num_overflow,
                num_copies=num_copies,
            ),
            flags=int(np.bitwise_or.reduce(t.flags[slots])) if num_samples else 0,
            slots=slots,
            epochs=t.epoch[slots],
            sequences=t.sequences[slots],
            admitted=admitted,
            chunks=chunks,
            swaps=self.swap.take_plan(chunks) if self.swap is not None else None,
        )
        self._settle(slots[:num_decodes], chunks)
        ended = slots[t.num_tokens[slots] == t.max_len[slots]]
        for slot in ended.tolist():  # by length: known before the token is, so nothing is computed in vain
            self._release_slot(t.sequences[slot])
        return plan

    def _end_prefill(self, slots: NDArray[np.intp]) -> None:
        """The written step computes the last known tokens of these: from the next step on they decode, or pause."""
        t = self.slot_tables
        for sequence in t.sequences[slots]:
            if sequence.pauses:
                self._paused.add(sequence)
            else:
                t.decoding[sequence.slot] = True
        over = t.decoding
        self._prefilling = [s for s in self._prefilling if not over[s.slot] and s not in self._paused]

    def _settle(self, slots: NDArray[np.intp], chunks: list[tuple[Sequence, int]]) -> None:
        """After a step is written: publish the blocks that it completes, give back what no later query sees."""
        t = self.slot_tables
        for sequence, _ in chunks:
            self._publish_prompt(sequence)
        if self.block_tables.windows:
            if chunks:
                slots = np.concatenate((slots, np.array([sequence.slot for sequence, _ in chunks], np.intp)))
            self.block_tables.drop_unseen(slots, t.num_computed[slots])

    # ---- landing

    def land(self, plan: StepPlan, tokens: NDArray[np.int32]) -> Landed:
        """Take in the sampled tokens ``[num_samples]`` of a step, one or more steps after it was planned."""
        t, slots, live_tokens = self.slot_tables, plan.slots, tokens
        finished: list[Finish] = []
        keep = None
        stale = (t.epoch.take(slots) != plan.epochs).nonzero()[0]
        if stale.size:
            keep = np.ones(slots.size, np.bool_)
            keep[stale] = False
            slots, live_tokens = slots[keep], tokens[keep]
            for row in stale.tolist():
                sequence: Sequence = plan.sequences[row]
                if sequence.epoch == plan.epochs[row]:  # it has left its slot only because it ends by length
                    keep[row] = True
                    self._land_last(sequence, int(tokens[row]), finished)
        columns = t.num_landed.take(slots)
        t.tokens[slots, columns] = live_tokens
        t.num_landed[slots] = columns + 1
        if self.prefix_cache is not None:
            # The input of a row was the token before, so its blocks are computed up to there.
            complete = slots[columns >= t.publish_at.take(slots)]
            for sequence in t.sequences[complete]:
                self._publish_block(sequence)
        for i in self._stopped(slots, live_tokens):
            sequence = t.sequences[slots[i]]
            self._release_slot(sequence)
            self._finish(sequence, "stop", int(live_tokens[i]), finished)
        if keep is None:
            return Landed(plan.sequences, tokens, finished, 0, None)
        kept = np.flatnonzero(keep)
        return Landed(plan.sequences[kept], tokens[kept], finished, keep.size - kept.size, kept)

    def note_time(self, sizes: StepSizes, ms: float) -> None:
        """Learn from a landed step how long steps take: for the sizes of chunks, and whether swapping is cheaper."""
        if self.pace is not None:
            self.pace.note(sizes.num_decodes, sizes.num_tokens, sizes.num_pairs, ms)
        if self.swap is not None:
            self.swap.note(sizes.num_tokens - sizes.num_decodes, sizes.num_tokens, ms)

    def _stopped(self, slots: NDArray[np.intp], tokens: NDArray[np.int32]) -> list[int]:
        """Which rows have a token that stops their sequence."""
        t = self.slot_tables
        stopped = t.has_more_stops.take(slots)
        for i in stopped.nonzero()[0].tolist():  # too many to compare with each
            stopped[i] = int(tokens[i]) in t.sequences[slots[i]].stop_token_ids
        for column in t.stop_ids[: t.num_stop_columns]:
            stopped |= column.take(slots) == tokens
        rows: list[int] = stopped.nonzero()[0].tolist()
        return rows

    def _land_last(self, sequence: Sequence, token: int, finished: list[Finish]) -> None:
        sequence.num_landed += 1
        if token in sequence.stop_token_ids:
            reason = "stop"
        elif sequence.num_landed == sequence.max_len:
            reason = "length"
        else:
            return
        self._finish(sequence, reason, token, finished)

    def _finish(self, sequence: Sequence, reason: str, token: int, finished: list[Finish]) -> None:
        sequence.status, sequence.epoch, sequence.node = Status.FINISHED, 0, None
        finished.append(Finish(sequence, reason, token if reason == "stop" else None))

    # ---- invariants

    def check(self) -> None:
        """Assert that blocks, references, prefixes and slots add up. For tests: walks everything."""
        invariants.check(self)


def _rank(sequence: Sequence) -> int:
    return sequence.rank
