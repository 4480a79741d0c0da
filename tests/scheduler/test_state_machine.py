"""Random traffic on schedulers of random shape: everything adds up after every step, ends, and is exact."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduler.soak import soak
from tests.scheduler.world import MAX_LEN, POLICIES, STREAMS, WINDOWS, World

TOKENS = st.integers(0, 96)


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        depth=st.integers(1, 4),
        block_size=st.sampled_from([1, 3, 4]),
        windows=st.sampled_from(WINDOWS),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        spare_blocks=st.integers(0, 20),
        policy=st.sampled_from(POLICIES),
        prefix_caching=st.booleans(),
        target_ms=st.sampled_from([None, None, 3.0, 9.0]),
        num_host_blocks=st.sampled_from([0, 3, 10, 60]),
        ms_per_block=st.sampled_from([0.0, 0.0, 2.0]),
    )
    def start(self, **options: object) -> None:
        self.world = World(**options)  # type: ignore[arg-type]

    @rule(
        stream=st.sampled_from(STREAMS),
        length=st.integers(0, MAX_LEN),
        tail=st.lists(TOKENS, min_size=1, max_size=6),
        room=st.integers(1, MAX_LEN),
        stop=st.lists(TOKENS, max_size=6, unique=True),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([b"", b"", b"a"]),
        skip=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        stream: list[int],
        length: int,
        tail: list[int],
        room: int,
        stop: list[int],
        priority: int,
        salt: bytes,
        skip: bool,
    ) -> None:
        self.world.submit(stream[:length] + tail, room, tuple(stop), priority, salt, skip)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), tail=st.lists(TOKENS, max_size=3), room=st.integers(1, MAX_LEN))
    def follow_up(self, data: st.DataObject, tail: list[int], room: int) -> None:
        self.world.follow_up(data.draw(st.integers(0, len(self.world.requests) - 1)), tail, room)

    @precondition(lambda self: self.world.requests)
    @rule(
        data=st.data(),
        keep=st.integers(1, MAX_LEN),
        tail=st.lists(TOKENS, min_size=1, max_size=3),
        room=st.integers(1, MAX_LEN),
    )
    def fork(self, data: st.DataObject, keep: int, tail: list[int], room: int) -> None:
        self.world.fork(data.draw(st.integers(0, len(self.world.requests) - 1)), keep, tail, room)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.integers(0, len(self.world.requests) - 1)))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        self.world.steps(count)

    @rule(sure=st.integers(0, 9))
    def reset(self, sure: int) -> None:
        if not sure:
            self.world.reset()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_soak() -> None:
    """The same world without a search for small examples, which makes many more steps (tests/scheduler/soak.py)."""
    soak(num_steps=20_000, seed=1)
