"""How a request wants its tokens, as words for the device; and the operations that open and end a step there.

The noise is a stateless function of (seed, position, token), so a request draws the same tokens in any batch, on any
schedule and after any preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels import reference
from cbatch.sampling_params import SamplingParams

MIN_TOP_P = 1e-30  # keeps the largest logit alone; far below, it would round to 0, which keeps none
MAX_TEMPERATURE = 1e6  # uniform already over any logits; far above, its product with the noise would overflow
NUM_PARAMS = 5  # int32 words of a slot: temperature and top_p as float bits, top_k, two halves of the seed
RANDOM, FILTERED = 1, 2  # flags of a request, OR-ed over a step: a step runs only what some row needs


def encode(params: SamplingParams, seed: int) -> tuple[NDArray[np.int32], int]:
    """A request's sampling state as ``NUM_PARAMS`` int32 words, and its flags. ``seed`` is any 64-bit integer."""
    words = np.zeros(NUM_PARAMS, np.int32)
    if params.greedy:
        return words, 0
    words[:2].view(np.float32)[:] = min(params.temperature, MAX_TEMPERATURE), max(params.top_p, MIN_TOP_P)
    words[2] = min(params.top_k, 2**31 - 1)
    words[3:] = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
    return words, RANDOM | (FILTERED if params.top_k or params.top_p < 1 else 0)


@dataclass(frozen=True)
class StepOps:
    """What a step does besides the model. Signatures and meaning are those in ``reference``; nothing waits."""

    begin_step: Callable[..., Tensor]
    greedy: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    draw: Callable[..., None]


def make_step_ops(device: torch.device) -> StepOps:
    """Triton on CUDA, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type != "cuda":
        return StepOps(reference.begin_step, reference.greedy, reference.draw)
    from cbatch.kernels import sampling

    return StepOps(sampling.begin_step, sampling.greedy, sampling.draw)
