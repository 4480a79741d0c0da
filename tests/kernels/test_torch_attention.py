"""TorchAttention and the reference against dense attention in float64, at the shapes that bite."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch.kernels import reference
from cbatch.kernels.attention import AttentionBatch
from cbatch.kernels.torch_attention import TorchAttention, _split_into_bands


class ReferenceAttention:
    """The reference behind the backends' interface."""

    def prepare(self, batch: AttentionBatch) -> None:
        self.batch = batch

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, group: int, **options: Any
    ) -> Tensor:
        b = self.batch
        reference.write_kv(k, v, k_cache, v_cache, b.slot_mapping[group])
        tables = b.block_tables[group]
        return reference.paged_attention(
            q, k_cache, v_cache, tables, b.row_slots, b.cu_seqlens_q, b.context_lens, **options
        )


BACKENDS = {"reference": ReferenceAttention, "torch": TorchAttention}
BLOCK = 16
STEPS = {
    "context of k blocks, one less, one more": [(1, 2 * BLOCK), (1, 2 * BLOCK - 1), (1, 2 * BLOCK + 1)],
    "first token": [(1, 1)],
    "decodes over several chunks": [(1, 63), (1, 64), (1, 65), (1, 200), (1, 3)],
    "whole prompts": [(5, 5), (33, 33), (16, 16)],
    "odd chunks": [(7, 40), (1, 17), (13, 61)],
    "decodes and prefills": [(1, 30), (1, 64), (9, 9), (17, 80)],
    "padded rows": [(1, 0), (1, 20), (1, 0)],
    "nothing but padding": [(1, 0), (1, 0)],
    "padded rows without tokens": [(1, 20), (5, 21), (0, 0), (0, 0)],
}


@pytest.fixture(scope="module")
def paged_step(paged_step):
    """Steps over pages as TorchAttention wants them."""
    return partial(paged_step, heads_first=TorchAttention.heads_first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_rows_attend_to_their_context_and_nothing_else(paged_step, assert_near, backend, rows) -> None:
    step = paged_step(rows, block_size=BLOCK, num_padding=3)
    assert_near(step.run(BACKENDS[backend]()), step.expected())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 2.0}, {"sinks": True}, {"window": 1}])
def test_window_softcap_and_sinks(paged_step, assert_near, backend, options) -> None:
    step = paged_step([(1, 150), (1, 20), (1, 21), (19, 90), (30, 30)], **options)
    assert_near(step.run(BACKENDS[backend]()), step.expected())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2), (8, 1), (8, 2)])
@pytest.mark.parametrize("head_dim, v_head_dim", [(80, 80), (24, 16), (16, 40)])
def test_heads(paged_step, assert_near, backend, num_heads, num_kv_heads, head_dim, v_head_dim) -> None:
    step = paged_step(
        [(1, 70), (1, 5), (6, 20)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )
    assert_near(step.run(BACKENDS[backend]()), step.expected())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 2.0, "sinks": True}])
def test_half_precision(paged_step, assert_near, backend, dtype, options) -> None:
    step = paged_step([(1, 150), (1, 20), (1, 0), (19, 90), (30, 30)], dtype=dtype, **options)
    assert_near(step.run(BACKENDS[backend]()), step.expected())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0, "sinks": True}], ids=str)
def test_on_cuda_as_a_slow_oracle(paged_step, assert_near, backend, dtype, options) -> None:
    step = paged_step([(1, 150), (1, 20), (1, 0), (19, 90), (30, 30)], dtype=dtype, device="cuda", **options)
    assert_near(step.run(BACKENDS[backend]()), step.expected())


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 100, 128])
def test_block_sizes(paged_step, assert_near, block_size) -> None:
    step = paged_step([(1, 257), (1, 100), (1, 1), (9, 130)], block_size=block_size, window=110)
    assert_near(step.run(TorchAttention()), step.expected())


def test_pages_that_hold_token_behind_token_go_the_general_way(paged_step, assert_near) -> None:
    step = paged_step([(1, 70), (1, 5), (6, 20)], heads_first=False)
    assert_near(step.run(TorchAttention()), step.expected())


def test_one_long_row_among_short_ones_is_a_band_of_its_own(paged_step, assert_near) -> None:
    """In one rectangle 31 rows of 20 tokens would cost as much as 31 of 2,000: that is refused by splitting."""
    rows = [(1, 20)] * 16 + [(1, 2000)] + [(1, 21)] * 15
    assert [len(band) for band, _ in _split_into_bands([-(-n // 64) for _, n in rows])] == [1, 31]
    step = paged_step(rows, block_size=64, num_heads=2, num_kv_heads=1)
    assert_near(step.run(TorchAttention()), step.expected())


def test_layers_of_several_shapes_share_a_step(paged_step, assert_near) -> None:
    """Plans are kept by group, window and shape: a second layer with a window must not see the first one's plan."""
    backend = TorchAttention()
    rows = [(1, 150), (1, 20), (7, 40)]
    other = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
    plain, windowed = paged_step(rows), paged_step(rows, window=10, drops_unseen=False, **other)
    windowed.batch = plain.batch  # the same seed placed the same pages
    backend.prepare(plain.batch)
    for step in (plain, windowed, plain):
        actual = backend.attend(step.q, step.k, step.v, step.k_cache, step.v_cache, 1, **step.options)
        assert_near(actual, step.expected())


def test_blocks_beyond_2_to_the_31_elements(paged_step) -> None:
    """The same step in the lowest and in the highest blocks of a pool whose untouched pages cost no memory: equal."""
    step = paged_step([(1, 200), (1, 64), (1, 17), (40, 100)], block_size=64, head_dim=64)
    expected = step.run(TorchAttention())
    num_blocks, page = step.k_cache.shape[0], step.k_cache.stride(0)
    shift = -(-(2**31) // page)
    pool = torch.from_numpy(np.zeros((shift + num_blocks, page), np.float32))
    for name in ("k_cache", "v_cache"):
        old = getattr(step, name)
        new = torch.as_strided(pool, (len(pool), *old.shape[1:]), old.stride(), old.storage_offset())
        new[shift:] = old
        setattr(step, name, new)
    step.batch.block_tables += shift
    step.batch.slot_mapping += shift * 64
    assert torch.equal(step.run(TorchAttention()), expected)


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 140), max_size=5),
    prefills=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), max_size=3),
    block_size=st.sampled_from([4, 16, 64]),
    window=st.sampled_from([0, 0, 1, 16, 50]),
    num_kv_heads=st.sampled_from([1, 2]),
    group_size=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 3),
)
def test_any_ragged_step(
    paged_step, assert_near, decodes, prefills, block_size, window, num_kv_heads, group_size, seed
) -> None:
    rows = [(1, n) for n in decodes] + [(query_len, query_len + past) for query_len, past in prefills]
    step = paged_step(
        rows,
        block_size=block_size,
        window=window,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        num_padding=1,
        seed=seed,
    )
    assert_near(step.run(TorchAttention()), step.expected())
