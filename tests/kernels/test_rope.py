"""Rotary positions and the norm of heads against their twin in ``reference``, and that against transformers."""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels import reference
from tests.kernels.targets import assert_rounded, random, run_under_the_interpreter, targets

EPS = 1e-6
MAX_LEN = 50


def inputs(num_heads, num_kv_heads, head_dim, rotary_dim, device, dtype, num_tokens=7):
    """A fused projection with values behind the keys, positions out of order, a table, and weights of both norms."""
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=dtype)
    positions = torch.tensor([0, 49, 3, 4, 5, 0, 17], device=device)[:num_tokens]
    angles = torch.arange(MAX_LEN)[:, None] * 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    weights = 1 + 0.3 * random(2, head_dim, device=device, dtype=torch.float32, seed=1)
    return qkv, positions, table, weights


@targets
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, rotary_dim",
    [(4, 2, 16, 16), (9, 3, 64, 64), (32, 8, 128, 128), (3, 1, 80, 20), (2, 2, 96, 48), (8, 4, 256, 256), (4, 4, 6, 2)],
)
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
