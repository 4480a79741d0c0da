"""Rotary positions, the norm of heads and their way into pages against their twins in ``reference``, and one of those
against transformers."""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels import reference
from tests.kernels.targets import assert_rounded, random, run_under_the_interpreter, targets

EPS = 1e-6
MAX_LEN = 50


def inputs(num_heads, num_kv_heads, head_dim, rotary_dim, device, dtype, num_tokens=7):
    """A fused projection with values behind the keys, positions out of order, a table, and weights of both norms.

    The projection comes last: weights are read before the wait for the kernel before, which must not have made them.
    """
    positions = torch.tensor([0, 49, 3, 4, 5, 0, 17], device=device).repeat(num_tokens // 7 + 1)[:num_tokens]
    angles = torch.arange(MAX_LEN)[:, None] * 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    weights = 1 + 0.3 * random(2, head_dim, device=device, dtype=torch.float32, seed=1)
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=dtype)
    return qkv, positions, table, weights


def pages_of_two_layers(
    num_tokens, num_kv_heads, head_dim, device, dtype, block_size=16, num_blocks=5, heads_first=False
):
    """A block-major pool of -77, the second layer's pages in it, and the tokens' slots: far apart, two of the dummy."""
    size = block_size * num_kv_heads * head_dim
    pool = torch.full((num_blocks, 4 * size), -77.0, dtype=dtype, device=device)
    parts = [pool[:, part * size : (part + 1) * size] for part in (2, 3)]
    if heads_first:
        k_cache, v_cache = (part.view(num_blocks, num_kv_heads, block_size, head_dim).transpose(1, 2) for part in parts)
    else:
        k_cache, v_cache = (part.view(num_blocks, block_size, num_kv_heads, head_dim) for part in parts)
    slots = torch.randperm((num_blocks - 1) * block_size, generator=torch.Generator().manual_seed(3)) + block_size
    slots = torch.cat([slots[: max(0, num_tokens - 2)], torch.zeros(2, dtype=torch.int64)])[:num_tokens]
    return pool, k_cache, v_cache, slots.int().to(device)


@targets
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, rotary_dim",
    [(4, 2, 16, 16), (9, 3, 64, 64), (32, 8, 128, 128), (3, 1, 80, 20), (2, 2, 96, 48), (8, 4, 256, 256), (4, 4, 6, 2),
     (4, 4, 128, 126)],
)  # fmt: skip
def test_qk_norm_rope(device, dtype, normed, num_heads, num_kv_heads, head_dim, rotary_dim):
    from cbatch.kernels.rope import qk_norm_rope

    qkv, positions, table, weights = inputs(num_heads, num_kv_heads, head_dim, rotary_dim, device, dtype)
    expected = qkv.clone()
    for which, tensor in ((qk_norm_rope, qkv), (reference.qk_norm_rope, expected)):
        qk = tensor[:, : num_heads + num_kv_heads]
        which(qk, num_heads, positions, table, weights if normed else None, EPS)
    assert_rounded(qkv, expected)


@targets
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_layer_without_positions_only_normalises(device, dtype, num_tokens):
    from cbatch.kernels.rope import qk_norm_rope

    qkv, positions, _, weights = inputs(4, 2, 24, 24, device, dtype, num_tokens)
    expected = torch.cat(
        [
            reference.rms_norm(qkv[:, :4], weights[0], EPS),
            reference.rms_norm(qkv[:, 4:6], weights[1], EPS),
            qkv[:, 6:],
        ],
        dim=1,
    )
    qk_norm_rope(qkv[:, :6], 4, positions, None, weights, EPS)
    assert_rounded(qkv, expected)


@targets
@pytest.mark.parametrize(
    "num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, normed, num_splits",
    [
        (33, 32, 8, 128, 128, False, 2),
        (1, 32, 8, 128, 128, True, 4),
        (5, 9, 3, 64, 64, False, 0),
        (5, 9, 3, 64, 64, True, 1),
        (5, 4, 4, 80, 32, False, 4),
        (33, 4, 4, 80, 32, True, 0),
        (5, 8, 1, 96, 96, False, 4),
        (5, 9, 3, 96, 48, True, 2),
        (5, 8, 1, 256, 256, True, 4),
        (33, 8, 1, 64, None, False, 4),
        (1, 4, 4, 128, None, True, 0),
        (1, 4, 4, 6, 2, True, 2),
        (5, 4, 4, 15, None, False, 0),  # as GPT-2 may have them: the last of 15 elements was in no half, and got lost
        (5, 4, 1, 15, None, True, 2),
        (0, 9, 3, 64, 64, True, 0),
        (0, 9, 3, 64, 64, True, 4),
    ],
)
def test_rope_and_store(device, dtype, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, normed, num_splits):
    """Without splits: a slice of a wider projection and int64 positions; with splits: their parts and int32."""
    from cbatch.kernels.rope import rope_and_store

    shape = (num_heads, num_kv_heads, head_dim, rotary_dim or head_dim)
    qkv, positions, table, weights = inputs(*shape, device, dtype, num_tokens)
    qkv = torch.cat([qkv, qkv[:, :1]], dim=1).flatten(1)[:, :-head_dim]
    if num_splits:
        positions = positions.int()
        qkv = random(num_splits, *qkv.shape, device=device, dtype=torch.float32, seed=2)
    before, results = qkv.clone(), []
    for which in (rope_and_store, reference.rope_and_store):
        pool, k_cache, v_cache, slots = pages_of_two_layers(
            num_tokens, num_kv_heads, head_dim, device, dtype, heads_first=num_splits == 2
        )
        q = which(
            qkv, num_heads, num_kv_heads, positions, None if rotary_dim is None else table,
            weights if normed else None, EPS, k_cache, v_cache, slots,
        )  # fmt: skip
        assert q.is_contiguous() and q.shape == (num_tokens, num_heads, head_dim)
        assert torch.equal(qkv, before)
        results.append((q, pool[1:]))  # what is in the dummy block is nobody's
    for got, expected in zip(*results, strict=True):
        assert_rounded(got, expected)


@pytest.mark.parametrize("normed", [False, True])
def test_the_twin_stores_what_write_kv_would(normed):
    qkv, positions, table, weights = inputs(4, 2, 16, 8, "cpu", torch.float32)
    weights = weights if normed else None
    _, k_cache, v_cache, slots = pages_of_two_layers(7, 2, 16, "cpu", torch.float32)
    parts = torch.stack([qkv.flatten(1) - 3, torch.full_like(qkv.flatten(1), 3)])
    q = reference.rope_and_store(parts, 4, 2, positions, table, weights, EPS, k_cache, v_cache, slots)

    _, k_expected, v_expected, _ = pages_of_two_layers(7, 2, 16, "cpu", torch.float32)
    qkv = qkv - 3 + 3
    reference.qk_norm_rope(qkv[:, :6], 4, positions, table, weights, EPS)
    reference.write_kv(qkv[:, 4:6], qkv[:, 6:], k_expected, v_expected, slots)
    assert torch.equal(q, qkv[:, :4])
    assert torch.equal(k_cache, k_expected) and torch.equal(v_cache, v_expected)


@pytest.mark.gpu
def test_pages_beyond_2_to_the_31_elements():
    from cbatch.kernels.rope import rope_and_store

    pool = torch.empty(2**31 // (2 * 64 * 8 * 128) + 2, 2, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    qkv = random(1, (8 + 2 * 8) * 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([len(pool) * 64 - 1], dtype=torch.int32, device="cuda")
    q = rope_and_store(qkv, 8, 8, slots, None, None, EPS, pool[:, 0], pool[:, 1], slots)
    assert torch.equal(torch.cat([q[0], pool[-1, 0, -1], pool[-1, 1, -1]]).flatten(), qkv[0])


def test_the_twin_turns_as_transformers_does():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    qkv, positions, table, _ = inputs(4, 2, 16, 16, "cpu", torch.float32)
    cos, sin = (part.repeat(1, 2)[None] for part in table[positions].chunk(2, dim=1))
    q, k = (part.transpose(0, 1)[None] for part in (qkv[:, :4], qkv[:, 4:6]))
    expected = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(q, k, cos, sin)]
    reference.qk_norm_rope(qkv[:, :6], 4, positions, table, None, EPS)
    torch.testing.assert_close(qkv[:, :6], torch.cat(expected, dim=1), rtol=1e-6, atol=1e-6)


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
