"""Owns the blocks of the KV pool: their reference counts, which are free, and which of the free ones are cached.

Knows no sequence and no token. Block 0 is the dummy that padding writes to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

DUMMY_BLOCK = 0


class BlockManager:
    """Reference counts over a pool of ``num_blocks`` equal pages, and the free ones.

    A block is *held* (count > 0), or *blank* (on a stack), or *cached*: not held, but it has a prefix that can be hit.
    Blank and cached blocks are free. Blank ones are allocated first, then cached ones, least recently held first. When
    its last reference goes, a published block becomes cached, any other one blank.

    Blocks allocated together come in ascending order if they were released together, so that a sequence tends to lie in
    one run of the pool.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, "the dummy block and one more are needed"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.published = np.zeros(num_blocks, np.bool_)
        self._blank = np.arange(num_blocks - 1, DUMMY_BLOCK, -1, dtype=np.int32)
        self._num_blank = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # held longest ago first
        # The prefix cache's callback when a cached block is allocated: it forgets the prefix, and returns the blocks
        # that go with it, this one included.
        self.forget: Callable[[int], Sequence[int]] = lambda block: (block,)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the dummy."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self._num_blank + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a prefix."""
        return len(self._cached)

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Blocks with one reference each. Forgets cached prefixes if there are too few blank ones."""
        if count > self._num_blank:
            self._blank_cached(count)
        self._num_blank -= count
        blocks = self._blank[self._num_blank : self._num_blank + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def add_refs(self, blocks: NDArray[np.int32]) -> None:
        """Add a reference to published blocks, all different."""
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            del self._cached[block]
        self.ref_counts[blocks] += 1

    def release(self, blocks: NDArray[np.int32], *, repeated: bool = False) -> None:
        """Take one reference from each block. ``repeated``: a block may occur several times, once for each holder.

        Those without a reference become blank or cached, the first of them the first to be allocated again.
        """
        if repeated:
            np.subtract.at(self.ref_counts, blocks, 1)
            gone = blocks[self.ref_counts.take(blocks) == 0]
        else:
            left = self.ref_counts.take(blocks) - 1
            self.ref_counts[blocks] = left
            gone = blocks[left == 0]
        published = self.published.take(gone)
        if published.nonzero()[0].size:
            self._cached.update(dict.fromkeys(gone[published].tolist()))
            gone = gone[~published]
        self._put(np.array(sorted({*gone.tolist()}), np.int32))

    def unpublish(self, blocks: NDArray[np.int32]) -> None:
        """Forget that blocks hold a prefix. Those without a reference become blank."""
        self.published[blocks] = False
        blocks = blocks[self.ref_counts[blocks] == 0]
        for block in blocks.tolist():
            del self._cached[block]
        self._put(blocks)

    def _blank_cached(self, count: int) -> None:
        """Make cached blocks blank until ``count`` are."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        gone: list[int] = []
        missing = count - self._num_blank
        while len(gone) < missing:
            oldest, _ = self._cached.popitem(last=False)
            blocks = self.forget(oldest)
            for block in blocks:
                if block != oldest:
                    del self._cached[block]
            gone += blocks
        blank = np.array(gone, np.int32)
        self.published[blank] = False
        self._put(blank)

    def _put(self, blocks: NDArray[np.int32]) -> None:
        self._blank[self._num_blank : self._num_blank + blocks.size] = blocks[::-1]
        self._num_blank += blocks.size

    def blank_blocks(self) -> NDArray[np.int32]:
        """A view of the blank block numbers, for ``check``."""
        return self._blank[: self._num_blank]

    def cached_blocks(self) -> list[int]:
        """The cached block numbers in the order in which they will be allocated, for ``check``."""
        return list(self._cached)
