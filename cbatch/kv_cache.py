"""Owns the pages of keys and values: one pool, block-major, and for each layer the views of its part of a page."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cbatch.errors import ConfigError
from cbatch.kernels.attention import AttentionBackend
from cbatch.models.base import Pages
from cbatch.scheduler.kv_spec import KVGroup

_COPY_BYTES = 64 << 20  # that pass through memory of the allocator's at once, when blocks are copied


def page_bytes(groups: tuple[KVGroup, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of the pool: the largest group's, so that a page serves any of them."""
    return max(group.elements_per_page(block_size) for group in groups) * dtype.itemsize


class KVCache:
    """``num_blocks`` pages, each ``[layers of a group, K and V, block_size, num_kv_heads, head_dim]``.

    Where the backend wants it, the tokens of a head lie together: ``[..., num_kv_heads, block_size, head_dim]``.
    Implements ``PagedAttend``: a model calls it, layer by layer, to store keys and values and to attend over them.

    Allocates everything at once, and raises ConfigError where it does not fit. On the CPU untouched pages cost no
    memory.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        elements = page_bytes(groups, block_size, dtype) // dtype.itemsize
        num_bytes = num_blocks * elements * dtype.itemsize
        try:
            if device.type == "cpu":
                raw = np.zeros(num_bytes, np.uint8)  # the system gives zero pages on first use
                self.pool = torch.from_numpy(raw).view(dtype).view(num_blocks, elements)
            else:
                self.pool = torch.zeros(num_blocks, elements, dtype=dtype, device=device)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"num_blocks is {num_blocks}, but a KV pool of {num_bytes / 2**30:.1f} GiB does not fit: {error}"
            ) from error
        self._backend = backend
        self._layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        for index, group in enumerate(groups):
            spec, offset = group.spec, 0
            for layer in group.layers:
                views = []
                for head_dim in (spec.k_head_dim, spec.v_head_dim):
                    size = block_size * spec.num_kv_heads * head_dim
                    part, offset = self.pool[:, offset : offset + size], offset + size
                    if backend.heads_first:
                        views.append(part.view(num_blocks, spec.num_kv_heads, block_size, head_dim).transpose(1, 2))
                    else:
                        views.append(part.view(num_blocks, block_size, spec.num_kv_heads, head_dim))
                self._layers[layer] = (index, views[0], views[1])

    def pages(self, layer: int) -> Pages | None:
        """Where this step's keys and values of a layer belong; None: the backend wants them handed over."""
        group, k_cache, v_cache = self._layers[layer]
        slot_mapping = self._backend.slot_mapping(group)
        return None if slot_mapping is None else Pages(k_cache, v_cache, slot_mapping)

    def copy_blocks(self, sources: Tensor, own: Tensor) -> None:
        """Copy whole blocks, int32 ``[num_copies]`` each, none of which is both. Allocates some 64 MiB at the most."""
        count = max(1, _COPY_BYTES // (self.pool.shape[1] * self.pool.element_size()))
        for some, copies in zip(sources.long().split(count), own.long().split(count), strict=True):
            self.pool.index_copy_(0, copies, self.pool.index_select(0, some))

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write this step's keys and values into the layer's pages, unless they are there, and attend over them.

        q ``[num_tokens, num_heads, k_head_dim]``, k and v ``[num_tokens, num_kv_heads, head_dim]`` or None; returns
        ``[num_tokens, num_heads, v_head_dim]``. The backend was prepared with the step's ``AttentionBatch``.
        """
        group, k_cache, v_cache = self._layers[layer]
        return self._backend.attend(
            q, k, v, k_cache, v_cache, group, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
