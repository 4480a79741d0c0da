"""What is set aside from the garbage collector while engines run, and for how long."""

from __future__ import annotations

import gc
import threading
import weakref

from cbatch import interpreter


class Cycle:
    """As a request and its sequence are."""

    def __init__(self) -> None:
        self.itself = self


def test_what_an_engine_sets_aside_is_collected_when_the_next_one_starts() -> None:
    """A server that replaces its engine with the new one ready kept every request that had run at such a moment."""
    interpreter.hold()
    try:
        for _ in range(3):
            cycle = Cycle()
            gone = weakref.ref(cycle)
            interpreter.hold()  # the next one, while it is there
            interpreter.release()  # the one before
            del cycle
            gc.collect()
            assert gone() is not None  # set aside, and so not looked at
            interpreter.hold()
            interpreter.release()
            assert gone() is None
    finally:
        interpreter.release()


def test_a_finalizer_may_end_an_engine_while_another_starts() -> None:
    """It waits for that engine's thread, whose last act is the release. The collection held what that waits for."""
    interpreter.hold()
    ended: list[bool] = []

    class Owner(Cycle):
        def __del__(self) -> None:
            thread = threading.Thread(target=interpreter.release, daemon=True)
            thread.start()
            thread.join(5)
            ended.append(not thread.is_alive())

    Owner()
    interpreter.hold()
    try:
        assert ended == [True]
    finally:
        interpreter.release()
