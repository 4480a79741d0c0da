"""Compares two computations of a model's logits, over two short sequences. Keeps keys and values in plain tensors.

Knows no transformers and no pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.errors import UnsupportedModelError
from cbatch.models.base import Model
from cbatch.scheduler.kv_spec import KVSpec

_HARMLESS_EXTRAS = {"position_ids", "cache_position", "position_embeddings"}
"""Tensors that families pass to every attention implementation, and that can be ignored."""

Rows = list[tuple[str, int, list[int]]]
"""The rows of a packed step: sequence, first position, tokens."""
_LARGEST_PROBED_WINDOW = 64  # positions; to probe beyond a larger window would be slow


@dataclass
class LayerCall:
    """One layer's call of attention."""

    module: nn.Module
    spec: KVSpec
    dtype: torch.dtype
    softcap: float


@dataclass
class DenseAttend:
    """Attention over a few sequences, step after step, without pages. Slow and obvious."""

    calls: list[LayerCall] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # (sequence, number of new tokens), packed in this order
    keys: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    values: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)

    def begin(self, rows: Rows) -> tuple[list[int], list[int]]:
        """Start a step with these rows. Returns its tokens and their positions."""
        self.rows, self.calls = [(sequence, len(tokens)) for sequence, _, tokens in rows], []
        positions = [first + i for _, first, tokens in rows for i in range(len(tokens))]
        return [token for _, _, tokens in rows for token in tokens], positions

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        mask: Any,
        extras: dict[str, Any],
    ) -> Tensor:
        _refuse_what_we_would_ignore(q, k, v, sinks, mask, extras)
        self.calls.append(LayerCall(module, KVSpec(k.shape[1], k.shape[2], v.shape[2], window), k.dtype, softcap))
        out, start = [], 0
        for sequence, length in self.rows:
            at, new = (module, sequence), slice(start, start + length)
            keys = self.keys[at] = torch.cat([self.keys[at], k[new]]) if at in self.keys else k[new]
            values = self.values[at] = torch.cat([self.values[at], v[new]]) if at in self.values else v[new]
            out.append(_attend_one(q[new], keys, values, scale, window, softcap, sinks))
            start += length
        return torch.cat(out)


def _attend_one(
    q: Tensor,  # [length, num_heads, k_head_dim], the last queries of the sequence
    keys: Tensor,  # [context, num_kv_heads, k_head_dim]
    values: Tensor,  # [context, num_kv_heads, v_head_dim]
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1).float() for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None] - torch.arange(
        len(keys), device=q.device
    )
    visible = (distance >= 0) & (distance < window) if window else distance >= 0
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _refuse_what_we_would_ignore(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Any, extras: dict[str, Any]
) -> None:
    if not (len(q) == len(k) == len(v)) or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise UnsupportedModelError(
            f"attention was called with shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            "which are not one query, key and value a token"
        )
    if mask is not None:
        raise UnsupportedModelError("the model builds attention masks of its own, which a packed step cannot honour")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise UnsupportedModelError(f"attention sinks of shape {tuple(sinks.shape)} for {q.shape[1]} heads")
    if extras.get("is_causal") is False:
        raise UnsupportedModelError("the model attends to future tokens: it is not a causal language model")
    for name, value in extras.items():
        if isinstance(value, Tensor) and name not in _HARMLESS_EXTRAS:
            raise UnsupportedModelError(f"attention was handed a tensor {name!r}, which cannot be honoured here")


def random_tokens(
    kv_specs: Iterable[KVSpec], max_model_len: int, vocab_size: int, seed: int
) -> tuple[list[int], list[int]]:
    """Two sequences of different length, the first longer than the probed windows."""
    windows = [spec.window for spec in kv_specs if 0 < spec.window <= _LARGEST_PROBED_WINDOW]
    rng = random.Random(seed)  # the global state is the caller's
    a, b = (
        [rng.randrange(vocab_size) for _ in range(min(length, max_model_len))]
        for length in (max([7, *(window + 5 for window in windows)]), 5)
    )
    return a, b


def logits_in_two_steps(
    step: Callable[[Rows, list[int]], Tensor],  # rows, tokens to sample -> logits [num_samples, vocab_size]
    a: list[int],
    b: list[int],
    watch: AbstractContextManager[Any] = nullcontext(),
) -> list[Tensor]:
    """The logits of all tokens of two sequences, [len(a), vocab_size] and [len(b), vocab_size].

    The second step, which runs within ``watch``, has a decode and a chunk of a prompt.
    """
    head_a, head_b = len(a) - 1, len(b) - 2
    one = step([("A", 0, a[:-1]), ("B", 0, b[:-2])], [*range(head_a + head_b)])
    with watch:  # not the first step, which may fill caches
        # Samples out of order, to detect a model that drops or sorts them.
        two = step([("A", head_a, a[-1:]), ("B", head_b, b[-2:])], [2, 0, 1])
    return [torch.cat([one[:head_a], two[1:2]]), torch.cat([one[head_a:], two[2:3], two[:1]])]


def packed_logits(model: Model) -> list[Tensor]:
    """The logits of two sequences, [num_tokens, vocab_size] each, from packed steps without pages."""
    dense = DenseAttend()

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return dense(layer, q, k, v, mask=None, extras={}, **options)

    def step(rows: Rows, samples: list[int]) -> Tensor:
        inputs = [torch.tensor(x, dtype=torch.int64, device=model.device) for x in (*dense.begin(rows), samples)]
        return model.forward(inputs[0], inputs[1], inputs[2], attend)

    a, b = random_tokens(model.kv_specs, model.max_model_len, model.vocab_size, seed=0)
    # Triton launches on the current device.
    with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
        return logits_in_two_steps(step, a, b)


class Rule:
    """Decides whether two computations of the same logits are equal up to rounding.

    Row by row, it compares the distance of the two rows with the spread of the reference row. Over tiny models of 60
    families the ratio is at most 3e-6 in float32, 0.005 in float16 and 0.04 in bfloat16; with a wrong position, mask or
    neighbour it is about 1. The bound is 2 * sqrt(eps): 7e-4, 0.06, 0.18 (also for float32 products in TF32).
    In 16 bits a near-tie may send a token to another expert, which changes its row and, through attention, later rows.
    So with experts half of a sequence's rows may differ, and there are three attempts with other tokens: a real fault
    shows in all rows, every time.
    """

    def __init__(self, dtype: torch.dtype, experts: bool) -> None:
        self.dtype = dtype
        eps = torch.finfo(torch.bfloat16 if dtype == torch.float32 and _float32_is_rounded() else dtype).eps
        self.bound = 2 * eps**0.5
        lenient = experts and eps > 1e-4
        self.attempts, self.allowed = (3, 0.5) if lenient else (1, 0.0)

    def difference(self, got: list[Tensor], alone: list[Tensor]) -> str | None:
        """Compare each sequence's logits [num_tokens, vocab_size]; None if they are equal. Waits for the device."""
        for mine, plain in zip(got, alone, strict=True):
            mine, plain = mine.float(), plain.float()
            spread = (plain - plain.mean(dim=-1, keepdim=True)).norm(dim=-1)
            error = (mine - plain).norm(dim=-1) / spread.clamp_min(torch.finfo(torch.float32).tiny)
            wrong = float((~(error <= self.bound)).float().mean())  # "not <=" counts NaN as wrong
            if wrong > self.allowed:
                return (
                    f"{wrong:.0%} of the rows differ, by up to {float(error.max()):.2g} of their spread "
                    f"(rounding in {self.dtype} explains {self.bound:.2g})"
                )
        return None


def _float32_is_rounded() -> bool:
    """Whether the caller allows TF32 or bfloat16 in float32 products."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # precisions were set per backend, so torch has no common one to return
        return True
