"""The interface of paged attention, and its backends by name. Knows no request, no model and no kernel.

The engine makes one `AttentionBatch` a step; a backend prepares it once, then attends layer by layer. Triton is
imported only with its backend, so that this file imports on a machine without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class AttentionBatch:
    """One step's metadata. Tensors live on the device; the plain ints are known on the host, without waiting.

    Row r's queries are tokens ``cu_seqlens_q[r] : cu_seqlens_q[r + 1]`` at positions ``context_lens[r] - query_len``
    to ``context_lens[r] - 1``. Rows come decodes first. A row with context 0 is padding: it reads nothing.
    """

    block_tables: Tensor  # [num_groups, num_slots, max_blocks] int32
    slot_mapping: Tensor  # [num_groups, num_tokens] int32: block * block_size + offset
    row_slots: Tensor  # [num_rows] int32: the row's slot in block_tables
    cu_seqlens_q: Tensor  # [num_rows + 1] int32
    context_lens: Tensor  # [num_rows] int32, this step's tokens included
    num_decodes: int  # leading rows with exactly one query token each, so row r's token is token r
    max_query_len: int
    max_context_len: int


class AttentionBackend(Protocol):
    """Writes a layer's new K and V into its pages and attends over them."""

    max_head_dim: int  # largest head size of K or V
    capturable: bool  # whether a CUDA graph can hold its calls: it never waits for the device
    heads_first: bool  # whether it reads fastest from head-major pages, instead of token-major

    def prepare(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of a step share. Call once a step, before the layers."""

    def slot_mapping(self, group: int) -> Tensor | None:
        """The step's [num_tokens] int32, for models that store k and v themselves, and then attend with None for both.

        None: this backend takes k and v in ``attend``.
        """
        ...

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, k_head_dim]
        k: Tensor | None,  # [num_tokens, num_kv_heads, k_head_dim]; None: in its pages already
        v: Tensor | None,  # [num_tokens, num_kv_heads, v_head_dim]
        k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim], heads contiguous, any other stride
        v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim], heads contiguous, any other stride
        group: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,  # [num_heads]: logits of a softmax entry without a value
    ) -> Tensor:
        """Return [num_tokens, num_heads, v_head_dim] in q's dtype.

        Key j is visible to the query at position p if j <= p and (window == 0 or p - j < window). With a softcap the
        scaled score s becomes ``softcap * tanh(s / softcap)``. Tokens of no row, and rows with context 0, are zeros.
        """
        ...


BACKENDS = ("auto", "torch", "triton")


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """Make the backend called name: "torch", "triton", or "auto" (Triton on CUDA, torch elsewhere).

    Raises ValueError for another name. "triton" never falls back: it raises ImportError without Triton, and ValueError
    for a device without kernels.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention={name!r}: choose one of {', '.join(map(repr, BACKENDS))}")
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "triton":
        from cbatch.kernels.paged_attention import TritonAttention

        return TritonAttention(device)
    from cbatch.kernels.torch_attention import TorchAttention

    return TorchAttention()
