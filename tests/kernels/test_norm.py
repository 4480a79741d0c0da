"""The norms against their twins in ``reference``, and those against float64 by hand."""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels import reference
from tests.kernels.targets import assert_rounded, random, run_under_the_interpreter, targets

EPS = 1e-5
SHAPES = [(1, 64), (5, 576), (3, 1000), (2, 4096), (0, 64)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def inputs(shape, device, dtype):
    """x, residual, and two weights and a bias away from their defaults.

    x comes last: weights are read before the wait for the kernel before, which must not be the one that made them.
    """
    vectors = [random(shape[1], device=device, dtype=torch.float32, seed=seed) for seed in (3, 4, 5)]
    weight, bias, post_weight = 1 + 0.3 * vectors[0], 0.3 * vectors[1], 1 + 0.3 * vectors[2]
    residual = 2 * random(*shape, device=device, dtype=dtype, seed=2)
    x = 3 * random(*shape, device=device, dtype=dtype, seed=1) + 1
    return x, residual, weight, bias, post_weight


def parts_of(num_splits, shape, device):
    """What a matrix product split so leaves: float32, whose sum depends on the order."""
    return 2 * random(num_splits, *shape, device=device, dtype=torch.float32, seed=6) + 1


@targets
@shapes
def test_rms_norm(device, dtype, shape):
    from cbatch.kernels import norm

    x, _, weight, _, _ = inputs(shape, device, dtype)
    assert_rounded(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@targets
def test_rms_norm_in_place_of_a_slice_leaves_the_rest_alone(device, dtype):
    from cbatch.kernels import norm

    fused = random(6, 200, device=device, dtype=dtype)
    before, part = fused.clone(), fused[:, 32:128]
    weight = 1 + random(96, device=device, dtype=torch.float32)
    expected = reference.rms_norm(part, weight, EPS)
    assert norm.rms_norm(part, weight, EPS, out=part) is part
    assert_rounded(fused[:, 32:128], expected)
    assert torch.equal(fused[:, :32], before[:, :32]) and torch.equal(fused[:, 128:], before[:, 128:])


@targets
@shapes
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(device, dtype, shape, has_bias):
    from cbatch.kernels import norm

    x, _, weight, bias, _ = inputs(shape, device, dtype)
    bias = bias if has_bias else None
    assert_rounded(norm.layer_norm(x, weight, bias, EPS), reference.layer_norm(x, weight, bias, EPS))


@targets
@shapes
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add_rms_norm(device, dtype, shape, post, normed, scale):
    from cbatch.kernels import norm

    x, residual, weight, _, post_weight = inputs(shape, device, dtype)
    options = {"scale": scale, "post_weight": post_weight if post else None}
    got = norm.add_rms_norm(x, residual, weight if normed else None, EPS, **options)
    total = reference.add_rms_norm(x, residual, None, EPS, **options)[1]
    assert_rounded(got[1], total)
    # Behind the sum that was rounded here, which may be the neighbour of the one rounded there.
    assert_rounded(got[0], reference.rms_norm(got[1], weight, EPS) if normed else got[1])


@targets
@shapes
def test_add_layer_norm(device, dtype, shape):
    from cbatch.kernels import norm

    x, residual, weight, bias, _ = inputs(shape, device, dtype)
    got = norm.add_layer_norm(x, residual, weight, bias, EPS, scale=0.5)
    assert_rounded(got[1], reference.add_layer_norm(x, residual, weight, bias, EPS, scale=0.5)[1])
    assert_rounded(got[0], reference.layer_norm(got[1], weight, bias, EPS))


@targets
@pytest.mark.parametrize("shape", [(0, 64), (5, 576), (2, 4096)], ids=str)
@pytest.mark.parametrize("num_splits, post", [(1, False), (2, True), (4, False)])
def test_parts_of_a_product_are_added_up_before_the_sum(device, dtype, shape, num_splits, post):
    from cbatch.kernels import norm

    _, residual, weight, bias, post_weight = inputs(shape, device, dtype)
    x = parts_of(num_splits, shape, device)
    options = {"scale": 0.22, "post_weight": post_weight if post else None}
    total = reference.add_rms_norm(x, residual, None, EPS, **options)[1]
    assert_rounded(norm.add_rms_norm(x, residual, None, EPS, **options)[0], total)
    got = norm.add_rms_norm(x, residual, weight, EPS, **options)
    assert_rounded(got[1], total)
    assert_rounded(got[0], reference.rms_norm(got[1], weight, EPS))
    got = norm.add_layer_norm(x, residual, weight, bias, EPS)
    assert_rounded(got[1], reference.add_layer_norm(x, residual, weight, bias, EPS)[1])
    assert_rounded(got[0], reference.layer_norm(got[1], weight, bias, EPS))


@targets
def test_parts_are_added_in_their_order_and_not_rounded(device, dtype):
    """Of (1 + 2^-12) - 1 half precision would keep nothing, and 2^25 + 1 - 2^25 is 0 in this order only."""
    from cbatch.kernels import norm

    x = torch.tensor([[1 + 2**-12, 2.0**25], [-1.0, 1.0], [0.0, -(2.0**25)]], device=device)[:, None]
    got = norm.add_rms_norm(x, torch.zeros(1, 2, dtype=dtype, device=device), None, EPS)[1]
    assert got.tolist() == [[2**-12, 0.0]]


@targets
@pytest.mark.parametrize("index_dtype, num_splits", [(torch.int64, 0), (torch.int32, 4)], ids=str)
@pytest.mark.parametrize("rows", [[4, 0, 4], [2], []], ids=str)
def test_rows_are_computed_alone_in_the_order_asked_for(device, dtype, rows, index_dtype, num_splits):
    from cbatch.kernels import norm

    x, residual, weight, bias, post_weight = inputs((5, 96), device, dtype)
    x = parts_of(num_splits, (5, 96), device) if num_splits else x
    index = torch.tensor(rows, dtype=index_dtype, device=device)
    for got, all_rows in (
        (
            norm.add_rms_norm(x, residual, weight, EPS, post_weight=post_weight, rows=index),
            norm.add_rms_norm(x, residual, weight, EPS, post_weight=post_weight),
        ),
        (
            norm.add_layer_norm(x, residual, weight, bias, EPS, rows=index),
            norm.add_layer_norm(x, residual, weight, bias, EPS),
        ),
    ):
        assert torch.equal(got[0], all_rows[0][index]) and torch.equal(got[1], all_rows[1][index])


def test_the_twins_do_what_they_say():
    x, residual, weight, bias, post_weight = (t.double() for t in inputs((4, 48), "cpu", torch.float32))

    def rms(value, by):
        return value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * by

    rows = torch.tensor([3, 1])
    total = (residual + 0.3 * rms(x, post_weight))[rows]
    single = [t.float() for t in (x, residual, weight, bias, post_weight)]
    got = reference.add_rms_norm(*single[:3], EPS, scale=0.3, post_weight=single[4], rows=rows)
    assert_rounded(got[1], total.float())
    assert_rounded(got[0], rms(total, weight).float())

    total = residual + 0.3 * x
    normed = (total - total.mean(-1, keepdim=True)) / (total.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    got = reference.add_layer_norm(*single[:4], EPS, scale=0.3)
    assert_rounded(got[1], total.float())
    assert_rounded(got[0], (normed * weight + bias).float())

    parts = torch.stack([single[0] - 3, torch.full_like(single[0], 3)])
    got = reference.add_layer_norm(parts, single[1].bfloat16(), *single[2:4], EPS, scale=0.3, rows=rows.int())
    assert_rounded(got[1], (single[1].bfloat16().double() + 0.3 * x).bfloat16()[rows])
    assert_rounded(got[0], reference.layer_norm(got[1], *single[2:4], EPS))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements():
    from cbatch.kernels import norm

    x = torch.empty(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(4096, device="cuda")
    x[-1] = random(4096, device="cuda", dtype=torch.bfloat16)
    assert_rounded(norm.rms_norm(x, weight, EPS)[-1:], reference.rms_norm(x[-1:], weight, EPS))


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
