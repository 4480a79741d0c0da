"""What each parameter may be: refused by name where it is not, kept in a plain form where it is."""

import dataclasses
import itertools
import math
import time
from contextlib import suppress

import numpy as np
import pytest

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("top_k", None),
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", 1.0001),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("top_p", "0.9"),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("seed", False),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("skip_special_tokens", "yes"),
        ("detokenize", 0),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 7),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", {"a"}),
        ("stop", ["a" * 100_000, "b"]),
        ("stop", 7),
        ("include_stop_str_in_output", 1),
        *[(name, value) for name in ("n", "logprobs", "min_tokens") for value in (-1, 1.0, True, "1", math.nan)],
        ("n", 0),
        ("n", None),
        ("n", 16385),
        ("min_tokens", None),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        *[
            (name, value)
            for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            for value in (math.nan, math.inf, -math.inf, "1", True, None, -2.01)
        ],
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("presence_penalty", 2.01),
        ("frequency_penalty", 3),
        ("bad_words", "word"),
        ("bad_words", ["a", ""]),
        ("bad_words", [1]),
        ("bad_words", {"a"}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", {1: 2}),
        ("allowed_token_ids", 5),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", {1.0: 0.0}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", [1, 2]),
        ("logit_bias", 3),
        ("structured_outputs", {"regex": "a"}),
        ("structured_outputs", "a"),
        ("logits_processors", print),
        ("logits_processors", ["print"]),
        ("spaces_between_special_tokens", 0),
        ("output_kind", 1),
        ("output_kind", "DELTA"),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


class Odd:
    """A value that cannot be compared, told true from false, or written out."""

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    def __bool__(self):
        raise RuntimeError("no truth")

    def __repr__(self):
        raise RuntimeError("no text")

    __hash__ = None


@pytest.mark.parametrize(
    "value",
    [Odd(), [Odd()], 10**5000, -(10**5000), [10**5000], {1: 10**5000}, np.array(1), np.array([1.5, 2.5]), [[1]], ...],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams, StructuredOutputsParams])
def test_values_beyond_words_are_refused_by_name(cls, value):
    """Some came out as errors of numpy's, or of Python's, which writes no integer of more than 4,300 digits."""
    needed = {"beam_width": 2, "max_tokens": 3} if cls is BeamSearchParams else {}
    for field in dataclasses.fields(cls):
        with pytest.raises(InvalidRequestError, match=field.name):
            cls(**{**needed, field.name: value})


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=np.float64(0.5),
        seed=np.int32(3),
        max_tokens=np.int64(4),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=np.array([5, 5, 1]),
        logit_bias={np.int64(3): np.float32(0.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        seed=3,
        max_tokens=4,
        stop_token_ids=(1, 2),
        allowed_token_ids=(5, 1),
        logit_bias=((3, 0.5),),
    )
    assert [type(number) for number in params.logit_bias[0]] == [int, float]
    for field in ("temperature", "top_k", "top_p", "seed", "max_tokens"):
        assert type(getattr(params, field)) in (int, float)
    assert {type(token) for token in params.stop_token_ids} == {int}


def test_ways_to_say_nothing():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(bad_words=None).bad_words == SamplingParams(bad_words=[]).bad_words == ()
    assert SamplingParams(logit_bias=None) == SamplingParams(logit_bias={}) == SamplingParams()


def test_edges_are_inside():
    SamplingParams(temperature=0, top_p=1, top_k=10**9, max_tokens=1, seed=2**63 - 1)
    SamplingParams(temperature=1e-7, top_p=1e-9, seed=-(2**63))
    SamplingParams(n=16384, min_p=1, logprobs=20, min_tokens=16, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(min_p=0, logprobs=0, min_tokens=99, max_tokens=None, repetition_penalty=1e-30)
    SamplingParams(logit_bias={0: 100, 1: -100.0}, n=2, top_k=1)


def test_message_of_a_huge_value_is_short():
    """A server sends the message back: a client's megabyte in a wrong place came back as a megabyte."""
    huge = "x" * 1_000_000
    for cls, needed in (
        (SamplingParams, {}),
        (StructuredOutputsParams, {}),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 2}),
    ):
        for field in dataclasses.fields(cls):
            for value in (huge, [huge, 1, ""], {1: huge}):
                with suppress(InvalidRequestError):  # some may have it
                    cls(**{**needed, field.name: value})
                    continue
                with pytest.raises(InvalidRequestError) as error:
                    cls(**{**needed, field.name: value})
                assert len(str(error.value)) < 500, field.name


MANY = 3_000_000


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop_token_ids", [1] * MANY, "stop_token_ids has more than 500000 token ids, which is the limit"),
        ("stop_token_ids", [-1] * 500_000, "stop_token_ids=.* holds -1"),
        ("allowed_token_ids", itertools.repeat(5), "allowed_token_ids has more than 500000 token ids"),
        ("allowed_token_ids", np.zeros(MANY, np.int64), "allowed_token_ids has more than 500000 token ids"),
        ("logit_bias", dict.fromkeys(range(MANY), 0.5), "logit_bias has more than 1024 tokens"),
        ("logit_bias", [(1, 0.5)] * MANY, "logit_bias has more than 1024 tokens"),
        ("bad_words", ["a"] * MANY, f"bad_words has {MANY} texts, but the limit is 100000 characters"),
        ("bad_words", ["a" * MANY], f"bad_words has {MANY} characters, but the limit is 100000"),
        ("bad_words", "a" * MANY, "must be a list of strings"),
        ("stop", ["a"] * MANY, f"stop has {MANY} texts, but the limit is 100000 characters"),
        ("stop", "a" * MANY, f"stop has {MANY} characters, but the limit is 100000"),
        ("logits_processors", [print] * MANY, f"logits_processors has {MANY} functions, but the limit is 1000"),
        ("temperature", [0.5] * MANY, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_value_of_millions_is_refused_at_once(name, value, message):
    """A server's event loop makes these: each number cost a check, and the message was written out whole before it was
    cut. 10 million took 4 s."""
    begin = time.thread_time()
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**{name: value})
    assert time.thread_time() - begin < 0.9  # 0.15 s at most
