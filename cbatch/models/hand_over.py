"""Routes the attention calls of a transformers model to the current step. Knows no layer numbers and no cache.

Some families drop the keywords that the caller passes to the forward, so the step is not passed by keyword: it is set
around the forward, for the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "cbatch"
"""Our name among transformers' attention implementations. It has no mask function, so transformers builds no mask."""

Answer = Callable[..., Tensor]
"""The function behind the attention calls of a forward, called as in ``_hand_over``. Shapes as in ``Attend``."""

_calling_thread = threading.local()


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within the block, route the attention calls of this thread's forwards to ``answer``."""
    before = getattr(_calling_thread, "answer", None)
    _calling_thread.answer = answer
    try:
        yield
    finally:
        _calling_thread.answer = before


def _hand_over(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, k_head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, k_head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, v_head_dim]
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    answer: Answer | None = getattr(_calling_thread, "answer", None)
    if answer is None:
        raise RuntimeError("attention implementation 'cbatch' works only inside TransformersModel.forward")
    out = answer(
        module,
        _rows(query),
        _rows(key),
        _rows(value),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        mask=attention_mask,
        extras=extras,
    )
    return out.unsqueeze(0), None


def _rows(x: Tensor) -> Tensor:
    """[1, heads, num_tokens, dim] -> [num_tokens, heads, dim], a view unless the last dimension is strided."""
    x = x[0].transpose(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


AttentionInterface.register(IMPLEMENTATION, _hand_over)
