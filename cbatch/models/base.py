"""The protocols between engine and model. Knows no model, no cache and no request."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cbatch.scheduler.kv_spec import KVSpec


class Attend(Protocol):
    """A layer's attention: stores K and V of this step's tokens, and attends over the cache.

    ``layer`` counts the attention layers in forward order, 0 to num_layers - 1. ``q`` is
    [num_tokens, num_heads, k_head_dim], ``k`` [num_tokens, num_kv_heads, k_head_dim], ``v``
    [num_tokens, num_kv_heads, v_head_dim]: last dimension contiguous, other strides arbitrary. ``window`` is in
    positions, the current one included, 0 for all; ``softcap`` is 0.0 for none; ``sinks`` is [num_heads] or None.
    Returns [num_tokens, num_heads, v_head_dim].
    """

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor: ...


class Pages(NamedTuple):
    """Where one layer's keys and values of this step go."""

    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, k_head_dim], heads contiguous, any other stride
    v_cache: Tensor  # [num_blocks, block_size, num_kv_heads, v_head_dim], heads contiguous, any other stride
    slot_mapping: Tensor  # [num_tokens] int32: block * block_size + offset


@runtime_checkable
class PagedAttend(Protocol):
    """An ``Attend`` with pages: a model may store k and v in them itself, and then attends with None for both."""

    def pages(self, layer: int) -> Pages | None: ...

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor: ...


class Model(Protocol):
    """A causal language model that runs packed, ragged steps over its caller's cache."""

    kv_specs: tuple[KVSpec, ...]
    """One per layer, in forward order."""
    vocab_size: int
    max_model_len: int
    """The largest number of positions, prompt and output together."""
    dtype: torch.dtype
    """Of the keys and values."""
    device: torch.device
    eos_token_ids: tuple[int, ...]
    generation_config: Any
    """transformers' ``GenerationConfig`` or None: the default sampling parameters."""
    name: str
    capturable: bool
    """Whether a CUDA graph can hold the forward: it never waits for a value from the device."""

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: Attend) -> Tensor:
        """Run one step: ``input_ids`` and ``positions`` [num_tokens], ``sample_rows`` [num_samples], int32 or int64.

        Returns the logits of the tokens at ``sample_rows``, [num_samples, vocab_size].
        """
        ...
