"""Parameters are checked when they are written down, each message naming the parameter, its value and the limit."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
from transformers import GenerationConfig

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import RequestOutputKind, SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 1.0, 16)
    assert (params.seed, params.ignore_eos, params.stop_token_ids) == (None, False, ())
    assert (params.skip_special_tokens, params.detokenize) == (True, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


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
        ("stop", 7),
        ("include_stop_str_in_output", 1),
        ("output_kind", 1),
        ("output_kind", "DELTA"),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "min_p", "presence_penalty", "min_tokens", "logprobs", "tempreature"])
def test_parameter_that_is_not_supported_is_refused_by_name(name):
    """Accepted and ignored would be a wrong answer in silence."""
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=np.float64(0.5),
        seed=np.int32(3),
        max_tokens=np.int64(4),
        stop_token_ids=np.array([1, 2]),
    )
    assert params == SamplingParams(temperature=0.5, top_k=5, top_p=0.5, seed=3, max_tokens=4, stop_token_ids=(1, 2))
    for field in ("temperature", "top_k", "top_p", "seed", "max_tokens"):
        assert type(getattr(params, field)) in (int, float)
    assert {type(token) for token in params.stop_token_ids} == {int}


def test_ways_to_say_nothing():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_stop_strings_are_a_tuple_and_one_string_is_one_of_them():
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)
    assert hash(SamplingParams(stop=["b", "a"])) == hash(SamplingParams(stop=("b", "a")))
    with pytest.raises(InvalidRequestError, match=r"stop=\['END'\].*detokenize=False"):
        SamplingParams(stop="END", detokenize=False)


def test_edges_are_inside():
    SamplingParams(temperature=0, top_p=1, top_k=10**9, max_tokens=1, seed=2**63 - 1)
    SamplingParams(temperature=1e-7, top_p=1e-9, seed=-(2**63))


def test_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy


def test_params_are_frozen_hashable_and_pickle():
    params = SamplingParams(temperature=0.0, stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, SamplingParams(temperature=0.0, stop_token_ids=[1])}) == 1
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3


def test_generation_config_supplies_the_defaults():
    given = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=100)
    assert SamplingParams.from_generation_config(given) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, max_tokens=100
    )
    assert SamplingParams.from_generation_config(GenerationConfig()) == SamplingParams()
    assert SamplingParams.from_generation_config(None) == SamplingParams()
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=False)).temperature == 0


@pytest.mark.parametrize(
    "asks", [{"repetition_penalty": 1.1}, {"num_beams": 4}, {"min_p": 0.1}, {"suppress_tokens": [1]}]
)
def test_generation_config_that_asks_for_more_than_we_can_is_refused(asks):
    with pytest.raises(InvalidRequestError, match=next(iter(asks))):
        SamplingParams.from_generation_config(GenerationConfig(**asks))
