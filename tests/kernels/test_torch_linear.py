"""The CPU's linear layer, with weights packed and not, against its twin in ``reference``."""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels import reference
from cbatch.kernels.torch_linear import linear, linear_act, pack
from tests.kernels.targets import assert_rounded, random

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
packed = pytest.mark.parametrize("prepare", [pack, lambda weight: weight], ids=["packed", "plain"])


@dtypes
@packed
@pytest.mark.parametrize("num_rows", [0, 1, 7, 32, 65])
@pytest.mark.parametrize(("k", "n"), [(64, 96), (40, 1), (1, 3), (576, 49)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype, prepare, num_rows, k, n, with_bias):
    x = random(num_rows, k, device="cpu", dtype=dtype)
    weight = random(n, k, device="cpu", dtype=dtype, seed=1) / k**0.5
    bias = random(n, device="cpu", dtype=dtype, seed=2) if with_bias else None
    assert_rounded(linear(x, prepare(weight), bias), reference.linear(x, weight, bias))


@dtypes
@packed
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_act(dtype, prepare, act, gated):
    x = random(5, 64, device="cpu", dtype=dtype)
    weight = random(96, 64, device="cpu", dtype=dtype, seed=1) / 8
    bias = random(96, device="cpu", dtype=dtype, seed=2)
    actual = linear_act(x, prepare(weight), bias, act, gated=gated)
    expected = reference.linear_act(x.double(), weight.double(), bias.double(), act, gated=gated)
    assert actual.dtype == dtype and actual.shape == expected.shape
    # The sum is rounded before the activation, which relu2 squares.
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@packed
def test_operands_as_a_model_leaves_them(prepare):
    """Rows of a wider matrix, and the weight of a layer that keeps it transposed (GPT-2's)."""
    x, weight = (
        random(7, 128, device="cpu", dtype=torch.float32)[:, :64],
        random(64, 96, device="cpu", dtype=torch.float32, seed=1).t(),
    )
    assert_rounded(linear(x, prepare(weight)) / 8, reference.linear(x, weight) / 8)


def test_a_packed_weight_tells_its_facts_and_is_a_copy():
    """The decoder counts its weights' bytes, and follows nobody's training."""
    weight = random(96, 64, device="cpu", dtype=torch.float32)
    x = random(3, 64, device="cpu", dtype=torch.float32, seed=1)
    held, expected = pack(weight), reference.linear(x, weight)
    facts = [(w.shape, w.dtype, w.device, w.nbytes) for w in (held, weight)]
    assert facts[0] == facts[1]
    if held is not weight:
        weight.zero_()
    torch.testing.assert_close(linear(x, held), expected)


def test_what_is_not_known_to_gain_is_left_alone(monkeypatch):
    """Half precision has no oneDNN kernels on most CPUs: packing it raises. Other machines were not measured."""
    for dtype in (torch.float16, torch.float64):
        weight = torch.ones(8, 8, dtype=dtype)
        assert pack(weight) is weight
    weight = torch.ones(8, 8)
    for call, answer in (("cpu.get_cpu_capability", "DEFAULT"), ("mkldnn.is_available", False)):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.backends.{call}", lambda answer=answer: answer)
            assert pack(weight) is weight
