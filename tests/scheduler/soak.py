"""Random traffic for as long as wanted:

    python -m tests.scheduler.soak --steps 1000000 [--seed 1]

Prints the seed of every world before it runs; a failing one alone: --steps 1 --seed SEED.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from tests.scheduler.world import MAX_LEN, POLICIES, STREAMS, WINDOWS, World


def live(seed: int) -> World:
    """One world from its start to its end; it has made a few hundred steps then."""
    rng = random.Random(seed)
    world = World(
        depth=rng.randint(1, 4),
        block_size=rng.choice((1, 3, 4)),
        windows=rng.choice(WINDOWS),
        max_num_seqs=rng.randint(1, 6),
        extra_tokens=rng.choice((0, 2, 5, 12)),
        spare_blocks=rng.choice((0, 2, 5, 10, 40)),
        policy=rng.choice(POLICIES),
        prefix_caching=rng.random() < 0.8,
        target_ms=rng.choice((None, None, 3.0, 9.0)),
        num_host_blocks=rng.choice((0, 3, 10, 60)),
        ms_per_block=rng.choice((0.0, 0.0, 2.0)),
    )
    forks = rng.choice((0, 0, 0.2, 0.7))  # probability of one more in a step
    load = rng.choice((0.2, 0.5, 1.0, 3.0))  # requests a step
    for _ in range(rng.choice((30, 100))):
        for _ in range(int(load) + (rng.random() < load % 1)):
            stop = tuple(rng.sample(range(97), rng.choice((0, 0, 1, 6))))
            if world.requests and rng.random() < 0.2:
                tail = rng.choices(range(97), k=rng.randint(0, 3))
                world.follow_up(rng.randrange(len(world.requests)), tail, rng.randint(1, 12))
            else:
                prompt = rng.choice(STREAMS)[: rng.randint(0, MAX_LEN)]
                prompt = prompt + rng.choices(range(97), k=rng.randint(not prompt, 4))
                salt = rng.choice((b"", b"", b"a"))
                skip = rng.random() < 0.1
                world.submit(prompt, rng.randint(1, MAX_LEN), stop, rng.randint(-1, 1), salt, skip)
        while world.requests and rng.random() < forks:
            recent = range(max(0, len(world.requests) - 6), len(world.requests))
            world.fork(rng.choice(recent), rng.randint(1, MAX_LEN), rng.choices(range(97), k=rng.randint(1, 2)), 9)
        if world.requests and rng.random() < 0.1:
            world.abort(rng.randrange(len(world.requests)))
        if rng.random() < 0.01:
            world.reset()
        world.steps(1)
    if rng.random() < 0.3:  # all at once, wherever they are
        for index in range(len(world.requests)):
            world.abort(index)
    world.finish()
    return world


def soak(num_steps: int, seed: int, verbose: bool = False) -> Counter[str]:
    """Worlds one after the other until they have made so many steps; what happened in them."""
    totals: Counter[str] = Counter()
    begin = time.monotonic()
    while totals["steps"] < num_steps:
        try:
            world = live(seed)
        except BaseException:
            print(f"world {seed} failed: python -m tests.scheduler.soak --steps 1 --seed {seed}", flush=True)
            raise
        totals["worlds"] += 1
        totals["steps"] += world.driver.num_steps
        totals["preemptions"] += world.scheduler.num_preemptions
        if world.scheduler.swap is not None:
            totals["blocks out"] += world.scheduler.swap.num_blocks_out
            totals["blocks in"] += world.scheduler.swap.num_blocks_in
        totals["hit tokens"] += world.scheduler.num_hit_tokens
        totals["asked tokens"] += world.scheduler.num_asked_tokens
        if verbose and totals["worlds"] % 200 == 0:
            print(f"{time.monotonic() - begin:.0f} s, next seed {seed + 1}:", dict(totals), flush=True)
        seed += 1
    return totals


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(dict(soak(arguments.steps, arguments.seed, verbose=True)))
