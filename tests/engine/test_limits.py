"""What is no prompt is refused with words for what it is; numpy alone would make numbers of some of it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from cbatch.errors import InvalidRequestError, PromptTooLongError, short
from cbatch.limits import Limits
from cbatch.sampling_params import SamplingParams

LIMITS = Limits(vocab_size=100, max_model_len=64, num_usable_blocks=16, longest_len=64, blocks_for=lambda n: -(-n // 4))


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 0, 99],
        (1, 0, 99),
        iter([1, 0, 99]),
        [np.int64(1), np.int32(0), 99],
        np.array([1, 0, 99], np.uint8),
        torch.tensor([1, 0, 99]),
    ],
)
def test_any_sequence_of_integers_is_a_prompt(prompt):
    taken = LIMITS.prompt(prompt)
    assert (taken.dtype, taken.tolist()) == (np.int32, [1, 0, 99])


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([True], "must be integers, not True"),
        ([1, True], "must be integers, not True"),  # an array of these is [1, 1]
        ([False, 7], "must be integers, not False"),
        ([7, np.True_, 5], "must be integers, not np.True_"),
        (torch.tensor([True]), "must be integers, not True"),
        (np.array([True]), "must be integers"),
        ([3, 1.5], "must be integers, not 1.5"),
        ([3, "a"], "must be integers, not 'a'"),
        ([2**70], f"token id {2**70} is out of range"),  # an integer, though no array of them holds it
        ([10**5000], "token id a int is out of range"),  # Python does not write it out
        ([2**63, 1], f"token id {2**63} is out of range"),
        ([2**63, -1], "token id -1 is out of range"),
        ([100], "token id 100 is out of range"),
        ({1}, "is a set, but must be a flat list"),
        ({1: 2}, "is a dict, but must be a flat list"),
        (np.array(1), "is a ndarray, but must be a flat list"),
        ([[1], [2]], "has 2 dimensions, but must be a flat list"),
    ],
    ids=short,
)
def test_what_is_no_prompt_is_told_as_what_it_is(prompt, says):
    with pytest.raises(InvalidRequestError, match=says.replace(".", r"\.")):
        LIMITS.prompt(prompt)


class NeverRead(list):
    """As long as ten million, and nobody may look at one of them."""

    def __len__(self):
        return 10_000_000

    def __iter__(self):
        raise AssertionError("it was read")

    __array__ = __getitem__ = __iter__


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(itertools.count(), 65), (NeverRead(), 10_000_000), (np.zeros(1000), 1000), (torch.zeros(1000), 1000)],
)
def test_prompt_far_too_long_is_refused_before_it_is_read(prompt, count):
    """Ten million ids in a list held up every step for 0.6 s, and an iterator without an end filled the memory."""
    with pytest.raises(PromptTooLongError, match=f"{count} prompt tokens, but max_model_len is 64"):
        LIMITS.max_len(len(LIMITS.prompt(prompt)), SamplingParams())


def test_priority_and_timeout_may_be_of_numpy_and_of_any_size():
    """An int64 was refused as no integer, a float32 as no number; an int that no float holds was an OverflowError."""
    limits = dataclasses.replace(LIMITS, policy="priority")
    assert type(limits.priority(np.int64(-3))) is int
    assert limits.timeout(np.float32(0.5)) == 0.5
    assert limits.timeout(None) is None
    assert limits.timeout(10**5000) == limits.timeout(float("inf")) > 1e9
    for wrong in (10**5000, np.array(3), True, 1.0):
        with pytest.raises(InvalidRequestError, match=r"priority is .*, but must be an integer from -"):
            limits.priority(wrong)
    for wrong in (-(10**5000), float("nan"), np.float32("nan"), np.array(3), True, "1"):
        with pytest.raises(InvalidRequestError, match=r"timeout_s is .*, but must be a positive number"):
            limits.timeout(wrong)


@pytest.mark.parametrize("max_tokens", [None, 64, 2**40])
def test_min_tokens_must_have_room_behind_the_prompt(max_tokens):
    """The answer ended where the room did, with fewer than were asked for, and nothing said so."""
    assert LIMITS.max_len(14, SamplingParams(max_tokens=max_tokens, min_tokens=50)) == 64
    with pytest.raises(
        InvalidRequestError,
        match="min_tokens is 51, but behind 14 prompt tokens is room for 50: max_model_len is 64",
    ):
        LIMITS.max_len(14, SamplingParams(max_tokens=max_tokens, min_tokens=51))
    small = dataclasses.replace(LIMITS, num_usable_blocks=8, longest_len=33)
    with pytest.raises(InvalidRequestError, match="is room for 19: the pool has 8 KV blocks"):
        small.max_len(14, SamplingParams(max_tokens=None, min_tokens=20))
