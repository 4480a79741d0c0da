"""Host cost of a pure-decode step: planning batch N+1 and landing batch N, at 32 to 1,024 running requests.

    python -m pytest benchmarks/host_cost.py --benchmark-columns=median,iqr,max [--benchmark-json FILE]

No device takes part: what is timed is all that the engine's loop does between two waits, but the launch itself. The
waiting queue must not matter, so every size is timed with nobody and with 50,000 requests waiting. With the prefix
cache on, the pool is full of cached prefixes: every block that completes is published, and every new one is taken from
the cache. A window of 1,024 tokens makes two tables of every three keep to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from cbatch.scheduler.plan import Bucket, HostBatch, StepPlan, StepShape
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence

PROMPT, BLOCK = 100, 64


def host_batches(scheduler: Scheduler) -> Any:
    """What hands out views of one slab, as the engine's buffers do."""
    shape = StepShape(scheduler.num_groups, BLOCK, 5)
    slab = np.zeros(1 << 20, np.int32)
    batches: dict[Bucket, HostBatch] = {}

    def host_batch(num_tokens: int, num_rows: int) -> HostBatch:
        bucket = Bucket(num_tokens, num_rows)
        if bucket not in batches:
            batches[bucket] = HostBatch(slab, shape, bucket)
        return batches[bucket]

    return host_batch


def decoding(num_running: int, num_waiting: int, **options: Any) -> tuple[Any, Scheduler]:
    """A function that plans one step and lands the one before, and its scheduler with all prompts computed."""
    max_len, num_groups = 100_000, len(options.get("windows", (0,)))  # nobody finishes
    scheduler = Scheduler(
        num_blocks=num_running * num_groups * 48 + 2,
        block_size=BLOCK,
        num_groups=num_groups,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_model_len=max_len,
        **options,
    )
    host_batch = host_batches(scheduler)
    rng = np.random.default_rng(0)

    def add(length: int, max_tokens: int) -> None:
        prompt = rng.integers(0, 100_000, length).astype(np.int32)
        sequence = Sequence(prompt, length + max_tokens, stop_token_ids=frozenset([2]))
        sequence.param_values = np.zeros(5, np.int32)
        scheduler.add(sequence)

    sampled = np.full(num_running, 5, np.int32)
    in_flight: deque[StepPlan] = deque()

    def step() -> None:
        plan = scheduler.plan(host_batch)
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) == 2:
            landing = in_flight.popleft()
            scheduler.land(landing, sampled[: landing.sizes.num_samples])

    while scheduler.prefix_cache is not None and scheduler.blocks.num_cached < scheduler.blocks.num_usable - 128:
        add(128 * BLOCK - 1, 1)
        while scheduler.has_work:
            step()
    for i in range(num_running + num_waiting):  # prompts of many lengths, so that new blocks are spread over the steps
        add(PROMPT + int(rng.integers(0, 64)) if i < num_running else PROMPT, 2_900)
    while scheduler.num_running < num_running or scheduler._prefilling:
        step()
    return step, scheduler


@pytest.mark.parametrize("num_waiting", [0, 50_000])
@pytest.mark.parametrize("num_running", [32, 256, 512, 1024])
def test_plan_and_land(benchmark: Any, num_running: int, num_waiting: int) -> None:
    step, scheduler = decoding(num_running, num_waiting)
    benchmark.pedantic(step, rounds=2000, warmup_rounds=100)
    assert scheduler.num_running == num_running and scheduler.num_waiting == num_waiting
    benchmark.extra_info["us_per_step_median"] = benchmark.stats.stats.median * 1e6


@pytest.mark.parametrize("num_running", [32, 256, 512, 1024])
def test_plan_and_land_with_prefix_cache(benchmark: Any, num_running: int) -> None:
    step, scheduler = decoding(num_running, 50_000, prefix_caching=True)
    benchmark.pedantic(step, rounds=2000, warmup_rounds=100)
    assert scheduler.num_running == num_running
    benchmark.extra_info["us_per_step_median"] = benchmark.stats.stats.median * 1e6


@pytest.mark.parametrize("num_running", [32, 256, 512, 1024])
def test_plan_and_land_with_windows(benchmark: Any, num_running: int) -> None:
    step, scheduler = decoding(num_running, 50_000, prefix_caching=True, windows=(1024, 1024, 0))
    benchmark.pedantic(step, rounds=2000, warmup_rounds=100)
    assert scheduler.num_running == num_running
    benchmark.extra_info["us_per_step_median"] = benchmark.stats.stats.median * 1e6
