"""Activations against their twins in ``reference``, and those against transformers' own."""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels import reference
from tests.kernels.targets import assert_rounded, random, run_under_the_interpreter, targets

# Far from zero the kernels count on 1 / (inf + 1) = 0; numpy, which stands for the GPU in the interpreter, mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
acts = pytest.mark.parametrize("act", reference.ACTIVATIONS)
shapes = pytest.mark.parametrize("shape", [(1, 16), (3, 1536), (5, 1100), (0, 16)], ids=str)


@targets
@acts
@shapes
def test_act_and_mul(device, dtype, act, shape):
    from cbatch.kernels.activation import act_and_mul

    x = 4 * random(shape[0], 2 * shape[1], device=device, dtype=dtype)
    assert_rounded(act_and_mul(x, act), reference.act_and_mul(x, act))


@targets
@acts
@shapes
def test_activate(device, dtype, act, shape):
    from cbatch.kernels.activation import activate

    x = 4 * random(*shape, device=device, dtype=dtype)
    assert_rounded(activate(x, act), reference.activate(x, act))


@targets
@acts
def test_both_ends_are_finite(device, dtype, act):
    from cbatch.kernels.activation import activate

    x = torch.tensor([[-3e4, -200.0, -89.0, -1e-30, 0.0, 1e-30, 89.0, 200.0]], device=device).to(dtype)
    assert_rounded(activate(x, act), reference.activate(x, act))


@pytest.mark.parametrize(
    ("act", "theirs"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_new"),
        ("gelu_tanh", "gelu_fast"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
    ],
)
def test_the_twins_are_what_transformers_calls_so(act, theirs):
    from transformers.activations import ACT2FN

    x = torch.linspace(-8, 8, 100)[None]
    torch.testing.assert_close(reference.activate(x, act), ACT2FN[theirs](x), rtol=1e-5, atol=1e-6)
    both = torch.cat([x, x.flip(1)], dim=1)
    torch.testing.assert_close(reference.act_and_mul(both, act), ACT2FN[theirs](x) * x.flip(1), rtol=1e-5, atol=1e-5)


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
