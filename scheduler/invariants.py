"""What must hold between any two calls of a scheduler. For tests and debugging: walks everything, and asserts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from cbatch.scheduler.blocks import DUMMY_BLOCK
from cbatch.scheduler.prefix_cache import Node, PrefixCache
from cbatch.scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    from cbatch.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert that slots, blocks, references and prefixes add up."""
    running = np.flatnonzero(scheduler.slot_tables.epoch).tolist()
    _check_slots(scheduler, running)
    _check_queue(scheduler)
    _check_blocks(scheduler, running)
    if scheduler.prefix_cache is not None:
        _check_prefixes(scheduler, scheduler.prefix_cache, running)


def _check_slots(scheduler: Scheduler, running: list[int]) -> None:
    t, tables, size = scheduler.slot_tables, scheduler.block_tables, scheduler.block_size
    assert sorted([*scheduler._free_slots, *running]) == list(range(t.max_num_seqs)), "slots do not add up"
    assert t.epoch[t.dummy_slot] == 0 and not t.decoding[t.dummy_slot], "the dummy slot runs"
    assert len(set(t.epoch[running].tolist())) == len(running), "two slots share an epoch"
    prefilling = []
    for slot in running:
        sequence: Sequence = t.sequences[slot]
        assert sequence.slot == slot and sequence.epoch == t.epoch[slot] and sequence.status is Status.RUNNING
        assert t.rank[slot] == sequence.rank
        computed, total = int(t.num_computed[slot]), int(t.num_tokens[slot])
        assert computed <= tables.num_columns[slot] * size, "a token was computed without a block"
        assert t.num_landed[slot] <= total < t.max_len[slot] or not t.decoding[slot]
        if t.decoding[slot]:
            assert computed == total - 1, "a decoding sequence lags"
        elif sequence in scheduler._paused:
            assert sequence.pauses and computed == total - 1, "a sequence pauses with tokens to compute"
        else:
            assert computed < total, "a prefill has nothing left"
            prefilling.append(sequence)
        held = tables.tables[:, slot] != DUMMY_BLOCK
        assert not tables.windows or tables.drop_at[slot] > computed, "a block outside the window is not noticed"
        for group, window in enumerate(scheduler.windows):
            first = max(0, computed - window + 1) // size if window else 0
            assert held[group, first : tables.num_columns[slot]].all(), "a block inside the window is missing"
            assert held[group].sum() == tables.num_columns[slot] - first, "a block outside the window is held"
    stops = (t.stop_ids >= 0).sum(axis=0)
    assert t.num_stop_columns == stops.max() and not stops[scheduler._free_slots].any(), "stop tokens do not add up"
    assert not t.decoding[scheduler._free_slots].any(), "a free slot decodes"
    free = [*scheduler._free_slots, t.dummy_slot]
    assert not tables.tables[:, free].any() and not tables.first_columns[:, free].any(), "a free slot holds blocks"
    assert scheduler._prefilling == sorted(prefilling, key=lambda s: s.rank), "prefills out of order"
    assert scheduler._not_yet_run <= set(prefilling), "a sequence that has run, or ended, counts as one that has not"
    assert all(sequence.slot in running for sequence in scheduler._paused), "a sequence pauses that does not run"


def _check_queue(scheduler: Scheduler) -> None:
    entries = scheduler._waiting.entries()
    waiting = [sequence for sequence in entries if sequence.status is Status.WAITING]
    assert len(waiting) == scheduler.num_waiting, "the queue is miscounted"
    assert 2 * (len(entries) - len(waiting)) <= len(entries) + 64, "the queue is full of tombstones"
    if scheduler.swap is not None:
        scheduler.swap.check(waiting)
    assert all(s.slot == -1 and s.epoch == 0 and s.pending is None for s in waiting)


def _check_blocks(scheduler: Scheduler, running: list[int]) -> None:
    blocks, tables = scheduler.blocks, scheduler.block_tables
    held = tables.tables[:, running].ravel()
    counts = np.bincount(held[held != DUMMY_BLOCK], minlength=blocks.num_blocks)
    np.add.at(counts, tables.copied_blocks(), 1)
    every = np.concatenate([blocks.blank_blocks(), blocks.cached_blocks(), np.flatnonzero(counts)])
    assert np.array_equal(np.sort(every), np.arange(1, blocks.num_blocks)), "a block is lost or doubled"
    assert np.array_equal(counts, blocks.ref_counts), "references do not add up"
    assert not blocks.published[blocks.blank_blocks()].any(), "a blank block is published"
    assert blocks.published[blocks.cached_blocks()].all(), "a cached block is not published"
    np.subtract.at(counts, tables.copied_blocks(), 1)
    for slot in running:
        own = tables.tables[:, slot, int(scheduler.slot_tables.num_computed[slot]) // scheduler.block_size :]
        assert (counts[own[own != DUMMY_BLOCK]] == 1).all(), "a block that is still written is shared"


def _check_prefixes(scheduler: Scheduler, cache: PrefixCache, running: list[int]) -> None:
    t, tables, blocks, size = scheduler.slot_tables, scheduler.block_tables, scheduler.blocks, scheduler.block_size
    nodes = cache.nodes()
    links = Counter(node.parent for node in nodes)
    owned = {}
    for node in nodes:
        assert node.parent is not None and node.parent.key is not None, "a node outlives its parent"
        assert cache.is_there(node), "a node is not found by its key"
        for group, block in enumerate(node.blocks):
            assert block or scheduler.windows[group], "a node lacks a block that it needs"
            if block:
                assert block not in owned, "two nodes have the same block"
                owned[block] = node
    assert cache.owners() == owned, "a block does not know its node"
    assert blocks.published.nonzero()[0].tolist() == sorted(owned), "a block is published, but in no node"

    pending = set()
    for slot in running:
        sequence: Sequence = t.sequences[slot]
        if sequence.node is None:  # the cache was reset while it ran
            continue
        links[sequence.node] += 1
        path = cache.path(sequence.node)
        for column, node in enumerate(path):
            assert node.key is not None
            assert node.key[1] == t.tokens_by_block[slot, column].tobytes(), "another's prefix"
            for group, block in enumerate(tables.tables[:, slot, column].tolist()):
                assert block in (DUMMY_BLOCK, node.blocks[group]), "a sequence does not hold the prefix that it is at"
        if path:
            assert path[0].key is not None and path[0].key[0] == sequence.cache_salt, "a prefix of another salt"
        own = tables.tables[:, slot, int(t.num_computed[slot]) // size :]
        assert not blocks.published[own].any(), "a block that is still written is published"
        computed, landed = int(t.num_computed[slot]), int(t.num_landed[slot])
        complete = landed - 1 if t.decoding[slot] else computed
        assert complete // size <= len(path) or sequence in scheduler._not_yet_run, "a complete block is not published"
        assert len(path) * size <= min(computed, landed), "a block is published before it is computed"
        if sequence.pending is not None:
            pending.add(sequence.pending)
    for node in [*nodes, cache.root]:
        assert node.links == links[node], "the links of a node do not add up"
        assert node is cache.root or node.links or any(node.blocks), "a node is there for nothing"
    assert cache.pending() <= pending, "nobody computes what others wait for"

    seen: set[Node | None] = set()  # a cached prefix goes before its parent, where all of the context is attended to
    for block in blocks.cached_blocks():
        node = owned[block]
        if not scheduler.windows[node.blocks.index(block)]:
            assert node.parent not in seen or node in seen, "a prefix would go before a longer one"
            seen.add(node)
