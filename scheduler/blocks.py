"""Owns the blocks of the KV pool: which are free. Knows no sequence; block 0 is the dummy that padding writes to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DUMMY_BLOCK = 0


class BlockManager:
    """A stack of free block numbers over a pool of ``num_blocks`` equal pages.

    Taken blocks come in ascending order when they were freed together, so that a sequence tends to lie in one run
    of the pool.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, but the dummy block and one more are needed")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = np.arange(num_blocks - 1, DUMMY_BLOCK, -1, dtype=np.int32)
        self.num_free = num_blocks - 1

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold: all but the dummy."""
        return self.num_blocks - 1

    def take(self, count: int) -> NDArray[np.int32]:
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].copy()

    def give_back(self, blocks: NDArray[np.int32]) -> None:
        count = blocks.size
        self._free[self.num_free : self.num_free + count] = blocks.ravel()[::-1]
        self.num_free += count

    def free_blocks(self) -> NDArray[np.int32]:
        """A view of the free block numbers, for ``Scheduler.check``."""
        return self._free[: self.num_free]
