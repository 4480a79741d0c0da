"""Waits for what an engine's threads are about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from cbatch.engine import Engine
from cbatch.request import RequestHandle


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Fails if it never happens."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


def tokens(handle: RequestHandle) -> list[int]:
    """A request's only answer, at its end."""
    return handle.result(120).outputs[0].token_ids


def settle(engine: Engine) -> None:
    """Until nothing runs or waits, and every step has landed; then everything must have been given back."""

    def is_idle() -> bool:
        works = engine.scheduler.has_work or engine._in_flight or engine._inbox or engine._live
        # A step that was taken off the list may be landing still. The loop forgets its end as it falls asleep.
        return not works and (engine._lane._last_end is None or not engine._thread.is_alive())

    wait_until(is_idle)
    time.sleep(0.02)  # for the delivery of what nobody waits for
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"] and not engine._beams and not len(engine._backlog)
    engine.scheduler.check()
