"""A scheduler of random shape under random traffic, and what must come out. For the state machine and the soak."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.scheduler.pace import Pace
from cbatch.scheduler.sequence import Sequence, Status
from tests.scheduler.driver import VOCAB, Driver, make, solo

MAX_LEN = 24
# What prompts begin with, so that many share a prefix: two that differ from the start, and one that leaves the first
# in its middle.
STREAMS = (
    [7] * MAX_LEN,
    [(3 * i) % VOCAB for i in range(MAX_LEN)],
    [7] * 9 + [(5 * i) % VOCAB for i in range(MAX_LEN)],
)
# Windows of the groups of layers: all of the context, hybrids, windows alone; shorter than a block and longer.
WINDOWS = ((0,), (0, 0), (6, 0), (3, 0, 8), (5,), (2, 9))
POLICIES = ("fcfs", "priority", "longest_prefix")


@dataclass
class Request:
    sequence: Sequence
    prompt: list[int]
    max_len: int
    stop: tuple[int, ...]
    is_aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.sequence.payload.tokens  # type: ignore[attr-defined]
        return tokens


@dataclass
class World:
    """What may happen to a scheduler. Every step is checked by ``Driver``; ``finish`` checks the rest."""

    depth: int = 2
    block_size: int = 4
    windows: tuple[int, ...] = (0,)
    max_num_seqs: int = 4
    extra_tokens: int = 4  # of a step, beyond one for each sequence
    spare_blocks: int = 4  # of the pool, beyond one sequence of full length
    policy: str = "fcfs"
    prefix_caching: bool = True
    target_ms: float | None = None  # of a step, where a token takes 1
    num_host_blocks: int = 0
    ms_per_block: float = 0.0  # of a copy, where a token takes 1
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = {
            "block_size": self.block_size,
            "num_groups": len(self.windows),
            "windows": self.windows,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_seqs + self.extra_tokens,
            "max_model_len": MAX_LEN,
            "policy": self.policy,
            "prefix_caching": self.prefix_caching or self.policy == "longest_prefix",
            "num_host_blocks": self.num_host_blocks,
        }
        smallest = make(**options).blocks_for(MAX_LEN - 1)
        self.driver = Driver(make(**options, num_blocks=1 + smallest + self.spare_blocks), self.depth)
        self.scheduler = self.driver.scheduler
        if self.scheduler.swap is not None:
            self.scheduler.swap.ms_per_block, self.scheduler.swap.ms_per_token = self.ms_per_block, 1.0
        if self.target_ms is not None:
            self.scheduler.pace = Pace(self.target_ms)

    def submit(
        self,
        prompt: list[int],
        room: int,
        stop: tuple[int, ...] = (),
        priority: int = 0,
        salt: bytes = b"",
        skip: bool = False,
    ) -> None:
        prompt = prompt[: MAX_LEN - 1]
        max_len = min(len(prompt) + room, MAX_LEN)
        options = {"priority": priority, "cache_salt": salt, "skip_reading_prefix_cache": skip}
        sequence = self.driver.add(prompt, max_len, stop, **options)
        self.requests.append(Request(sequence, prompt, max_len, stop))

    def follow_up(self, index: int, new: list[int], room: int) -> None:
        """A next turn: the prompt and what has come out so far, and something new behind it."""
        request = self.requests[index]
        self.submit([*request.prompt, *request.tokens, *new], room, salt=request.sequence.cache_salt)

    def fork(self, index: int, keep: int, new: list[int], room: int) -> None:
        """A branch: some of what a running request has computed so far, and something new behind it."""
        request = self.requests[index]
        sequence = request.sequence
        if sequence.slot < 0:
            return
        prompt = [*request.prompt, *request.tokens][:keep] + new
        prompt = prompt[: MAX_LEN - 1]
        max_len = min(len(prompt) + room, MAX_LEN)
        child = self.driver.fork(sequence, prompt, max_len, priority=sequence.priority)
        self.requests.append(Request(child, prompt, max_len, ()))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def abort(self, index: int) -> None:
        request = self.requests[index]
        request.is_aborted |= request.sequence.status is not Status.FINISHED
        self.scheduler.abort(request.sequence)
        self.scheduler.check()

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.scheduler.check()
        assert self.scheduler.blocks.num_cached == 0

    def finish(self) -> None:
        """Let everything end: each got the tokens that it gets alone, nothing is lost, and nothing is kept."""
        # Every step lands or computes at least one token of the first in rank, whatever the pool.
        self.driver.run(limit=200 + 6 * MAX_LEN * (len(self.requests) + 1))
        for request in self.requests:
            sequence = request.sequence
            expected = solo(request.prompt, request.max_len, request.stop, self.scheduler.windows, sequence.cache_salt)
            if request.is_aborted:
                assert request.tokens == expected[: len(request.tokens)]
                assert sequence.payload.finish is None  # type: ignore[attr-defined]
            else:
                assert request.tokens == expected
            assert not sequence.skip_reading_prefix_cache or not sequence.num_cached_tokens
        self.scheduler.check()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_usable
        assert self.scheduler.swap is None or self.scheduler.swap.num_free == self.num_host_blocks
        self.reset()
        if self.scheduler.prefix_cache is not None:
            assert not len(self.scheduler.prefix_cache) and not self.scheduler.prefix_cache.root.links
        self.requests.clear()
