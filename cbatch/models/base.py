"""What the engine asks of a model, and what a model asks of the engine. Knows no model, no cache and no request."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cbatch.scheduler.kv_spec import KVSpec


class Attend(Protocol):
    """The engine's answer to a layer that wants to attend: store K and V of this step's tokens, attend over the cache.

    ``layer`` counts the attention layers in forward order, 0 to num_layers - 1. ``q`` is
    [num_tokens, num_heads, k_head_dim], ``k`` [num_tokens, num_kv_heads, k_head_dim], ``v``
    [num_tokens, num_kv_heads, v_head_dim]: views whose last dimension is contiguous and whose other strides are
    whatever the model's projections left. ``window`` is in positions, the current one included, 0 for all; ``softcap``
    is 0.0 for none; ``sinks`` is [num_heads] or None. Returns [num_tokens, num_heads, v_head_dim].
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
    """Where this step's keys and values of one layer belong."""

    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, k_head_dim], heads contiguous, any other stride
    v_cache: Tensor  # [num_blocks, block_size, num_kv_heads, v_head_dim], heads contiguous, any other stride
    slot_mapping: Tensor  # [num_tokens] int32: block * block_size + offset


@runtime_checkable
class PagedAttend(Protocol):
    """An ``Attend`` that may show its pages: a model then stores k and v itself, and attends with None for both."""

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
    """A causal language model that runs packed, ragged steps and leaves the cache to its caller."""

    kv_specs: tuple[KVSpec, ...]
    """One a layer, in forward order."""
    vocab_size: int
    max_model_len: int
    """The positions that the model can take, prompt and output together."""
    dtype: torch.dtype
    """Of keys and values, as the model hands them over."""
    device: torch.device
    eos_token_ids: tuple[int, ...]
    generation_config: Any
    """transformers' ``GenerationConfig`` or None: the sampling parameters of requests that bring none."""
    name: str
    capturable: bool
    """Whether the forward may be captured in a CUDA graph: it never waits for a value from the device."""

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: Attend) -> Tensor:
        """Run one step: ``input_ids`` and ``positions`` [num_tokens], ``sample_rows`` [num_samples], int32 or int64.

        Returns the logits of the tokens at ``sample_rows``, [num_samples, vocab_size].
        """
        ...
