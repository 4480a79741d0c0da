"""Draws tokens from logits, on the device and without waiting: greedy, temperature, top-k, top-p, seeded.

The noise is a stateless function of (seed, position, token), so a request draws the same tokens in any batch, on any
schedule and after any preemption.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.sampling_params import SamplingParams

MAX_TEMPERATURE = 1e6  # uniform already over any logits; far above, its product with the noise would overflow
NUM_PARAMS = 5  # int32 words of a slot: temperature and top_p as float bits, top_k, two halves of the seed
RANDOM, FILTERED = 1, 2  # flags of a request, OR-ed over a step: a step runs only what some row needs


def encode(params: SamplingParams, seed: int) -> tuple[NDArray[np.int32], int]:
    """A request's sampling state as ``NUM_PARAMS`` int32 words, and its flags. ``seed`` is any 64-bit integer."""
    words = np.zeros(NUM_PARAMS, np.int32)
    if params.greedy:
        return words, 0
    words[:2].view(np.float32)[:] = (min(params.temperature, MAX_TEMPERATURE), params.top_p)
    words[2] = min(params.top_k, 2**31 - 1)
    words[3:] = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
    return words, RANDOM | (FILTERED if params.top_k or params.top_p < 1 else 0)


def sample(
    logits: Tensor,  # [num_samples, vocab_size]
    params: Tensor,  # [num_samples, NUM_PARAMS] int32
    positions: Tensor,  # [num_samples] int32: where the drawn token will stand
    flags: int,
) -> Tensor:
    """The next token of each row, int32 ``[num_samples]``. Rows of temperature 0 take the first largest logit."""
    greedy = logits.argmax(dim=-1).int()
    if not flags & RANDOM:
        return greedy
    logits = logits.float()
    temperature = params[:, 0].view(torch.float32)
    if flags & FILTERED:
        logits = _keep_top(logits, temperature, params[:, 2], params[:, 1].view(torch.float32))
    # argmax(logits / t + g) without the division: a temperature of 1e-7 cannot overflow (Gumbel-max trick).
    noise = gumbel(params[:, 3:], positions, logits.shape[-1])
    drawn = noise.mul_(temperature[:, None]).add_(logits).argmax(dim=-1).int()
    return torch.where(temperature > 0, drawn, greedy)


def _keep_top(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with -inf outside the top k and outside the smallest set of probability top_p, in that order.

    Both cuts are thresholds on the logit, so tokens that tie with the last one kept are kept too. Sorts.
    """
    vocab_size = logits.shape[-1]
    ranked = logits.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()
    rank = torch.arange(vocab_size, device=logits.device)
    # Relative to the largest before dividing: at temperature 1e-7 the rest goes to -inf, never to nan.
    scaled = (ranked - ranked[:, :1]) / temperature.clamp(min=1e-30)[:, None]
    scaled = scaled.masked_fill_(rank >= k[:, None], -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    # A row that asks for all keeps all: rounding in the sum must not cut what its neighbours' filters look at.
    in_p = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept = (in_p & (rank < k[:, None])).sum(dim=-1, keepdim=True)
    threshold = ranked.gather(1, kept.clamp(min=1) - 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise ``[rows, vocab_size]`` (float32) from seeds ``[rows, 2]`` and positions ``[rows]``, int32.

    Two rounds of MurmurHash3's 32-bit finaliser (Appleby, 2011) over the token, each keyed from seed and position:
    with one, the noise of two rows would be shifts of each other along the vocabulary.
    """
    low, high = seeds[:, 0], seeds[:, 1]
    first = _mix(_mix(positions * -1640531527 + low) ^ high)  # 0x9E3779B9, the golden ratio of 2**32
    second = _mix(_mix(positions ^ high) + low * -2048144789)
    token = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = _mix((token * -1640531527)[None, :] + first[:, None])
    bits = _mix(bits ^ second[:, None])
    # 23 bits and a half: the largest is 1 - 2**-24. With 24 it would round to 1, whose noise is infinite.
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """The finaliser on int32 (wrapping), in place on a fresh tensor."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x.mul_(-2048144789)
    x ^= (x >> 13) & 0x7FFFF
    x = x.mul_(-1028477387)
    x ^= (x >> 16) & 0xFFFF
    return x
