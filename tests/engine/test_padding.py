"""What a step touches: the places of its own tokens and its own slots, whatever it is padded with."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from cbatch.engine import Engine
from cbatch.sampling_params import SamplingParams
from tests.models.families import VOCAB_SIZE, make_tiny

SLOTS = 33


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_of_every_size_touch_nothing_but_what_is_theirs(device: str) -> None:
    """Of a row of padding that writes where it should not, no token need ever tell: what it hits may be overwritten,
    or out of sight. So keys, values and last tokens are compared, all of them, around every step.

    The batch grows from 1 to 33 rows and shrinks again, and then falls from 32 rows to 3. A block is one token.
    """
    dice = torch.Generator().manual_seed(6)
    rows: list[tuple[bool, int]] = []
    options: dict[str, Any] = {"max_num_seqs": SLOTS, "block_size": 1, "num_blocks": SLOTS * 48, "schedule": "sync"}
    with Engine.from_model(make_tiny("llama", device=device), max_num_batched_tokens=128, **options) as engine:
        runner, land = engine._executor._runner, engine.land
        pool = runner.kv_cache.pool.view(torch.int32)  # bits, since nan differs from itself
        kept = [pool.clone(), runner.last_tokens.clone()]

        def checked(step: Any) -> Any:
            results = land(step)
            sizes, host = step.plan.sizes, step.plan.host
            rows.append((sizes.num_tokens == sizes.num_rows, sizes.num_rows))
            blocks = (pool != kept[0]).any(1).nonzero().flatten().tolist()
            assert set(blocks) - {0} == set(host.slot_mapping[0, : sizes.num_tokens].tolist())
            slots = (runner.last_tokens != kept[1]).nonzero().flatten().tolist()
            assert set(slots) <= {SLOTS, *host.out_slots[: sizes.num_samples].tolist()}
            kept[:] = pool.clone(), runner.last_tokens.clone()
            if coming:
                handles.append(submit(*coming.popleft()))
            return results

        def submit(length: int, max_tokens: int) -> Any:
            prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=dice).tolist()
            return engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

        engine.land = checked  # type: ignore[method-assign]
        coming = deque([(1 + i % 7, SLOTS + 1) for i in range(1, SLOTS)])
        handles = [submit(3, SLOTS + 1)]  # one more after each step, and the first ends when the last has come
        while len(handles) < SLOTS:
            handles[-1].result(60)
        for handle in handles:
            handle.result(60)
        assert {size for is_decode, size in rows if is_decode} == set(range(1, SLOTS + 1))
        for handle in [submit(2, 8 if i % 11 == 0 else 4) for i in range(32)]:
            handle.result(60)
    engine.scheduler.check()
