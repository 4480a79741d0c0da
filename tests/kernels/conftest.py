"""A paged step of any shape with its dense truth. All that is not live in the pool is NaN, so a leak cannot hide.

What lies behind the window of a row's first query is not live: its blocks were given back, and the row's block table
has the dummy block there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cbatch.kernels.attention import AttentionBackend, AttentionBatch


@dataclass
class PagedStep:
    """Rows of (query_len, context_len): the step's inputs, the pages before it, and every row's dense K and V."""

    rows: list[tuple[int, int]]
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    dense: list[tuple[Tensor, Tensor]]  # [context_len, num_kv_heads, head_dim] each
    options: dict[str, object]  # scale, window, softcap, sinks
    group: int = 1

    def run(self, backend: AttentionBackend) -> Tensor:
        """Attend with a backend on copies of the pages."""
        backend.prepare(self.batch)
        return backend.attend(self.q, self.k, self.v, self.k_cache, self.v_cache, self.group, **self.options)

    def expected(self) -> Tensor:
        """Dense attention in float64, row by row. Zeros where no row has the token."""
        scale, window = float(self.options["scale"]), int(self.options["window"])
        softcap, sinks = float(self.options["softcap"]), self.options["sinks"]
        num_heads = self.q.shape[1]
        out = torch.zeros(self.q.shape[0], num_heads, self.v.shape[2], dtype=torch.float64)
        start = 0
        for (query_len, context_len), dense in zip(self.rows, self.dense, strict=True):
            tokens = slice(start, start + query_len)
            start += query_len
            if not context_len:
                continue
            group = num_heads // dense[0].shape[1]
            keys, values = (x.cpu().double().repeat_interleave(group, 1).transpose(0, 1) for x in dense)
            scores = self.q[tokens].cpu().double().transpose(0, 1) @ keys.transpose(1, 2) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            age = torch.arange(context_len - query_len, context_len)[:, None] - torch.arange(context_len)
            hidden = (age < 0) | (age >= window) if window else age < 0
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:  # a last column without a value
                column = sinks.cpu().double()[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[..., :context_len]
            out[tokens] = (weights @ values).transpose(0, 1)
        return out


def make_step(
    rows: list[tuple[int, int]],  # (query_len, context_len), decodes first
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    num_padding: int = 0,  # tokens after the last row, which write to the dummy block
    drops_unseen: bool = True,  # give back the blocks behind the window
    heads_first: bool = False,  # a page holds head behind head, not token behind token
    seed: int = 0,
) -> PagedStep:
    """Random history in randomly placed pages of a pool of two layers (the step is layer 1 of group 1)."""
    generator = torch.Generator().manual_seed(seed)
    v_head_dim = v_head_dim or head_dim

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-context_len // block_size) for _, context_len in rows]
    num_blocks, num_slots = sum(counts) + 4, len(rows) + 2
    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    keys_size, values_size = block_size * num_kv_heads * head_dim, block_size * num_kv_heads * v_head_dim
    pool = torch.full((num_blocks, 2 * (keys_size + values_size)), float("nan"), dtype=dtype)
    base = keys_size + values_size

    def pages(pool: Tensor) -> tuple[Tensor, Tensor]:
        views = []
        for part, dim in ((pool[:, base : base + keys_size], head_dim), (pool[:, base + keys_size :], v_head_dim)):
            if heads_first:
                views.append(part.view(num_blocks, num_kv_heads, block_size, dim).transpose(1, 2))
            else:
                views.append(part.view(num_blocks, block_size, num_kv_heads, dim))
        return views[0], views[1]

    k_cache, v_cache = pages(pool)
    block_tables = torch.full((2, num_slots, max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    row_slots = torch.randperm(num_slots, generator=generator)[: len(rows)].int()
    dense, new_k, new_v, slot_mapping = [], [], [], []
    for row, (query_len, context_len) in enumerate(rows):
        gone = max(0, context_len - query_len - window + 1) // block_size if window and drops_unseen else 0
        mine = [0] * gone + [blocks.pop() for _ in range(counts[row] - gone)]
        block_tables[1, row_slots[row], : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        keys, values = rand(context_len, num_kv_heads, head_dim), rand(context_len, num_kv_heads, v_head_dim)
        dense.append((keys, values))
        for token in range(gone * block_size, context_len - query_len):
            k_cache[mine[token // block_size], token % block_size] = keys[token]
            v_cache[mine[token // block_size], token % block_size] = values[token]
        if context_len:
            new_k.append(keys[context_len - query_len :])
            new_v.append(values[context_len - query_len :])
            slot_mapping += [
                mine[token // block_size] * block_size + token % block_size
                for token in range(context_len - query_len, context_len)
            ]
        else:
            new_k.append(rand(query_len, num_kv_heads, head_dim))
            new_v.append(rand(query_len, num_kv_heads, v_head_dim))
            slot_mapping += [0] * query_len
    new_k.append(rand(num_padding, num_kv_heads, head_dim))
    new_v.append(rand(num_padding, num_kv_heads, v_head_dim))
    slot_mapping += [0] * num_padding
    num_tokens = len(slot_mapping)
    slots = torch.tensor([[-1] * num_tokens, slot_mapping], dtype=torch.int32).view(2, num_tokens)
    lens = [query_len for query_len, _ in rows]
    pool = pool.to(device)
    k_cache, v_cache = pages(pool)
    batch = AttentionBatch(
        block_tables=block_tables.to(device),
        slot_mapping=slots.to(device),
        row_slots=row_slots.to(device),
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int().to(device),
        context_lens=torch.tensor([context_len for _, context_len in rows], dtype=torch.int32, device=device),
        num_decodes=next((i for i, length in enumerate(lens) if length != 1), len(lens)),
        max_query_len=max(lens, default=0),
        max_context_len=max((context_len for _, context_len in rows), default=0),
    )
    return PagedStep(
        rows=rows,
        q=rand(num_tokens, num_heads, head_dim).to(device),
        k=torch.cat(new_k).to(device),
        v=torch.cat(new_v).to(device),
        k_cache=k_cache,
        v_cache=v_cache,
        batch=batch,
        dense=dense,
        options={
            "scale": head_dim**-0.5,
            "window": window,
            "softcap": softcap,
            "sinks": rand(num_heads).float().to(device) if sinks else None,
        },
    )


@pytest.fixture(scope="session")
def paged_step() -> Callable[..., PagedStep]:
    """make_step, as a fixture: test modules cannot import a conftest."""
    return make_step


@pytest.fixture(scope="session")
def assert_near() -> Callable[[Tensor, Tensor], None]:
    """Float32 agrees to rounding; half precision to 1% of the norm, the error of rounding its inputs and output."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert actual.shape == expected.shape
        assert torch.isfinite(actual).all(), "NaN of a stale page, or a softmax of nothing"
        if actual.dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(actual.cpu().double(), expected, rtol=2e-5, atol=2e-5)
        else:
            error = (actual.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-9)
            assert error < 1e-2, f"relative L2 error {error:.4f}"

    return check
