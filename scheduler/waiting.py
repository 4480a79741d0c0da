"""The waiting sequences, by rank. Knows their rank and status; decides nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from cbatch.scheduler.sequence import Sequence, Status

Entry = tuple[int, Sequence]  # ranks are unique, so sequences are never compared


class WaitingQueue:
    """A heap, and in front of it a sorted list of the few that were looked at, so that looking again costs nothing.

    Adding and removing from the front take logarithmic time. Aborting takes none: an aborted sequence stays as a
    tombstone until it surfaces, or until half of the queue are tombstones.
    """

    def __init__(self) -> None:
        self._front: list[Entry] = []
        self._heap: list[Entry] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._heap) - self._num_dead

    def add(self, sequence: Sequence) -> None:
        entry = (sequence.rank, sequence)
        if self._front and entry < self._front[-1]:
            insort(self._front, entry)
        else:
            heappush(self._heap, entry)

    def peek(self, index: int) -> Sequence | None:
        """The waiting sequence of this index by rank; None: there are fewer. Cheap near the front."""
        while True:
            if index < len(self._front):
                sequence = self._front[index][1]
                if sequence.status is Status.WAITING:
                    return sequence
                del self._front[index]
                self._num_dead -= 1
            elif self._heap:
                self._front.append(heappop(self._heap))
            else:
                return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ``peek`` returned."""
        index = bisect_left(self._front, sequence.rank, key=lambda entry: entry[0])
        assert self._front[index][1] is sequence
        del self._front[index]

    def bury(self) -> None:
        """Count a sequence in here whose status is not ``WAITING`` any more."""
        self._num_dead += 1
        if not len(self) or 2 * self._num_dead > len(self._front) + len(self._heap) + 64:
            self._front = [entry for entry in self._front if entry[1].status is Status.WAITING]
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapify(self._heap)
            self._num_dead = 0

    def entries(self) -> list[Sequence]:
        """All sequences in here by rank, tombstones included. Walks everything."""
        assert all(a < b for a, b in zip(self._front, self._front[1:], strict=False)), "the front is out of order"
        assert not self._front or not self._heap or self._front[-1] < self._heap[0], "the heap begins before the front"
        return [sequence for _, sequence in self._front + sorted(self._heap)]
