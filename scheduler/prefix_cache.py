"""Which blocks hold which prefix: a trie over blocks of tokens. Knows block numbers; knows no sequence and no slot.

    root --[7 7 7 7]--> node 1 --[1 2 3 4]--> node 2       two prompts that share their first block,
                               --[5 6 7 8]--> node 3       block size 4

A node is found by its parent's number and all of its own tokens, as the key of a dict, which compares both. So two
prefixes are never mixed up, even if hashes collide: numbers are never reused, and a node never outlives its parent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.blocks import DUMMY_BLOCK, BlockManager

Key = tuple[int | bytes, bytes]


class Node:
    """A prefix of ``depth`` whole blocks. ``blocks`` are those of its last column, one for each group of layers.

    A group with a window may have lost its block (then it is ``DUMMY_BLOCK``); the others keep theirs as long as the
    node lives.
    """

    __slots__ = ("blocks", "depth", "key", "links", "number", "parent")

    def __init__(self, number: int, parent: Node | None, depth: int, key: Key, blocks: list[int]) -> None:
        self.number = number
        self.parent = parent
        self.depth = depth
        self.key: Key | None = key  # None: gone from the cache
        self.blocks = blocks
        self.links = 0  # children, and sequences whose last published block it is


class PrefixCache:
    """Prefixes whose keys and values are in the pool, for sequences that begin with the same tokens and salt.

    A node's blocks are held by the sequences that use them, or cached by the ``BlockManager`` until it needs them. A
    sequence that holds a node holds all its ancestors, and releases the deepest first; so a node is always evicted
    before its parent.
    """

    def __init__(self, blocks: BlockManager, windows: tuple[int, ...]) -> None:
        """``windows``: for each group of layers, how many positions a query sees; 0: all."""
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._windows = windows
        self._has_windows = any(windows)
        self._nodes: dict[Key, Node] = {}
        self._owner: list[Node | None] = [None] * blocks.num_blocks
        self._pending: dict[Key, int] = {}  # next block of a running prefill -> its rank
        self._last_number = 0
        self.root = Node(0, None, 0, (0, b""), [])
        blocks.forget = self._forget

    def __len__(self) -> int:
        return len(self._nodes)

    @staticmethod
    def key(parent: Node, tokens: bytes, salt: bytes) -> Key:
        """A node's key. The salt takes the place of the root's number, which keeps the tries of salts apart."""
        return (parent.number or salt, tokens)

    # ---- hits

    def match(self, node: Node | None, token_ids: NDArray[np.int32], salt: bytes) -> Node:
        """The longest cached prefix of a sequence that leaves at least its last token to compute.

        ``node`` is the result of the last call: the search goes on from there.
        """
        size = self._block_size
        limit = (token_ids.size - 1) // size
        node = node or self.root
        while node.key is None or node.depth > limit:
            assert node.parent is not None
            node = node.parent
        while node.depth < limit:
            tokens = token_ids[node.depth * size : (node.depth + 1) * size].tobytes()
            child = self._nodes.get(self.key(node, tokens, salt))
            if child is None:
                break
            node = child
        return node

    def resumable(self, node: Node) -> Node:
        """The node itself or its deepest ancestor after which computing can resume.

        The first query there sees the last ``window`` positions: their blocks must be there, earlier ones need not.
        """
        size = self._block_size
        groups = [(group, window) for group, window in enumerate(self._windows) if window]
        found = False
        while groups and not found:
            found = True
            for group, window in groups:
                first = max(0, node.depth * size - window + 1) // size
                above = node
                while above.depth > first and above.blocks[group] != DUMMY_BLOCK:
                    above = _parent(above)
                if above.depth > first:
                    node, found = _parent(above), False
                    break
        return node

    def path(self, node: Node) -> list[Node]:
        """The nodes from the first block to this one."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    # ---- prefixes that are being computed

    def announce(self, key: Key, rank: int) -> None:
        """A running prefill of this rank is going to compute a block."""
        self._pending[key] = min(rank, self._pending.get(key, rank))

    def withdraw(self, key: Key, rank: int) -> None:
        if self._pending.get(key) == rank:
            del self._pending[key]

    def is_coming(self, node: Node, token_ids: NDArray[np.int32], salt: bytes, rank: int) -> bool:
        """Whether the block behind ``node`` is being computed by a prefill that goes before ``rank``."""
        size = self._block_size
        start = node.depth * size
        if not self._pending or start + size >= token_ids.size:
            return False
        pending = self._pending.get(self.key(node, token_ids[start : start + size].tobytes(), salt))
        return pending is not None and pending < rank

    # ---- life of a node

    def publish(self, parent: Node, tokens: bytes, salt: bytes, blocks: list[int]) -> Node:
        """Publish the block of a running sequence that follows ``parent``, its last published one.

        Returns its node: a new one with the sequence's ``blocks``, or the one that is there already, with its own. A
        group whose block is missing there gets the sequence's. ``DUMMY_BLOCK``: outside the group's window already.
        """
        key = self.key(parent, tokens, salt)
        new = Node(self._last_number + 1, parent, parent.depth + 1, key, blocks)
        node = self._nodes.setdefault(key, new)
        node.links += 1
        if node is new:
            self._last_number += 1  # the parent's links stay: a child instead of the sequence
            for block in blocks:
                if block != DUMMY_BLOCK:
                    self._owner[block] = node
                    self._blocks.published[block] = True
            return node
        parent.links -= 1
        for group, block in enumerate(blocks):
            if block != DUMMY_BLOCK and node.blocks[group] == DUMMY_BLOCK:
                node.blocks[group] = block
                self._owner[block] = node
                self._blocks.published[block] = True
        return node

    def enter(self, node: Node) -> None:
        """A running sequence's last published block is this node's."""
        node.links += 1

    def leave(self, node: Node) -> None:
        node.links -= 1
        if not any(node.blocks):
            self._prune(node)

    def reset(self) -> None:
        """Forget every prefix. Blocks that running sequences hold stay theirs, but are published no more."""
        owned = [block for block, node in enumerate(self._owner) if node is not None]
        for node in self._nodes.values():
            node.key = None
        self._nodes.clear()
        self._pending.clear()
        self._owner = [None] * self._blocks.num_blocks
        self.root.links = 0
        self._blocks.unpublish(np.array(owned, np.int32))

    def _forget(self, block: int) -> list[int]:
        """A cached block is being allocated: returns the blocks that go with it.

        A block of a group with a window goes alone. Without one of another group the node is useless, and goes too.
        """
        node = self._owner[block]
        assert node is not None
        if self._has_windows and self._windows[group := node.blocks.index(block)]:
            node.blocks[group] = DUMMY_BLOCK
            gone = [block]
        else:
            assert not node.links, "a prefix is taken before a longer one"
            gone, node.blocks = node.blocks, []
            if self._has_windows:
                gone = [block for block in gone if block != DUMMY_BLOCK]
        for block in gone:
            self._owner[block] = None
        if not any(node.blocks):
            self._prune(node)
        return gone

    def _prune(self, node: Node) -> None:
        """Remove a node without blocks and links, and then its ancestors of the same kind."""
        while not node.links and node.parent is not None and not any(node.blocks):
            assert node.key is not None
            del self._nodes[node.key]
            node.key = None
            node = node.parent
            node.links -= 1

    # ---- for ``check``

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def is_there(self, node: Node) -> bool:
        return node.key is not None and self._nodes.get(node.key) is node

    def owners(self) -> dict[int, Node]:
        """The node of each published block."""
        return {block: node for block, node in enumerate(self._owner) if node is not None}

    def pending(self) -> set[Key]:
        return set(self._pending)


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
