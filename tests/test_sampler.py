"""Sampled tokens follow the distribution that was asked for, and depend on nothing but seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.buffers import IOBuffer
from cbatch.kernels import reference, slot_layout
from cbatch.kernels.reference import gumbel
from cbatch.sampler import FILTERED, LOGPROBS, NUM_PARAMS, PROCESSED, RANDOM, Encoded, drawing, encode
from cbatch.sampling_params import MAX_LOGPROBS, SamplingParams
from cbatch.scheduler.plan import Bucket, StepShape


def encoded(params: SamplingParams, seed: int) -> Encoded:
    return encode(params, seed, prompt_len=1, stop_ids=(), bad_word_ids=())


def sample(logits: Tensor, params: Tensor, positions: Tensor, flags: int) -> Tensor:
    """Tokens of rows whose params and positions are given row by row."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    last_tokens, sampled = rows.clone(), rows.clone()
    if flags & RANDOM:
        filtered = bool(flags & FILTERED)
        reference.draw(logits, params, positions - 1, rows, rows, last_tokens, sampled, filtered=filtered)
    else:
        reference.greedy(logits, rows, last_tokens, sampled)
    assert torch.equal(last_tokens, sampled)
    return sampled


def draw(logits: Tensor, params: SamplingParams, seed: int = 1, positions: int = 1) -> np.ndarray:
    """Tokens at ``positions`` successive positions from one row of logits."""
    asked = encoded(params, seed)
    rows = torch.from_numpy(np.tile(asked.param_values, (positions, 1)))
    return sample(logits.expand(positions, -1), rows, torch.arange(positions, dtype=torch.int32), asked.flags).numpy()


def expected(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """The distribution, the slow way in float64: temperature, top-k, the smallest set that reaches top_p, min-p."""
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or len(p)]] = True
    p = np.where(keep, p, 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    keep[order[before >= top_p]] = False
    p = np.where(keep & (p >= min_p * p.max()), p, 0)
    return p / p.sum()


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Upper tail of the chi-square statistic (Wilson and Hilferty's normal approximation; bins under 5 are joined)."""
    expected_counts = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0, "a token outside the kept set was drawn"
    big = expected_counts >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected_counts[big], expected_counts[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic, dof = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    if dof == 0:
        return 1.0
    z = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 20, 0.6, 0.0),
        (0.7, 3, 0.95, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 12, 1.0, 0.05),
        (0.8, 0, 0.9, 0.02),
        (2.0, 30, 0.9, 0.2),
    ],
)
def test_hundred_thousand_draws_follow_the_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(7)) * 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = np.bincount(draw(logits, params, seed=123, positions=100_000), minlength=64)
    assert chi_square_p(counts, expected(logits[0], temperature, top_k, top_p, min_p)) > 1e-3


def test_seeds_are_as_independent_as_positions() -> None:
    """Neighbouring seeds and positions must not give shifted copies of one noise: pairs of draws are uncorrelated."""
    rows = 2000
    seeds = torch.stack([torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)], 1)
    noise = gumbel(seeds, torch.full((rows,), 5, dtype=torch.int32), 50)
    by_position = gumbel(seeds[:1].expand(rows, -1), torch.arange(rows, dtype=torch.int32), 50)
    for values in (noise, by_position):
        correlation = np.corrcoef(values[:-1].flatten(), values[1:].flatten())[0, 1]
        shifted = np.corrcoef(values[:-1, 1:].flatten(), values[1:, :-1].flatten())[0, 1]
        assert abs(correlation) < 0.015 and abs(shifted) < 0.015  # 1e5 pairs: one sigma is 0.003
        assert abs(values.mean().item() - 0.5772) < 0.02


def test_same_seed_draws_the_same_in_any_batch() -> None:
    """Alone, beside greedy and filtered neighbours, in another row: the noise knows seed and position only."""
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.0, top_k=10),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1.5, min_p=0.1),
    ]
    rows = [encoded(p, 40 + i) for i, p in enumerate(asked)]
    positions = torch.tensor([3, 1, 4, 1, 5, 9], dtype=torch.int32)
    together = sample(logits, torch.from_numpy(np.stack([e.param_values for e in rows])), positions, RANDOM | FILTERED)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], torch.from_numpy(row.param_values[None]), positions[i : i + 1], row.flags)
        assert alone.item() == together[i].item()
    assert together[0] == logits[0].argmax() and together[4] == logits[4].argmax()


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_tiny_temperature_is_greedy_and_never_nan(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(2)) * 20
    for i in range(64):
        token = draw(logits[i : i + 1], SamplingParams(temperature=temperature, **filters), seed=i)
        assert token[0] == logits[i].argmax()


def test_top_k_over_the_vocabulary_keeps_all_and_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [3, 30]] = torch.tensor([1.0, 2.0])
    plain = draw(logits, SamplingParams(temperature=1.0), positions=200)
    assert set(plain.tolist()) == {3, 30}
    assert (draw(logits, SamplingParams(temperature=1.0, top_k=10_000), positions=200) == plain).all()
    assert (draw(logits, SamplingParams(temperature=1.0, top_k=2**40), positions=200) == plain).all()
    for top_p in (1e-9, 1e-300):  # the second is 0 as a float32
        assert set(draw(logits, SamplingParams(temperature=1.0, top_p=top_p), positions=50).tolist()) == {30}


def test_greedy_rows_beside_sampled_ones_are_the_argmax_of_what_is_finite() -> None:
    """A step that draws for one row scales all of them: divided by a temperature of 0, one has no argmax any more."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    logits[:, ::2] = -torch.inf
    logits[1] = logits[1].where(torch.arange(300) == 77, -torch.inf)
    logits[2] = -torch.inf
    asked = [
        *[SamplingParams(temperature=0.0)] * 3,
        SamplingParams(top_k=1),
        SamplingParams(),
        SamplingParams(top_p=0.5),
    ]
    rows = torch.from_numpy(np.stack([encoded(params, 3 + i).param_values for i, params in enumerate(asked)]))
    for flags in (RANDOM, RANDOM | FILTERED):
        tokens = sample(logits, rows, torch.arange(1, 7, dtype=torch.int32), flags)
        assert tokens[:4].tolist() == logits[:4].argmax(-1).tolist()
        assert torch.isfinite(logits[range(4, 6), tokens[4:].long()]).all()


def test_noise_is_finite_and_no_filter_is_ever_left() -> None:
    """With 24 random bits and a half the largest uniform rounded to 1, once in 340 draws of a 49,152-token vocabulary:
    infinite noise, which beat every logit and, as nan, every filter."""
    seed = torch.tensor([[712723, 90]], dtype=torch.int32)
    assert torch.isfinite(gumbel(seed, torch.tensor([10], dtype=torch.int32), 49_152)).all()
    logits = torch.randn(1, 49_152, generator=torch.Generator().manual_seed(3))
    best = set(logits[0].topk(2).indices.tolist())
    for seed_ in range(4):
        assert set(draw(logits, SamplingParams(temperature=0.7, top_k=2), seed_, positions=300).tolist()) <= best


def test_min_p_of_one_keeps_the_largest_and_one_too_small_for_a_float_keeps_all() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4))
    logits[0, [7, 90]] = 9.0
    assert set(draw(logits, SamplingParams(min_p=1.0), positions=200).tolist()) == {7, 90}
    plain = draw(logits, SamplingParams(), positions=200)
    assert (draw(logits, SamplingParams(min_p=1e-300), positions=200) == plain).all()


def test_huge_temperature_is_uniform() -> None:
    """1e38 times the noise overflowed, and drew one token most of the time."""
    counts = np.bincount(draw(torch.randn(1, 10), SamplingParams(temperature=1e300), positions=5000), minlength=10)
    assert chi_square_p(counts, np.full(10, 0.1)) > 1e-3


def test_unfiltered_row_is_not_cut_beside_a_filtered_one() -> None:
    """The running sum of probabilities rounds to 1 early: rows that keep all must not be cut there."""
    logits = torch.linspace(0, -30, 49_152)[None]
    asked = encoded(SamplingParams(temperature=1.0), 5)
    rows, positions = torch.from_numpy(np.tile(asked.param_values, (300, 1))), torch.arange(300, dtype=torch.int32)
    alone = sample(logits.expand(300, -1), rows, positions, asked.flags)
    assert torch.equal(sample(logits.expand(300, -1), rows, positions, RANDOM | FILTERED), alone)


def test_negative_and_large_seeds_are_distinct() -> None:
    logits = torch.zeros(1, 1000)
    draws = {seed: tuple(draw(logits, SamplingParams(), seed, 8)) for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))}
    assert len(set(draws.values())) == len(draws)


def test_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    draw(torch.zeros(1, 100), SamplingParams(top_p=0.9), positions=10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("asked", "flags", "way"),
    [
        ({"temperature": 0.0}, 0, 0),
        ({"top_k": 1}, 0, 0),
        ({}, RANDOM, RANDOM),
        ({"top_k": 5}, RANDOM | FILTERED, RANDOM | FILTERED),
        ({"top_p": 0.5, "logprobs": 0}, RANDOM | FILTERED | LOGPROBS, RANDOM | FILTERED),
        ({"min_p": 0.5}, RANDOM | FILTERED, RANDOM | FILTERED),
        ({"temperature": 0.0, "min_p": 0.5, "logprobs": 3}, LOGPROBS, 0),
        ({"temperature": 0.0, "presence_penalty": 0.1}, PROCESSED, PROCESSED),
        ({"repetition_penalty": 1.1, "top_k": 5}, RANDOM | FILTERED | PROCESSED, PROCESSED),
        ({"allowed_token_ids": [3]}, RANDOM | PROCESSED, PROCESSED),
        ({"logit_bias": {3: 1.0}}, RANDOM | PROCESSED, PROCESSED),
        ({"min_tokens": 2}, RANDOM | PROCESSED, PROCESSED),
    ],
    ids=str,
)
def test_a_request_brings_the_flags_of_what_it_asks_for(asked: dict, flags: int, way: int) -> None:
    """What a step does is the OR of them: a greedy batch runs the greedy graph and nothing else."""
    got = encode(SamplingParams(**asked), 3, prompt_len=4, stop_ids=(2,), bad_word_ids=())
    assert (got.flags, drawing(got.flags)) == (flags, way)
    assert (got.upload is not None) == bool(flags & PROCESSED) and got.param_values.shape == (NUM_PARAMS,)


def test_without_stop_tokens_min_tokens_is_nothing_to_do_and_a_bad_word_is() -> None:
    params = SamplingParams(min_tokens=2)
    assert encode(params, 3, prompt_len=4, stop_ids=(), bad_word_ids=()).flags == RANDOM
    assert encode(params, 3, prompt_len=4, stop_ids=(), bad_word_ids=[[5]]).flags == RANDOM | PROCESSED


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_a_penalty_beyond_float32_leaves_logits_numbers(penalty: float) -> None:
    words = encoded(SamplingParams(repetition_penalty=penalty), 1).param_values
    value = words[slot_layout.REPETITION : slot_layout.REPETITION + 1].view(np.float32)[0]
    assert np.isfinite(np.float32(1000) / value) and np.isfinite(np.float32(-1000) * value)


def test_logprobs_come_back_behind_the_tokens_and_only_if_they_are_wanted() -> None:
    """One copy carries what a step needs: the tokens, or the tokens and the records of its rows."""
    limit = Bucket(64, 16)
    io = IOBuffer(StepShape(1, 16, NUM_PARAMS), limit, Bucket, torch.device("cpu"), max_spare_words=0, vocab_size=100)
    io.host_batch(8, 4)
    assert io.d2h[0].numel() == io.d2h[1].numel() == 16
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(6))
    io.device_landing.sampled[:4] = torch.tensor([9, 8, 7, 6])
    reference.logprobs(logits, io.device_landing.sampled, io.device_landing.records)
    io.lands_logprobs = True
    on_host, on_device = io.d2h
    assert on_host.numel() == on_device.numel() < 16 + 5 * (2 * MAX_LOGPROBS + 4)
    on_host.copy_(on_device)
    ids, values, ranks = io.logprobs(4)
    assert ids.shape == values.shape == (4, 1 + MAX_LOGPROBS) and ids[:, 0].tolist() == [9, 8, 7, 6]
    np.testing.assert_allclose(values, logits.log_softmax(-1).gather(1, torch.from_numpy(ids).long()), rtol=1e-6)
    assert ranks.tolist() == [int((row > row[token]).sum()) + 1 for row, token in zip(logits, ids[:, 0], strict=True)]
