"""Back-pressure and deadlines: which requests have not started, and by when they must have ended. Decides no order.

A request too many is refused at submission, by a count. Deadlines are in a heap: the engine's loop looks at the
earliest one once a round, and never walks over all requests.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from cbatch.errors import EngineOverloadedError, InvalidRequestError, named
from cbatch.request import RequestHandle


class Backlog:
    """``check``, ``enter`` and ``leave`` may be called from any thread, the rest from the engine's only."""

    def __init__(self, max_queue_size: int | None) -> None:
        """``max_queue_size``: most answers that may have been submitted and not started; None: any number."""
        self._limit = max_queue_size
        self._waiting: set[RequestHandle] = set()
        # A heap; the number breaks ties. Ended requests stay in it, so the references are weak: prompts may be long.
        self._deadlines: list[tuple[float, int, weakref.ref[RequestHandle]]] = []
        self._numbers = count()
        self._compact_at = 1024

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, num_answers: int, request_id: str | None) -> None:
        """Raises EngineOverloadedError where so many more may not wait, InvalidRequestError where they never may."""
        if self._limit is not None and num_answers > self._limit:
            raise InvalidRequestError(
                f"{named(request_id)}: n is {num_answers}, but max_queue_size is {self._limit}: so many can never wait"
            )
        if self._limit is not None and len(self._waiting) + num_answers > self._limit:
            more = f" and it has {num_answers} answers" if num_answers > 1 else ""
            raise EngineOverloadedError(
                f"{named(request_id)}: {len(self._waiting)} wait already{more}, but max_queue_size is {self._limit}"
            )

    def enter(self, handles: Sequence[RequestHandle]) -> None:
        self._waiting.update(handles)

    def leave(self, handle: RequestHandle) -> None:
        """It has started, or ended. May be called twice."""
        self._waiting.discard(handle)

    def watch(self, handle: RequestHandle) -> None:
        """End it at its deadline, if it has one."""
        if handle.deadline is None:
            return
        heappush(self._deadlines, (handle.deadline, next(self._numbers), weakref.ref(handle)))
        if len(self._deadlines) > self._compact_at:  # drop those that have ended
            self._deadlines = [entry for entry in self._deadlines if (it := entry[2]()) and not it.finished]
            heapify(self._deadlines)
            self._compact_at = 2 * len(self._deadlines) + 1024

    def expire(self) -> None:
        """End the requests whose deadline has passed. Costs nothing if none has a deadline."""
        if not self._deadlines:
            return
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            if handle := heappop(self._deadlines)[2]():
                handle.expire()
