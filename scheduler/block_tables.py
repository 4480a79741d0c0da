"""Owns the block tables of running sequences: which block holds which part of a context, and which entries are new.

The device has a twin of the tables. A step carries over the entries that changed since the step before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.blocks import DUMMY_BLOCK, BlockManager
from cbatch.scheduler.plan import HostBatch

Ints = NDArray[np.int32]


class BlockTables:
    """``tables[group, slot, column]`` is the block of positions ``column * block_size`` and on, or the dummy.

    All groups of a slot end at the same column, ``num_columns``. A group with a window begins where its window does:
    blocks that no later query can see are released, and their entries point to the dummy block again. The last slot is
    the dummy of padded rows; its entries stay 0.
    """

    def __init__(self, blocks: BlockManager, num_slots: int, num_columns: int, windows: tuple[int, ...]) -> None:
        """``windows``: of each group, the number of positions that a query sees, its own included; 0: all.

        Raises OverflowError where an index into all tables would not fit into 32 bits.
        """
        num_groups = len(windows)
        if num_groups * (num_slots + 1) * num_columns >= 2**31:
            raise OverflowError(f"{num_groups} x {num_slots + 1} x {num_columns} blocks are more than 2^31")
        self.tables = np.zeros((num_groups, num_slots + 1, num_columns), np.int32)
        self.num_columns = np.zeros(num_slots + 1, np.int32)
        self.num_groups = num_groups
        self.full_groups = [group for group, window in enumerate(windows) if not window]
        # Each width of window with its groups, and for each slot the column that they begin at.
        self.windows = [(window, np.flatnonzero(np.array(windows) == window)) for window in sorted({*windows} - {0})]
        self.first_columns = np.zeros((len(self.windows), num_slots + 1), np.int32)
        self.drop_at = np.zeros(num_slots + 1, np.int32)  # the position at which a slot can next release a block
        self._blocks = blocks
        self._size = blocks.block_size
        self._flat = self.tables.reshape(-1)
        self._slot_base = np.arange(num_slots + 1, dtype=np.int64) * num_columns
        self._group_stride = (num_slots + 1) * num_columns
        self._group_base = (np.arange(num_groups, dtype=np.int64) * self._group_stride)[:, None]
        self._changed: list[NDArray[np.int64]] = []  # flat indices
        self._copies: dict[int, tuple[Ints, Ints]] = {}  # by slot: source blocks (referenced), and its own
        if self.windows:
            self._set_drop_at(np.arange(num_slots + 1))

    # ---- how many blocks

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Most blocks that a context holds at once while it grows to ``num_tokens``, ``chunk`` tokens at a time."""
        columns = -(-num_tokens // self._size)
        count = columns * len(self.full_groups)
        for window, groups in self.windows:
            # The most blocks that window - 1 + chunk positions in a row can touch, wherever they begin.
            count += min(columns, (window + chunk - 3) // self._size + 2) * len(groups)
        return count

    def num_held(self, slot: int) -> int:
        """Blocks in the row of a slot."""
        count = int(self.num_columns[slot]) * self.num_groups
        for i, (_, groups) in enumerate(self.windows):
            count -= int(self.first_columns[i, slot]) * len(groups)
        return count

    def held(self, slots: NDArray[np.intp]) -> Ints:
        """The blocks in the rows of some slots, one after the other; a shared one occurs several times."""
        rows = self.tables[:, slots, : self.num_columns[slots].max()]
        held: Ints = rows[rows != DUMMY_BLOCK]
        return held

    # ---- changes

    def start(self, slot: int, prefix: list[list[int]]) -> None:
        """Begin a free slot's row with cached blocks: ``prefix[column][group]``."""
        if prefix:
            self._begin(slot, np.array(prefix, np.int32).T, len(prefix) * self._size)

    def fork(self, parent: int, slot: int, num_tokens: int) -> bool:
        """Begin a free slot's row with the blocks of the first ``num_tokens`` tokens of another slot.

        Whole blocks are shared, and written by neither from now on; a last, partial block is copied by the next step.
        False, and nothing done, if the parent's windows have moved on and a needed block is gone.
        """
        columns = self.resumable_blocks(parent, num_tokens)
        if columns is None:
            return False
        count = num_tokens // self._size
        self._begin(slot, columns[:, :count], num_tokens)
        if count < columns.shape[1]:
            self.extend(slot, 1)
            source = columns[:, count]
            if parent in self._copies and count == self.num_columns[parent] - 1:  # not copied yet itself
                source = self._copies[parent][0]
            self._blocks.add_refs(source)
            self._copies[slot] = source, self.tables[:, slot, count].copy()
        return True

    def resumable_blocks(self, slot: int, num_tokens: int) -> Ints | None:
        """Copy of the blocks ``[groups, columns]`` needed to go on after ``num_tokens`` tokens; elsewhere the dummy.

        None if the slot's windows have moved on and a needed block is gone.
        """
        firsts = [self._first_column(window, num_tokens) for window, _ in self.windows]
        if any(first < held for first, held in zip(firsts, self.first_columns[:, slot].tolist(), strict=True)):
            return None
        blocks = self.tables[:, slot, : -(-num_tokens // self._size)].copy()
        for i, (_, groups) in enumerate(self.windows):
            blocks[groups, : firsts[i]] = DUMMY_BLOCK
        return blocks

    def restore(self, slot: int, wanted: NDArray[np.bool_], num_tokens: int) -> Ints:
        """Append columns to a slot's row, with new blocks where ``wanted [groups, columns]`` is set; returns those.

        The other entries keep the dummy: they are outside the window of position ``num_tokens``.
        """
        begin = int(self.num_columns[slot])
        end = begin + wanted.shape[1]
        blocks = self._blocks.allocate(int(wanted.sum()))
        self.tables[:, slot, begin:end][wanted] = blocks
        self.num_columns[slot] = end
        for i, (window, _) in enumerate(self.windows):
            self.first_columns[i, slot] = self._first_column(window, num_tokens)
        if self.windows:
            self._set_drop_at(slot)
        self._note(self._slot_base[slot] + np.arange(begin, end))
        return blocks

    def extend(self, slot: int, count: int) -> None:
        """Allocate blocks for ``count`` more columns of one slot."""
        begin = int(self.num_columns[slot])
        blocks = self._blocks.allocate(count * self.num_groups)
        self.tables[:, slot, begin : begin + count] = blocks.reshape(self.num_groups, count)
        self.num_columns[slot] = begin + count
        self._note(self._slot_base[slot] + np.arange(begin, begin + count))

    def extend_each(self, slots: NDArray[np.intp]) -> None:
        """Allocate blocks for one more column of each slot."""
        columns = self.num_columns[slots]
        blocks = self._blocks.allocate(slots.size * self.num_groups)
        self.tables[:, slots, columns] = blocks.reshape(slots.size, self.num_groups).T
        self.num_columns[slots] = columns + 1
        self._note(self._slot_base[slots] + columns)

    def share(self, slot: int, column: int, blocks: list[int]) -> None:
        """Replace the blocks of a column by published ones with the same content, except where out of the window."""
        own = self.tables[:, slot, column]
        theirs = np.array(blocks, np.int32)
        groups = np.flatnonzero((own != theirs) & (own != DUMMY_BLOCK))
        if groups.size:
            gone = own[groups]
            self._blocks.add_refs(theirs[groups])
            self.tables[groups, slot, column] = theirs[groups]
            self._blocks.release(gone)
            self._note(self._slot_base[slot] + column)

    def drop_unseen(self, slots: NDArray[np.intp], positions: Ints) -> None:
        """Release the blocks that no query of these slots can see from their next positions on.

        Steps in flight may still read them. Their next owner writes them in a later step, which the device runs after.
        """
        due = (positions >= self.drop_at.take(slots)).nonzero()[0]
        if not due.size:
            return
        slots, positions = slots.take(due), positions.take(due)
        for i, (window, groups) in enumerate(self.windows):
            begin = self.first_columns[i].take(slots)
            counts = np.maximum((positions - (window - 1)) // self._size - begin, 0)  # of columns that go
            self.first_columns[i, slots] = begin + counts
            ends = counts.cumsum()
            cells = np.arange(ends[-1]) + (self._slot_base.take(slots) + begin - ends + counts).repeat(counts)
            index = (self._group_base.take(groups, axis=0) + cells).ravel()
            blocks = self._flat.take(index)
            self._flat[index] = DUMMY_BLOCK
            self._blocks.release(blocks, repeated=True)
            self._changed.append(index)
        self._set_drop_at(slots)

    def clear(self, slot: int) -> None:
        """Release all blocks of a slot; the last column's are the first to be allocated again."""
        if slot in self._copies:
            self._blocks.release(self._copies.pop(slot)[0])
        count = self.num_columns[slot]
        row = self.tables[:, slot, :count]
        blocks = row.T[::-1].ravel()
        self._blocks.release(blocks[blocks != DUMMY_BLOCK] if self.windows else blocks)
        row[:] = DUMMY_BLOCK
        self.num_columns[slot] = 0
        if self.windows:
            self.first_columns[:, slot] = 0
            self._set_drop_at(slot)

    # ---- for the device

    def write_changes(self, host: HostBatch) -> tuple[int, int, int]:
        """Write the entries that changed since the last call, with their present values, and the copies for forks.

        Returns the numbers of entries, of entries that overflow, and of copies. An entry that changed twice may occur
        twice, with the same value.
        """
        if not self._changed:
            return 0, 0, 0
        index = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed.clear()
        room = host.table_index.size
        if index.size > room:  # entries beyond a row's end are not needed: they were released since
            index = np.unique(index)
            slots, columns = np.divmod(index % self._group_stride, self.tables.shape[2])
            index = index[columns < self.num_columns[slots]]
        values = self._flat[index]
        count = min(index.size, room)
        host.table_index[:count] = index[:count]
        host.table_value[:count] = values[:count]
        num_overflow, num_copies = index.size - count, 0
        if self._copies:
            sources, own = (np.concatenate(blocks) for blocks in zip(*self._copies.values(), strict=True))
            num_copies = sources.size
            host.write_spare(index[count:], values[count:], sources, own)
            self._blocks.release(sources, repeated=True)  # their next owner writes them in a later step
            self._copies.clear()
        elif num_overflow:
            host.write_spare(index[count:], values[count:])
        return count, num_overflow, num_copies

    def copied_blocks(self) -> list[int]:
        """The blocks that are held to be copied, for ``check``."""
        return [block for sources, _ in self._copies.values() for block in sources.tolist()]

    def _begin(self, slot: int, columns: Ints, num_tokens: int) -> None:
        """Begin a free slot's row with blocks ``[groups, columns]``, as far as position ``num_tokens`` sees them."""
        for i, (window, groups) in enumerate(self.windows):
            first = self._first_column(window, num_tokens)
            columns[groups, :first] = DUMMY_BLOCK
            self.first_columns[i, slot] = first
        if self.windows:
            self._set_drop_at(slot)
        self._blocks.add_refs(columns[columns != DUMMY_BLOCK])
        count = columns.shape[1]
        self.tables[:, slot, :count] = columns
        self.num_columns[slot] = count
        self._note(self._slot_base[slot] + np.arange(count))

    def _note(self, cells: NDArray[np.int64]) -> None:
        """Record that these cells (slot and column) have changed, in all groups."""
        self._changed.append((self._group_base + cells).ravel())

    def _set_drop_at(self, slots: NDArray[np.intp] | int) -> None:
        last = (self.first_columns[:, slots].T + 1) * self._size - 1  # position in the first column
        self.drop_at[slots] = (last + [window for window, _ in self.windows]).min(axis=-1)

    def _first_column(self, window: int, position: int) -> int:
        """The column where the window of a query begins."""
        return max(0, position - (window - 1)) // self._size
