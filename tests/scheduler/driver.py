"""Runs a scheduler against a model that is a pure function of the tokens so far, so that every run is exact."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from cbatch.scheduler.plan import Bucket, HostBatch, StepPlan, StepShape, layout
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence

VOCAB = 97
MODULUS = 1_000_003
NO_KV = -1


def entry_behind(entry: int, token: int) -> int:
    """What the model stores for a token: like real keys and values, a function of all that goes before it too."""
    return (entry * 31 + token + 7) % MODULUS


def first_entry(salt: bytes) -> int:
    """What stands before the first token. With it, a prefix taken from another salt's cache changes every token."""
    return 1 + int.from_bytes(salt, "big") * 1009 % MODULUS


def next_token(visible: tuple[tuple[int, ...], ...], length: int) -> int:
    """The token behind ``length`` others, of the entries that each group sees: one that is wrong shows at once."""
    return (sum((i + 1) * entry for entries in visible for i, entry in enumerate(entries)) * 31 + length) % VOCAB


def solo(
    prompt: list[int], max_len: int, stop: tuple[int, ...] = (), windows: tuple[int, ...] = (0,), salt: bytes = b""
) -> list[int]:
    """The tokens of a request alone."""
    return list(_solo(tuple(prompt), max_len, stop, windows, salt))


@cache
def _solo(
    prompt: tuple[int, ...], max_len: int, stop: tuple[int, ...], windows: tuple[int, ...], salt: bytes
) -> tuple[int, ...]:
    entries, tokens = [first_entry(salt)], list(prompt)
    for token in tokens:
        entries.append(entry_behind(entries[-1], token))
    while len(tokens) < max_len:
        tokens.append(next_token(tuple(tuple(entries[1:][-window:]) for window in windows), len(tokens)))
        entries.append(entry_behind(entries[-1], tokens[-1]))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Driver:
    """Holds ``depth`` steps in flight, as the engine does, and keeps KV pages to read the history back from.

    A step reads each row's history out of the pages through its own block table, so a table, slot mapping, position,
    carry-over or shared block that is wrong anywhere changes a token.
    """

    scheduler: Scheduler
    depth: int = 2
    check: bool = True

    def __post_init__(self) -> None:
        s = self.scheduler
        self.shape = StepShape(s.num_groups, s.block_size, 1)
        rows = s.slot_tables.max_num_seqs + 1
        self.tables = np.zeros((s.num_groups, rows, s.slot_tables.max_blocks_per_seq), np.int64)  # the device's copy
        self.pages = np.full((s.blocks.num_blocks * s.block_size,), NO_KV, np.int64)
        num_host_blocks = s.swap.num_blocks if s.swap is not None else 0
        self.host_pages = np.full((num_host_blocks, s.block_size), NO_KV, np.int64)
        self.coming: Any = None  # what comes in from the host, for the next step
        self.last_tokens = np.full(rows, -1, np.int64)
        self.owners: dict[int, Sequence] = {}  # by slot, as of the step that was planned last
        self.in_flight: deque[tuple[StepPlan, np.ndarray[Any, Any]]] = deque()
        self.results: dict[int, Result] = {}
        self.allocated: set[int] = set()  # blocks, by the step that was planned last
        self._spy_on_allocate()
        self.num_wasted = 0
        self.has_forked = False
        self.num_steps = 0
        self.num_computed = 0  # tokens, over all steps

    def add(self, prompt: list[int], max_len: int, stop: tuple[int, ...] = (), **options: Any) -> Sequence:
        result = Result()
        sequence = Sequence(
            np.array(prompt, np.int32), max_len, stop_token_ids=frozenset(stop), payload=result, **options
        )
        self.scheduler.add(sequence)
        self.results[sequence.arrival] = result
        return sequence

    def fork(self, parent: Sequence, prompt: list[int], max_len: int, **options: Any) -> Sequence:
        """A sequence that begins with what a running one has computed; added as any other if that has no room."""
        result = Result()
        options = {"payload": result, "cache_salt": parent.cache_salt, **options}
        child = Sequence(np.array(prompt, np.int32), max_len, **options)
        if self.scheduler.fork(parent, child):
            self.has_forked = True
        else:
            self.scheduler.add(child)
        self._check()
        self.results[child.arrival] = result
        return child

    def step(self) -> bool:
        """Launch and land as the engine's loop does; False if nothing was left to do."""
        published = self.scheduler.blocks.published.copy()
        self.allocated.clear()
        plan = self.scheduler.plan(self._host_batch)
        self._check()
        if plan is not None:
            self.num_steps += 1
            self.num_computed += plan.sizes.num_tokens
            if self.check:
                self._check_writes(plan, published)
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

    def _spy_on_allocate(self) -> None:
        allocate = self.scheduler.blocks.allocate

        def spy(count: int) -> np.ndarray[Any, Any]:
            blocks = allocate(count)
            self.allocated.update(blocks.tolist())
            return blocks

        self.scheduler.blocks.allocate = spy  # type: ignore[method-assign]

    def _check(self) -> None:
        if self.check:
            self.scheduler.check()

    def _check_writes(self, plan: StepPlan, published: np.ndarray[Any, Any]) -> None:
        """No two tokens are written to one place, and none into a block that others may read: it was published before.

        Unless the step took it out of the cache, for then nobody had it any more.
        """
        written = plan.host.slot_mapping[:, : plan.sizes.num_tokens].ravel()
        assert np.unique(written).size == written.size, "two tokens are written to one place"
        blocks = set((written // self.scheduler.block_size).tolist())
        assert 0 not in blocks, "a token is written to the dummy block"
        assert not published[[*(blocks - self.allocated)]].any(), "a published block is written"

    def _host_batch(self, num_tokens: int, num_rows: int) -> HostBatch:
        step = 1 if self.num_steps % 2 else 4  # with and without padding
        bucket = Bucket(-(-num_tokens // step) * step, -(-num_rows // step) * step)
        words = layout(self.shape, bucket)[1] + self.scheduler.num_spare_words
        return HostBatch(np.full(words, -7, np.int32), self.shape, bucket)  # poison: what is not written shows

    def _compute(self, plan: StepPlan) -> np.ndarray[Any, Any]:
        host, sizes, s = plan.host, plan.sizes, self.scheduler
        if s.prefix_cache is None and s.swap is None and not any(s.windows):
            assert not sizes.num_overflow or self.has_forked
        behind, words = 2 * sizes.num_overflow, host.spare_words
        flat, overflow = self.tables.reshape(-1), words[:behind].reshape(2, -1)
        sources, own = words[behind : behind + 2 * sizes.num_copies].reshape(2, -1)
        assert not set(sources.tolist()) & set(own.tolist()) and len(set(own.tolist())) == own.size
        pages = self.pages.reshape(-1, s.block_size)
        if self.coming is not None:
            pages[self.coming.in_blocks] = self.host_pages[self.coming.in_host]
            self.coming = None
        if (swaps := plan.swaps) is not None:
            assert np.unique(swaps.out_host).size == swaps.out_host.size, "two blocks go out to one place"
            assert np.unique(swaps.in_blocks).size == swaps.in_blocks.size, "two blocks come in to one place"
            self.host_pages[swaps.out_host] = pages[swaps.out_blocks]
            if swaps.is_needed:
                pages[swaps.in_blocks] = self.host_pages[swaps.in_host]
            else:  # as late as can be, and the step leaves it alone
                self.coming = swaps
                pages[swaps.in_blocks] = NO_KV
                used = (host.slot_mapping[:, : sizes.num_tokens] // s.block_size).ravel().tolist()
                assert not set(swaps.in_blocks.tolist()) & {*used, *sources.tolist(), *own.tolist()}
        pages[own] = pages[sources]
        flat[host.table_index] = host.table_value
        flat[overflow[0]] = overflow[1]
        assert np.array_equal(flat[host.table_index], host.table_value), "an entry has two values"
        assert not self.tables[:, s.slot_tables.dummy_slot].any()
        for slot, sequence in zip(host.param_slots.tolist(), plan.admitted, strict=False):
            self.owners[slot] = sequence

        carry = host.carry_slots
        ids = np.where(carry >= 0, self.last_tokens[np.maximum(carry, 0)], host.input_ids).tolist()
        assert not host.input_ids[carry >= 0].any(), "a placeholder is not zero"
        assert np.array_equal(carry[: sizes.num_decodes], host.row_slots[: sizes.num_decodes])
        starts, lengths = host.cu_seqlens_q.tolist(), host.context_lens.tolist()
        widest = max(range(s.num_groups), key=lambda group: s.windows[group] or 1 << 30)
        for row in range(sizes.num_rows):
            slot, begin, end = int(host.row_slots[row]), starts[row], starts[row + 1]
            position = lengths[row] - (end - begin)
            assert host.positions[begin:end].tolist() == list(range(position, lengths[row]))
            self._check_table(slot, position, lengths[row])
            entry = first_entry(self.owners[slot].cache_salt)
            if position:
                entry = int(self.pages[self._place(widest, slot, position - 1)])
            for token in range(begin, end):
                entry = entry_behind(entry, ids[token])
                self.pages[host.slot_mapping[:, token]] = entry
        assert not host.slot_mapping[:, sizes.num_tokens :].any(), "padding is written to a live block"

        rows = {starts[row + 1] - 1: row for row in range(sizes.num_rows)}  # by last token
        sampled = np.zeros(sizes.num_samples, np.int32)
        for i, token in enumerate(host.sample_rows[: sizes.num_samples].tolist()):
            row = rows[token]
            slot, length = int(host.row_slots[row]), lengths[row]
            assert host.out_slots[i] == slot
            visible = []
            for group, window in enumerate(s.windows):
                first = max(0, length - window) if window else 0
                entries = self.pages[self._place(group, slot, np.arange(first, length))]
                visible.append(tuple(entries.tolist()))
            sampled[i] = next_token(tuple(visible), length)
        self.last_tokens[host.out_slots[: sizes.num_samples]] = sampled
        assert np.all(host.out_slots[sizes.num_samples :] == s.slot_tables.dummy_slot)
        return sampled

    def _place(self, group: int, slot: int, position: Any) -> Any:
        size = self.scheduler.block_size
        return self.tables[group, slot, position // size] * size + position % size

    def _check_table(self, slot: int, position: int, length: int) -> None:
        """What the queries from ``position`` on see has blocks, and what is out of every window has the dummy."""
        size = self.scheduler.block_size
        for group, window in enumerate(self.scheduler.windows):
            first = max(0, position - window + 1) // size if window else 0
            assert not self.tables[group, slot, :first].any(), "an entry out of the window has a block"
            assert self.tables[group, slot, first : -(-length // size)].all(), "an entry in the window has none"

    def _land(self, plan: StepPlan, sampled: np.ndarray[Any, Any]) -> None:
        if (pace := self.scheduler.pace) is not None:  # a token takes a millisecond
            sizes = plan.sizes
            pace.note(sizes.num_decodes, sizes.num_tokens, sizes.num_pairs, float(sizes.num_tokens))
        landed = self.scheduler.land(plan, sampled)
        self._check()
        self.num_wasted += landed.num_wasted
        for sequence, token in zip(landed.sequences.tolist(), landed.tokens.tolist(), strict=True):
            assert sequence.payload.finish is None, "a token came after the end"
            sequence.payload.tokens.append(token)
        for finish in landed.finished:
            finish.sequence.payload.finish = finish.reason


def make(**options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "num_blocks": 64, "block_size": 4, "num_groups": 1, "max_num_seqs": 8, "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }  # fmt: skip
    return Scheduler(**{**defaults, **options})
