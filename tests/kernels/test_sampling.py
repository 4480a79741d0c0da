"""What opens and ends a step against its twins in ``reference``, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.kernels import reference
from cbatch.sampler import encode
from cbatch.sampling_params import SamplingParams
from tests.kernels.targets import INTERPRETED, random, run_under_the_interpreter, targets

# The interpreter computes with numpy, which warns of what is meant here: -inf, times 0 too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCABULARIES = [7, 10007] if INTERPRETED else [7, 1000, 49152, 50257, 128256, 151936, 262144]
vocabularies = pytest.mark.parametrize("vocab", VOCABULARIES)

ASKED = [  # neighbours in one batch
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.0, top_k=10),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=2, top_p=0.999),
    SamplingParams(temperature=1e-7, top_p=0.9),
    SamplingParams(temperature=1e6, top_p=0.3),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=3000, top_p=0.8),  # more than the largest logits of the lanes can tell
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=200, top_p=0.99, min_p=0.01),
]


def params_of(asked: list[SamplingParams], device: str) -> Tensor:
    """[len(asked) + 1, NUM_PARAMS]: one slot each, and the dummy, which asks for something too."""
    words = [
        encode(params, 40 + i, prompt_len=1, stop_ids=(), bad_word_ids=()).param_values
        for i, params in enumerate([*asked, ASKED[4]])
    ]
    return torch.from_numpy(np.stack(words)).to(device)


def tokens_of(
    ops, logits: Tensor, params: Tensor, slots: list[int], positions: list[int], *, draw: bool = True, filtered: bool
) -> list[int]:
    """What ``ops`` chooses; checks where it puts it. The token of a row stands at another index than the row."""
    count = len(slots)
    rows = torch.arange(count, dtype=torch.int32, device=logits.device)
    places = torch.zeros(2 * count, dtype=torch.int32, device=logits.device)
    places[1::2] = torch.tensor(positions, dtype=torch.int32) - 1
    last_tokens, sampled = torch.full((len(params),), -1, dtype=torch.int32, device=logits.device), rows - count - 2
    sampled = torch.cat([sampled, sampled[:1]])
    out_slots = torch.tensor(slots, dtype=torch.int32, device=logits.device)
    if draw:
        where = (places, 2 * rows + 1, out_slots)
        ops.draw(logits, params, *where, last_tokens, sampled, filtered=filtered)
    else:
        ops.greedy(logits, out_slots, last_tokens, sampled)
    assert sampled[count] == -count - 2
    assert last_tokens[out_slots].tolist() == sampled[:count].tolist()
    assert (last_tokens == -1).sum() == len(params) - len(set(slots))
    return sampled[:count].tolist()


@targets
@pytest.mark.parametrize("sizes", [(1, 0, 0), (5, 0, 1), (33, 300, 33), (600, 17, 4)], ids=str)
def test_begin_step(device, dtype, sizes):
    from cbatch.kernels import sampling

    num_tokens, num_updates, num_new = sizes
    dice = torch.Generator().manual_seed(1)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=dice, dtype=torch.int32).to(device)

    def distinct(high, count):
        return torch.randperm(high, generator=dice)[:count].int().to(device)

    last_tokens = integers(1000, 40)
    carry_slots = integers(60, num_tokens) - 20  # a third of them negative
    updates = distinct(40 * 25, num_updates), integers(99, num_updates)
    new = distinct(40, num_new), integers(10**6, num_new, 5)
    results = []
    for ops in (sampling, reference):
        tables, params = torch.zeros(40 * 25, dtype=torch.int32, device=device), new[1].new_zeros(40, 5)
        ids = ops.begin_step(
            torch.arange(num_tokens, dtype=torch.int32, device=device) + 5000, carry_slots, last_tokens,
            tables, *updates, params, *new,
        )  # fmt: skip
        results.append((ids, tables, params))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, expected)


@targets
@vocabularies
@pytest.mark.parametrize("rows", [1, 33])
def test_greedy_takes_the_first_of_the_largest(device, dtype, vocab, rows):
    from cbatch.kernels import sampling

    logits = (2 * random(rows, vocab, device=device, dtype=torch.float32)).round().to(dtype)  # ties by the dozen
    logits[0, : vocab // 2] = -torch.inf
    if rows > 1:
        logits[1] = -torch.inf
        logits[2] = torch.tensor([-0.0, 0.0]).repeat(vocab)[:vocab]
        logits[3, vocab // 3 :: 2] = torch.nan
        logits[4] = 3 - torch.arange(vocab)
        logits[5] = torch.arange(vocab)  # in 16 bits, many round to the largest
    params, slots = params_of([ASKED[0]] * rows, device), list(reversed(range(rows)))
    chosen = tokens_of(sampling, logits, params, slots, [1] * rows, draw=False, filtered=False)
    assert chosen == logits.argmax(-1).tolist()
    wide = torch.cat([logits, torch.full_like(logits, torch.inf)], 1)[:, :vocab]  # a padded vocabulary, cut off
    assert tokens_of(sampling, wide, params, slots, [1] * rows, draw=False, filtered=False) == chosen


@targets
@vocabularies
@pytest.mark.parametrize("spread", [3.0] if INTERPRETED else [1.0, 5.0])
def test_mixed_rows_draw_as_the_twin_does(device, dtype, vocab, spread):
    from cbatch.kernels import filters, sampling

    rows = len(ASKED)
    logits, params = spread * random(rows, vocab, device=device, dtype=dtype), params_of(ASKED, device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    cuts = filters.thresholds(logits, params, slots), reference.thresholds(logits, params, slots)
    # A sum of 262,144 weights in another order may fall on the other side of top_p: by a token or two of float32.
    between = (logits >= torch.minimum(*cuts)[:, None]) & (logits < torch.maximum(*cuts)[:, None])
    assert between.sum(-1).max() <= (2 if dtype == torch.float32 else 0)
    for filtered in (True, False):
        options = {"positions": list(range(3, 3 + rows)), "filtered": filtered}
        chosen = tokens_of(sampling, logits, params, list(range(rows)), **options)
        assert chosen == tokens_of(reference, logits, params, list(range(rows)), **options)
        assert chosen[0] == logits[0].argmax()


@targets
@pytest.mark.parametrize("rows", [1, 33])
def test_noise_is_the_twins_at_every_position(device, dtype, rows):
    from cbatch.kernels import sampling

    params, vocab = params_of([SamplingParams(temperature=1.5)] * rows, device), 3 * 4096 + 5
    logits, slots = random(rows, vocab, device=device, dtype=dtype), [(5 * i) % rows for i in range(rows)]
    positions = [2**20 * i + 3 * i for i in range(rows)]
    chosen = tokens_of(sampling, logits, params, slots, positions, filtered=False)
    assert chosen == tokens_of(reference, logits, params, slots, positions, filtered=False)
    assert rows == 1 or len(set(chosen)) > rows // 2


@targets
@vocabularies
def test_logits_made_float32_have_the_thresholds_they_had(device, dtype, vocab):
    """Beside a row with penalties all rows become float32: a seed must draw the same tokens there."""
    from cbatch.kernels import filters

    logits, params = 3 * random(len(ASKED), vocab, device=device, dtype=dtype, seed=6), params_of(ASKED, device)
    slots = torch.arange(len(ASKED), dtype=torch.int32, device=device)
    assert torch.equal(filters.thresholds(logits, params, slots), filters.thresholds(logits.float(), params, slots))


@targets
def test_ties_with_the_last_one_stay_and_weigh_as_many_as_are_in_k(device, dtype):
    """Eight logits of 4, eight of 3, the rest 0. top_k=12 reaches into the second eight: all of those stay, but four
    count for top_p. The first eight weigh 8 / (8 + 4 / e) = 0.845 of those twelve, and 0.731 of all sixteen."""
    from cbatch.kernels import filters

    logits = torch.zeros(8, 5000, device=device, dtype=dtype)
    logits[:, 10:170:20], logits[:, 4500:4900:50] = 4, 3
    asked = [
        SamplingParams(temperature=1.0, top_k=k, top_p=p)
        for k, p in [(8, 1.0), (9, 1.0), (12, 0.8), (12, 0.86), (16, 0.74), (16, 0.72), (17, 1.0), (5000, 1.0)]
    ]
    slots = torch.arange(8, dtype=torch.int32, device=device)
    params, expected = params_of(asked, device), [4, 3, 4, 3, 3, 4, 0, -torch.inf]
    for ops in (filters, reference):
        assert ops.thresholds(logits, params, slots).tolist() == expected


@targets
def test_signs_infinities_and_constant_rows(device, dtype):
    from cbatch.kernels import filters, sampling

    vocab = 9000
    least = torch.finfo(dtype).min
    logits = torch.stack(
        [
            -1 - random(vocab, device=device, dtype=dtype).abs(),  # all negative
            torch.cat([torch.full((vocab - 3,), -torch.inf), torch.tensor([1.0, -torch.inf, 2.0])]).to(device, dtype),
            torch.full((vocab,), -torch.inf, device=device, dtype=dtype),
            torch.full((vocab,), -3.0, device=device, dtype=dtype),
            torch.cat([torch.tensor([0.0, -0.0, 1e-3, -1e-3]), torch.full((vocab - 4,), least)]).to(device, dtype),
            torch.tensor([-0.0, 0.0]).repeat(vocab // 2).to(device, dtype),
        ]
    )
    slots = torch.arange(len(logits), dtype=torch.int32, device=device)
    for params in (SamplingParams(min_p=0.1), SamplingParams(top_p=0.7), SamplingParams(top_k=5, top_p=0.7)):
        words = params_of([params] * len(logits), device)
        got, expected = (ops.thresholds(logits, words, slots) for ops in (filters, reference))
        assert torch.equal(logits >= got[:, None], logits >= expected[:, None])
    options = {"slots": slots.tolist(), "positions": [9] * len(logits), "filtered": True}
    tokens = tokens_of(sampling, logits, words, **options)
    assert tokens == tokens_of(reference, logits, words, **options)
    assert tokens[2] == 0


@targets
def test_a_row_has_the_same_bits_in_any_batch(device, dtype):
    """Alone, beside others, in another row, at another flag: its threshold and token are functions of the row."""
    from cbatch.kernels import filters, sampling

    rows, vocab = len(ASKED), 8 * 1000
    logits, params = 2 * random(rows, vocab, device=device, dtype=dtype), params_of(ASKED, device)
    positions, order = list(range(100, 100 + rows)), torch.randperm(rows).tolist()
    together = tokens_of(sampling, logits, params, list(range(rows)), positions, filtered=True)
    shuffled = tokens_of(sampling, logits[order], params, order, [positions[i] for i in order], filtered=True)
    assert shuffled == [together[i] for i in order]
    for i in (1, 4):
        alone = logits[i : i + 1]
        assert tokens_of(sampling, alone, params, [i], [positions[i]], filtered=i > 1) == [together[i]]
    slots = torch.arange(rows, dtype=torch.int32, device=device)[3:5]
    limits = filters.thresholds(logits[3:5], params, slots)
    for i in (0, 1):
        assert torch.equal(filters.thresholds(logits[3 + i : 4 + i], params, slots[i : i + 1]), limits[i : i + 1])


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
