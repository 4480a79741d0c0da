"""Random requests of every kind beside each other, on engines of random shape (tests/engine/soak.py)."""

from __future__ import annotations

import pytest

from tests.engine.soak import soak


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_request_gets_what_it_gets_alone_and_leaves_nothing(device: str) -> None:
    totals = soak(num_worlds=8, seed=1, device=device)
    assert totals["requests"] > 50 and totals["preemptions"] > 20 and totals["blocks_in"]
