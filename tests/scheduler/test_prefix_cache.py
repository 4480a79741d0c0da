"""The prefix cache: hits are exact and never early, blocks are shared and never written, and what is old goes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.blocks import BlockManager
from cbatch.scheduler.prefix_cache import Node, PrefixCache
from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import Driver, make, solo

PREFIX = list(range(10, 30))  # five blocks of four


def caching(depth: int = 2, **options: Any) -> Driver:
    return Driver(make(**{"prefix_caching": True, "max_num_batched_tokens": 64, **options}), depth)


def finish(driver: Driver, prompt: list[int], max_len: int, salt: bytes = b"") -> Sequence:
    """Run one request to its end, and compare it with itself alone."""
    sequence = driver.add(prompt, max_len, cache_salt=salt)
    driver.run()
    assert sequence.payload.tokens == solo(prompt, max_len, windows=driver.scheduler.windows, salt=salt)
    return sequence


def cached_depth(driver: Driver, token_ids: list[int], salt: bytes = b"") -> int:
    """How many blocks of a prompt a new request would hit."""
    cache = driver.scheduler.prefix_cache
    assert cache is not None
    return cache.resumable(cache.match(None, np.array([*token_ids, -1], np.int32), salt)).depth


# ---- what is hit


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_wholly_cached_prompt_computes_its_last_block_only(length: int) -> None:
    """A hit must leave a token to compute, for its logits; and that token's block is written, so it is not shared.

    A prompt of k whole blocks therefore hits k - 1 of them, one of k blocks and a bit hits k.
    """
    driver = caching()
    finish(driver, PREFIX[:length], length + 1)
    computed = driver.num_computed
    sequence = finish(driver, PREFIX[:length], length + 1)
    assert sequence.num_cached_tokens == (length - 1) // 4 * 4
    assert driver.num_computed - computed == length - sequence.num_cached_tokens


def test_hit_of_all_but_one_token_runs_as_one_row_of_one_token() -> None:
    driver = caching()
    finish(driver, PREFIX[:16], 17)
    driver.add([*PREFIX[:16], 5], 18)
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None
    assert (plan.sizes.num_tokens, plan.sizes.num_rows, plan.sizes.num_decodes) == (1, 1, 0)
    assert plan.sizes.num_samples == 1 and plan.sizes.max_context_len == 17
    assert plan.host.carry_slots[0] == -1 and plan.host.input_ids[0] == 5 and plan.host.positions[0] == 16


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    """The next turn of a conversation holds the answer of the one before; all but its last token was computed then."""
    driver = caching()
    first = finish(driver, PREFIX[:6], 19)
    turn = [*PREFIX[:6], *first.payload.tokens, 1, 2, 3]
    second = finish(driver, turn, 30)
    assert second.num_cached_tokens == 16  # 19 tokens, of which 18 were computed: four whole blocks


def test_tokens_behind_a_stop_are_in_no_prefix() -> None:
    """The stop is seen late: rows behind it were computed for nothing. Only tokens that have landed make a key."""
    answer = solo(PREFIX[:4], 40)
    stop = next(i for i in range(6, 20) if answer.index(answer[i]) == i)
    driver = caching(depth=4, block_size=1)
    driver.add(PREFIX[:4], 40, (answer[stop],))
    driver.run()
    assert driver.num_wasted == 3
    known = [*PREFIX[:4], *answer]
    assert cached_depth(driver, known) == 4 + stop  # up to the token before the stop


def test_salts_keep_prefixes_apart() -> None:
    """The driver's keys and values depend on the salt, so a hit across salts would change the tokens too."""
    driver = caching()
    for salt in (b"", b"a", b"b"):
        assert finish(driver, PREFIX, 24, salt).num_cached_tokens == 0
    for salt in (b"", b"a", b"b"):
        assert finish(driver, PREFIX, 24, salt).num_cached_tokens == 16


class Colliding(tuple):  # type: ignore[type-arg]
    """A key whose hash says nothing."""

    def __hash__(self) -> int:
        return 7


def test_prompts_whose_hashes_collide_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every key in one bucket of the dict, only the comparison of the tokens themselves tells prompts apart."""
    key = PrefixCache.key
    monkeypatch.setattr(PrefixCache, "key", staticmethod(lambda *arguments: Colliding(key(*arguments))))
    driver = caching()
    for first in range(5):
        prompt = [first, *PREFIX[1:]]
        assert finish(driver, prompt, 24).num_cached_tokens == 0
    assert finish(driver, PREFIX, 24).num_cached_tokens == 0
    for first in range(5):
        assert finish(driver, [first, *PREFIX[1:]], 24).num_cached_tokens == 16


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    """The keys and values of a block depend on all before it. Its own tokens do not name it."""
    driver = caching()
    finish(driver, [1, 1, 1, 1, *PREFIX], 26)
    assert finish(driver, [2, 2, 2, 2, *PREFIX], 26).num_cached_tokens == 0
    assert finish(driver, PREFIX, 22).num_cached_tokens == 0


def test_hit_rate_counts_each_sequence_once() -> None:
    """A resumed sequence hits what it computed itself: that is no sharing, and would make the rate look better."""
    driver = caching(num_blocks=12, max_num_seqs=3)
    sequences = [driver.add([i] * 9, 30) for i in range(3)]
    driver.run()
    s = driver.scheduler
    assert s.num_preemptions > 0 and any(sequence.num_cached_tokens for sequence in sequences)
    assert (s.num_asked_tokens, s.num_hit_tokens) == (27, 0)
    driver.add([2] * 9, 10)  # the last one to end
    driver.run()
    assert (s.num_asked_tokens, s.num_hit_tokens) == (36, 8)


# ---- when it is hit


def test_block_is_hit_from_the_step_after_the_one_that_computes_it() -> None:
    """Not before a step that computes it is planned, and not in that step, whose rows all run at once."""
    driver = caching(max_num_batched_tokens=8)
    s = driver.scheduler
    driver.add(PREFIX, 24)
    for step in range(1, 3):
        assert s.plan(driver._host_batch) is not None
        assert cached_depth(driver, PREFIX) == 2 * step
    follower = driver.add([*PREFIX, 1], 24)
    plan = s.plan(driver._host_batch)  # the last four tokens of the first, and room for four
    assert plan is not None and follower.status is Status.WAITING, "hit in the step that computes"
    assert s.plan(driver._host_batch) is not None
    assert follower.num_cached_tokens == 20


def test_prefill_that_is_aborted_leaves_its_whole_blocks_and_no_partial_one() -> None:
    driver = caching(max_num_batched_tokens=10)
    victim = driver.add(PREFIX, 24)
    driver.step()  # 10 tokens: two blocks and a half
    driver.scheduler.abort(victim)
    driver.scheduler.check()
    driver.run()
    assert cached_depth(driver, PREFIX) == 2
    assert driver.scheduler.blocks.num_cached == 2
    assert finish(driver, PREFIX, 24).num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("budget", [8, 64])
def test_prefix_that_comes_many_times_at_once_is_computed_once(depth: int, budget: int) -> None:
    """All ask before the first has computed anything. Those behind it wait for its blocks, and then hit them."""
    driver = caching(depth, max_num_batched_tokens=budget, num_blocks=128)
    tails = [[i, i + 1, i + 2] for i in range(6)]
    sequences = [driver.add([*PREFIX, *tail], 30) for tail in tails]
    driver.run()
    for sequence, tail in zip(sequences, tails, strict=True):
        assert sequence.payload.tokens == solo([*PREFIX, *tail], 30)
        assert sequence.num_cached_tokens == (0 if sequence is sequences[0] else 20)
    outputs = 6 * (30 - 23 - 1)
    assert driver.num_computed == 20 + 6 * 3 + outputs


def test_who_waits_for_a_prefix_lets_others_pass_but_keeps_its_room() -> None:
    """Slots: the first computes, the second waits for it, the third passes, the fourth would take the second's slot."""
    driver = caching(max_num_seqs=3, max_num_batched_tokens=64)
    first, second = driver.add(PREFIX, 30), driver.add([*PREFIX, 1], 30)
    third, fourth = driver.add([1, 2, 3], 30), driver.add([4, 5, 6], 30)
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.admitted == [first, third]
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.admitted == [second]
    assert second.num_cached_tokens == 20 and fourth.status is Status.WAITING


def test_who_waits_for_a_prefix_keeps_its_blocks() -> None:
    """Of 15 blocks the first takes 5, the second 7 when it starts. The third would need 4, and there are 3 beside."""
    driver = caching(num_blocks=16)
    first, second = driver.add(PREFIX, 21), driver.add([*PREFIX, *range(8)], 29)
    third = driver.add([90] * 16, 17)
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.admitted == [first]
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None and plan.admitted == [second, third], "with the prefix shared there is room for all"


def test_blocks_of_a_prefix_that_others_hold_cost_nothing() -> None:
    """Ten prompts of six blocks in a pool of 16: they share five of them, so all run at once."""
    driver = caching(num_blocks=17, max_num_seqs=16)
    first = driver.add([*PREFIX, 0], 24)
    driver.step()
    others = [driver.add([*PREFIX, i], 24) for i in range(1, 10)]
    driver.step()
    assert all(sequence.status is Status.RUNNING for sequence in [first, *others])
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_prefix_whose_prefill_is_aborted_is_waited_for_no_longer() -> None:
    driver = caching(max_num_batched_tokens=8)
    first, second = driver.add(PREFIX, 24), driver.add(PREFIX, 24)
    driver.step()
    driver.scheduler.abort(first)
    driver.step()
    assert second.status is Status.RUNNING and second.num_cached_tokens == 8
    driver.run()
    assert second.payload.tokens == solo(PREFIX, 24)


def test_nobody_waits_for_a_prefix_that_ranks_behind() -> None:
    """Else an important request could hang behind one that gets no budget. It computes its own copy."""
    driver = caching(policy="priority", max_num_batched_tokens=8)
    low = driver.add(PREFIX, 24, priority=1)
    driver.step()
    high = driver.add(PREFIX, 24, priority=0)
    driver.step()
    assert high.status is Status.RUNNING and high.num_cached_tokens == 8
    driver.run()
    assert low.payload.tokens == high.payload.tokens == solo(PREFIX, 24)


# ---- who holds what


def test_sequences_share_blocks_and_the_last_one_leaves_them_cached() -> None:
    driver = caching(num_blocks=128)
    first = driver.add(PREFIX, 40)
    driver.step()
    others = [driver.add([*PREFIX, i], 40) for i in range(3)]
    driver.step()
    s = driver.scheduler
    blocks = s.block_tables.tables[0, first.slot, :5].copy()
    assert (s.blocks.ref_counts[blocks] == 4).all()
    assert all((s.block_tables.tables[0, other.slot, :5] == blocks).all() for other in others)
    for sequence in [first, *others]:
        assert (s.blocks.ref_counts[blocks] > 0).all()
        s.abort(sequence)
    assert set(blocks.tolist()) <= set(s.blocks.cached_blocks())
    driver.run()


def test_two_that_compute_the_same_end_with_one_copy() -> None:
    """A wholly cached prompt computes its last block anew. Its copy goes back as soon as the step is planned.

    So the blocks that follow hang on a prefix that its holders hold, whoever computed it.
    """
    driver = caching(num_blocks=128)
    twins = [driver.add(PREFIX[:16], 40) for _ in range(3)]
    for _ in range(12):
        driver.step()
    s = driver.scheduler
    tables = s.block_tables.tables[0, [twin.slot for twin in twins]]
    complete = min(int(s.slot_tables.num_landed[twin.slot]) - 1 for twin in twins) // 4
    assert complete > 4
    assert (tables[:, :complete] == tables[0, :complete]).all()
    driver.run()
    assert all(twin.payload.tokens == solo(PREFIX[:16], 40) for twin in twins)


def test_preempted_sequence_resumes_from_what_the_cache_still_holds() -> None:
    """Two grow until the pool is full. The younger one goes, and computes only what was taken of it meanwhile."""
    driver = caching(num_blocks=17, max_num_seqs=2)
    old, young = driver.add([1] * 8, 36), driver.add([2] * 8, 36)
    while not young.num_preemptions:
        driver.step()
    known = len(young.token_ids)
    assert cached_depth(driver, young.token_ids.tolist()) > 0
    while young.status is Status.WAITING:
        driver.step()
    assert 0 < young.num_cached_tokens < known
    driver.run()
    assert old.payload.tokens == solo([1] * 8, 36) and young.payload.tokens == solo([2] * 8, 36)


# ---- what goes first


def test_prefix_held_longest_ago_goes_first_and_the_deepest_block_of_it() -> None:
    """Three prompts of two blocks in a pool of six. A new one needs three: the oldest goes, then a leaf of the next."""
    driver = caching(num_blocks=7)
    a, b, c = ([i] * 8 for i in (1, 2, 3))
    for prompt in (a, b, c):
        finish(driver, prompt, 9)
    finish(driver, [*a, 9], 10)  # uses all of a, so b is the oldest now; its third block is blank again
    assert [cached_depth(driver, prompt) for prompt in (a, b, c)] == [2, 1, 2]
    finish(driver, [7] * 11, 12)
    assert [cached_depth(driver, prompt) for prompt in (a, b, c)] == [2, 0, 1]


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    driver = caching(num_blocks=9)
    finish(driver, PREFIX[:16], 17)
    finish(driver, [1] * 15, 16)
    assert cached_depth(driver, PREFIX[:16]) == 4


def test_reset_forgets_everything_and_running_sequences_publish_no_more() -> None:
    """After new weights, old keys and values must be hit by nobody, and neither what is computed on top of them."""
    driver = caching(num_blocks=128)
    finish(driver, PREFIX, 24)
    running = driver.add([*PREFIX, 1], 40)
    for _ in range(4):
        driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.check()
    late = driver.add(PREFIX, 24)
    driver.step()
    assert late.num_cached_tokens == 0
    driver.run()
    assert running.payload.tokens == solo([*PREFIX, 1], 40)
    cache = driver.scheduler.prefix_cache
    assert cache is not None and len(cache) == 5, "only the late one's blocks are there"


def test_empty_salts_and_prefixes_leave_nothing_behind() -> None:
    """A million salts, each used once, must not grow a table of roots."""
    driver = caching(num_blocks=8)
    for i in range(30):
        finish(driver, PREFIX[:9], 10, salt=b"%d" % i)
    cache = driver.scheduler.prefix_cache
    assert cache is not None and len(cache) <= 7


# ---- long prefixes


def test_long_hit_overflows_the_bucket_and_the_slab_carries_it() -> None:
    """A hit of 15 blocks is one row of one token: its bucket has room for one change of the block tables."""
    driver = caching()
    prompt = [*range(60), 1]
    finish(driver, prompt, 62)
    driver.num_steps = 1  # the driver gives every other step a bucket without padding
    driver.add(prompt, 62)
    plan = driver.scheduler.plan(driver._host_batch)
    assert plan is not None
    assert plan.sizes.num_table_updates == 1 and plan.sizes.num_overflow == 15
    driver.in_flight.append((plan, driver._compute(plan)))
    driver.run()


def test_one_step_starts_no_more_cached_blocks_than_its_slab_carries() -> None:
    """Four hits of 15 columns, and a slab with room for 16: they start in four steps."""
    driver = caching(num_blocks=128)
    driver.scheduler.max_shared_columns = 16
    prompt = [*range(60), 1]
    finish(driver, prompt, 62)
    sequences = [driver.add(prompt, 63) for _ in range(4)]
    for count in range(1, 5):
        driver.step()
        assert sum(sequence.status is not Status.WAITING for sequence in sequences) == count
    driver.run()


def test_a_hit_before_a_fork_starts_no_more_columns_than_the_slab_carries() -> None:
    """A hit that goes before a fork was the first to start, and was not counted together with it: the slab had no room
    for both, and the engine ended."""
    driver = caching(num_blocks=128)
    driver.scheduler.max_shared_columns = 16
    prompt = [*range(56), 1]
    parent, other = (driver.add(prompt, 64) for _ in range(2))
    while not (parent.payload.tokens and other.payload.tokens):  # type: ignore[attr-defined]
        driver.step()
    driver.scheduler._preempt(other)
    child = driver.fork(parent, prompt, 63)
    assert driver.has_forked
    driver.step()
    assert child.status is not Status.WAITING and other.status is Status.WAITING
    driver.run()
    assert other.payload.tokens == solo(prompt, 64)  # type: ignore[attr-defined]
    assert child.payload.tokens == solo(prompt, 63)  # type: ignore[attr-defined]


def test_fifty_thousand_that_wait_for_one_prefix_are_not_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(prefix_caching=True, max_num_seqs=256, num_blocks=4096, max_num_batched_tokens=256)
    driver = Driver(scheduler, check=False)
    for i in range(50_000):
        driver.add([*PREFIX, i % 50, i // 50 % 50], 24)
    looks = 0
    match = PrefixCache.match

    def count(self: PrefixCache, node: Node | None, token_ids: Any, salt: bytes) -> Node:
        nonlocal looks
        looks += 1
        return match(self, node, token_ids, salt)

    monkeypatch.setattr(PrefixCache, "match", count)
    driver.step()
    assert scheduler.num_running == 1 and looks <= 65
    for _ in range(5):
        driver.step()
    assert looks < 1000


# ---- the trie by itself


def test_what_was_matched_before_is_not_looked_up_again() -> None:
    """A sequence at the head of the queue asks in every step; a prompt of 100,000 tokens has thousands of blocks."""
    blocks = BlockManager(64, 4)
    cache = PrefixCache(blocks, (0,))
    tokens = np.arange(41, dtype=np.int32)
    node = cache.root
    held = blocks.allocate(10)
    for i, block in enumerate(held.tolist()):
        node = cache.publish(node, tokens[4 * i : 4 * i + 4].tobytes(), b"", [block])
    lookups: list[int] = []
    key = cache.key
    cache.key = lambda parent, *rest: lookups.append(parent.depth) or key(parent, *rest)  # type: ignore[method-assign, func-returns-value, assignment]
    matched = cache.match(None, tokens, b"")
    assert matched is node and lookups == list(range(10))
    lookups.clear()
    assert cache.match(matched, tokens, b"") is node and not lookups
    cache.leave(node)
    blocks.release(held[::-1])
    blocks.allocate(63 - 10 + 3)  # three of the cached go, the deepest first
    assert cache.match(matched, tokens, b"").depth == 7 and lookups == [7]


def test_blocks_out_of_a_window_limit_where_computing_resumes() -> None:
    """Window 6, blocks of 4: the first query behind d blocks, at 4d, sees positions from 4d - 5 on."""
    blocks = BlockManager(64, 4)
    cache = PrefixCache(blocks, (0, 6))
    node, path = cache.root, []
    for i in range(6):
        full, windowed = blocks.allocate(2).tolist()
        node = cache.publish(node, bytes([i]), b"", [full, windowed])
        path.append((node, windowed))
    assert cache.resumable(node) is node
    # Behind 6 blocks columns 4 and 5 are seen, behind 5 columns 3 and 4, and so on down; behind 3 columns 1 and 2.
    for lost, depth in ((0, 6), (3, 6), (4, 3), (2, 0)):
        cache._forget(path[lost][1])
        assert cache.resumable(node).depth == depth, f"column {lost} is lost"


def test_who_skips_the_cache_computes_every_token_and_leaves_it_for_others() -> None:
    """Log-probabilities of a prompt are made where its tokens are computed: none of them may come out of the cache.

    Nor does it wait for a prefix that someone before it is about to compute.
    """
    driver = caching()
    finish(driver, PREFIX[:16], 18)
    computed = driver.num_computed
    driver.add(PREFIX[:16], 18, skip_reading_prefix_cache=True)
    driver.run()
    assert driver.num_computed - computed == 17
    driver.scheduler.reset_prefix_cache()
    first = driver.add(PREFIX, 22)
    second = driver.add(PREFIX, 22, skip_reading_prefix_cache=True)
    third = driver.add(PREFIX, 22)
    driver.step()
    assert (first.slot >= 0, second.slot >= 0, third.slot >= 0) == (True, True, False)
    driver.run()
    assert first.payload.tokens == second.payload.tokens == third.payload.tokens == solo(PREFIX, 22)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 16)
