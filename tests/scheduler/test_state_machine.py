"""Random submissions, steps, aborts and tiny pools: blocks and slots add up, everything ends, nothing starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import Driver, make, solo

MAX_LEN = 24


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver: Driver | None = None
        self.requests: list[tuple[Sequence, list[int], int, tuple[int, ...]]] = []
        self.aborted: set[int] = set()

    @initialize(
        depth=st.integers(1, 4),
        block_size=st.sampled_from([1, 3, 4]),
        num_groups=st.integers(1, 2),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 8),
        spare_blocks=st.integers(0, 6),
    )
    def start(
        self, depth: int, block_size: int, num_groups: int, max_num_seqs: int, extra_tokens: int, spare_blocks: int
    ) -> None:
        smallest = num_groups * -(-(MAX_LEN - 1) // block_size)  # one sequence of full length
        scheduler = make(
            num_blocks=1 + smallest + spare_blocks,
            block_size=block_size,
            num_groups=num_groups,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=MAX_LEN,
        )
        self.driver = Driver(scheduler, depth)

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=MAX_LEN - 1),
        room=st.integers(1, MAX_LEN),
        stop=st.lists(st.integers(0, 96), max_size=6, unique=True),
    )
    def submit(self, prompt: list[int], room: int, stop: list[int]) -> None:
        max_len = min(len(prompt) + room, MAX_LEN)
        self.requests.append((self.driver.add(prompt, max_len, tuple(stop)), prompt, max_len, tuple(stop)))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        sequence = self.requests[index][0]
        if sequence.status is not Status.FINISHED:
            self.aborted.add(index)
        self.driver.scheduler.abort(sequence)

    @invariant()
    def adds_up(self) -> None:
        if self.driver is not None:
            self.driver.scheduler.check()

    def teardown(self) -> None:
        if self.driver is None:
            return
        # Each step lands or computes at least one token of the oldest, whatever the pool.
        self.driver.run(limit=200 + 3 * MAX_LEN * (len(self.requests) + 1) * 2)
        for index, (sequence, prompt, max_len, stop) in enumerate(self.requests):
            expected = solo(prompt, max_len, stop)
            if index in self.aborted:
                assert sequence.payload.tokens == expected[: len(sequence.payload.tokens)]
                assert sequence.payload.finish is None
            else:
                assert sequence.payload.tokens == expected
        blocks = self.driver.scheduler.blocks
        assert blocks.num_free == blocks.num_usable


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
