"""Owns the host memory of ``swap_space``: pages of preempted requests, copied there and back. Knows no request.

The copies run on the compute stream, before their step. So they wait for the step that last wrote the pages that go
out, and for the last one that read those which come in; and the step that uses either waits for them. On the CPU the
lane's thread does the same with plain memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from cbatch.config import EngineConfig
from cbatch.errors import ConfigError
from cbatch.kv_cache import KVCache, page_bytes
from cbatch.models.base import Model
from cbatch.scheduler.kv_spec import KVGroup
from cbatch.scheduler.swap import Ints, Swaps


def num_host_blocks(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> int:
    """Blocks that ``swap_space`` has room for. Raises ConfigError if it has for none, and is not 0."""
    page = page_bytes(groups, config.block_size, model.dtype)
    count = int(config.swap_space * 2**30) // page
    if config.swap_space and not count:
        raise ConfigError(f"swap_space is {config.swap_space} GiB, but a block takes {page / 2**20:.2f} MiB")
    return count


class HostPages:
    """As many pages as there are host blocks; pinned where the pool is on a GPU. Allocates everything at once."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._pool = kv_cache.pool
        shape, pin = (num_blocks, self._pool.shape[1]), self._pool.device.type == "cuda"
        try:
            self._pages = torch.empty(shape, dtype=self._pool.dtype, device="cpu", pin_memory=pin)
        except RuntimeError as error:
            raise ConfigError(f"swap_space of {num_blocks} host blocks does not fit: {error}") from error

    def copy(self, swaps: Swaps) -> None:
        """Launch the copies of a step on the current stream, first those that go out. Waits for nothing on a GPU."""
        for block, host, count in _runs(swaps.out_blocks, swaps.out_host):
            self._pages[host : host + count].copy_(self._pool[block : block + count], non_blocking=True)
        for block, host, count in _runs(swaps.in_blocks, swaps.in_host):
            self._pool[block : block + count].copy_(self._pages[host : host + count], non_blocking=True)

    @torch.inference_mode()
    def measure_ms(self, count: int = 8) -> float:
        """Milliseconds of a block's copy, one way. Copies some out and in again, before any step has run, and waits."""
        count = min(count, len(self._pages), len(self._pool))
        pages, pool = self._pages[:count], self._pool[:count]
        times = []
        for _ in range(3):
            self._synchronize()
            begin = time.perf_counter()
            pages.copy_(pool, non_blocking=True)
            pool.copy_(pages, non_blocking=True)
            self._synchronize()
            times.append((time.perf_counter() - begin) * 1e3 / (2 * count))
        return min(times)

    def _synchronize(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)


def _runs(blocks: Ints, hosts: Ints) -> Iterator[tuple[int, int, int]]:
    """Both lists cut into runs that count up together: first of each, and how many. A copy of a run is one call."""
    begin = 0
    pairs: list[tuple[int, int]] = list(zip(blocks.tolist(), hosts.tolist(), strict=True))
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1):
            yield *pairs[begin], i - begin
            begin = i
