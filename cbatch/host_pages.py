"""Owns the host memory of ``swap_space``: pages of preempted requests are copied out and back in. Knows no request.

The copies run on their own stream, behind all steps launched before: those wrote the pages that go out, and read the
pages that are overwritten. The step that plans the copies reuses the pages that go out, so it waits for those copies.
It does not read the pages that come in (unless ``Swaps.is_needed``); the next step waits for those. On the CPU, the
lane's thread copies.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator

import torch

from cbatch.config import EngineConfig
from cbatch.errors import ConfigError
from cbatch.kv_cache import KVCache, page_bytes
from cbatch.memory import available_memory_bytes
from cbatch.models.base import Model
from cbatch.scheduler.kv_spec import KVGroup
from cbatch.scheduler.swap import Ints, Swaps
from cbatch.streams import give_back, take_stream

# Torch rounds pinned allocations up to a power of two: 33 GiB in one piece would take 64. Its cache reuses a freed
# allocation for one of the same power, so equal pieces also serve the next engine, whatever its size.
_PIECE_BYTES = 256 << 20


def num_host_blocks(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> int:
    """Blocks that ``swap_space`` holds. Raises ConfigError if it is not 0 and holds none."""
    page = page_bytes(groups, config.block_size, model.dtype)
    count = int(config.swap_space * 2**30) // page
    if config.swap_space and not count:
        raise ConfigError(f"swap_space is {config.swap_space} GiB, but a block takes {page / 2**20:.2f} MiB")
    return count


class HostPages:
    """A page of host memory for each host block; pinned if the pool is on a GPU.

    Allocates everything at once. Raises ConfigError if it does not fit.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._pool = kv_cache.pool
        num_elements, pin = self._pool.shape[1], self._pool.device.type == "cuda"
        page = num_elements * self._pool.element_size()
        needed, room = num_blocks * page, available_memory_bytes()
        if needed > room:  # the system would grant each piece, and then kill a process
            raise ConfigError(
                f"swap_space of {num_blocks} host blocks does not fit: it takes {needed / 2**30:.1f} GiB of this "
                f"machine's memory, and {room / 2**30:.1f} are available"
            )
        self._per_piece = size = max(1, _PIECE_BYTES // page)
        self._stream = take_stream(self._pool.device) if pin else None
        self._incoming: torch.cuda.Event | None = None  # after the copies in that no step has waited for yet
        if self._stream is not None:
            weakref.finalize(self, give_back, self._stream).atexit = False
            self._pool.record_stream(self._stream)  # the pool's memory is not reused before the last copy has ended
        try:
            self._pieces = [
                torch.empty(
                    min(size, num_blocks - first), num_elements, dtype=self._pool.dtype, device="cpu", pin_memory=pin
                )
                for first in range(0, num_blocks, size)
            ]
        except RuntimeError as error:
            raise ConfigError(f"swap_space of {num_blocks} host blocks does not fit: {error}") from error

    def before_step(self, swaps: Swaps | None) -> None:
        """Queue a step's copies; the current stream, which is the step's, waits for those it needs. Host: no wait."""
        if self._stream is None:
            if swaps is not None:
                self._copy_out(swaps)
                self._copy_in(swaps)
            return
        compute = torch.cuda.current_stream(self._pool.device)
        if self._incoming is not None:
            compute.wait_event(self._incoming)
            self._incoming = None
        if swaps is None:
            return
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._copy_out(swaps)
            if swaps.out_blocks.size:
                compute.wait_event(self._stream.record_event())
            self._copy_in(swaps)
            self._incoming = self._stream.record_event()
        if swaps.is_needed:
            compute.wait_event(self._incoming)
            self._incoming = None

    def _copy_out(self, swaps: Swaps) -> None:
        for block, host, count in _runs(swaps.out_blocks, swaps.out_host, self._per_piece):
            self._pages(host, count).copy_(self._pool[block : block + count], non_blocking=True)

    def _copy_in(self, swaps: Swaps) -> None:
        for block, host, count in _runs(swaps.in_blocks, swaps.in_host, self._per_piece):
            self._pool[block : block + count].copy_(self._pages(host, count), non_blocking=True)

    def _pages(self, first: int, count: int) -> torch.Tensor:
        """Pages of one piece."""
        piece, at = divmod(first, self._per_piece)
        return self._pieces[piece][at : at + count]

    @torch.inference_mode()
    def measure_ms(self) -> float:
        """Milliseconds to copy a block one way. Copies up to 8 blocks out and in before the first step, and waits."""
        count = min(8, len(self._pieces[0]), len(self._pool))
        pages, pool = self._pages(0, count), self._pool[:count]
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


def _runs(blocks: Ints, hosts: Ints, per_piece: int) -> Iterator[tuple[int, int, int]]:
    """Cut both lists into runs of consecutive blocks, each within one piece: (first block, first host block, count)."""
    begin = 0
    pairs: list[tuple[int, int]] = list(zip(blocks.tolist(), hosts.tolist(), strict=True))
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i] != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1) or pairs[i][1] % per_piece == 0:
            yield *pairs[begin], i - begin
            begin = i
