"""Engines over the counting model, closed and checked after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from tests.counting import CountingModel


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device in turn; the counting model is on it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingModel, "default_device", request.param)
        yield request.param


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, slots, references and prefixes are added up after every step, and what has not landed is poisoned."""
    monkeypatch.setenv("CBATCH_DEBUG", "1")


@pytest.fixture
def counting_engine() -> Iterator[Callable[..., Engine]]:
    """``counting_engine(model=None, **options)``: small defaults; blocks and slots must add up when the test ends."""
    made: list[tuple[CountingModel, Engine]] = []

    def start(model: CountingModel | None = None, **options: Any) -> Engine:
        defaults = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 33, "max_num_batched_tokens": 16}
        model = model or CountingModel()
        engine = Engine(model, EngineConfig(**{**defaults, **options}))
        made.append((model, engine))
        return engine

    yield start
    for model, engine in made:
        model.gate.set()  # a test that failed may hold it back
        engine.close()
        engine.scheduler.check()
