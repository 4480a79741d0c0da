"""Parameters are checked when they are written down, each message naming the parameter, its value and the limit."""

import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import GenerationConfig

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    table,
)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 1.0, 16)
    assert (params.seed, params.ignore_eos, params.stop_token_ids) == (None, False, ())
    assert (params.n, params.min_p, params.repetition_penalty, params.presence_penalty) == (1, 0.0, 1.0, 0.0)
    assert (params.frequency_penalty, params.min_tokens, params.bad_words, params.logit_bias) == (0.0, 0, (), ())
    assert (params.allowed_token_ids, params.logprobs, params.prompt_logprobs) == (None, None, None)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens, params.detokenize) == (True, True, True)
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


@pytest.mark.parametrize("name", ["best_of", "beam_width", "guided_json", "guided_regex", "tempreature"])
def test_parameter_that_is_not_supported_is_refused_by_name(name):
    """Accepted and ignored would be a wrong answer in silence."""
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("best_of", "use n with logprobs=0"),
        ("use_beam_search", "LLM.beam_search"),
        ("early_stopping", "LLM.beam_search"),
        ("guided_decoding", "use structured_outputs="),
        ("response_format", "use structured_outputs="),
        ("truncate_prompt_tokens", "prompt_token_ids"),
        ("max_new_tokens", "use max_tokens"),
        ("priority", "an argument of generate and submit"),
        ("tempreature", r"did you mean temperature\?"),
        ("xyz", "see docs/sampling-parameters.md"),
    ],
)
def test_name_of_another_project_is_refused_with_what_to_use(name, hint):
    with pytest.raises(TypeError, match=f"SamplingParams has no {name}: .*{hint}"):
        SamplingParams(**{name: 1})


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


def test_stop_strings_are_a_tuple_and_one_string_is_one_of_them():
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)
    assert hash(SamplingParams(stop=["b", "a"])) == hash(SamplingParams(stop=("b", "a")))
    with pytest.raises(InvalidRequestError, match=r"stop=\['END'\].*detokenize=False"):
        SamplingParams(stop="END", detokenize=False)


def test_edges_are_inside():
    SamplingParams(temperature=0, top_p=1, top_k=10**9, max_tokens=1, seed=2**63 - 1)
    SamplingParams(temperature=1e-7, top_p=1e-9, seed=-(2**63))
    SamplingParams(n=16384, min_p=1, logprobs=20, min_tokens=16, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(min_p=0, logprobs=0, min_tokens=99, max_tokens=None, repetition_penalty=1e-30)
    SamplingParams(logit_bias={0: 100, 1: -100.0}, n=2, top_k=1)


def test_what_contradicts_is_refused():
    with pytest.raises(InvalidRequestError, match=r"n=2 at temperature=0.*must be 1"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequestError, match=r"min_tokens=5 is out of range: it must be at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams().greedy


def test_params_are_frozen_hashable_and_pickle():
    params = SamplingParams(temperature=0.0, stop_token_ids=[1], logit_bias={5: 1.0}, bad_words=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert pickle.loads(pickle.dumps(params)) == params
    assert len({params, dataclasses.replace(params)}) == 1
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3


def test_generation_config_supplies_the_defaults():
    given = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=100,
        min_new_tokens=2,
    )
    assert SamplingParams.from_generation_config(given) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_tokens=100, min_tokens=2
    )
    assert SamplingParams.from_generation_config(GenerationConfig()) == SamplingParams()
    assert SamplingParams.from_generation_config(None) == SamplingParams()
    assert SamplingParams.from_generation_config(GenerationConfig(suppress_tokens=[])) == SamplingParams()
    greedy = GenerationConfig(do_sample=False, repetition_penalty=1.3)
    assert SamplingParams.from_generation_config(greedy) == SamplingParams(temperature=0, repetition_penalty=1.3)


@pytest.mark.parametrize(
    "asks",
    [
        {"no_repeat_ngram_size": 3},
        {"num_beams": 4},
        {"bad_words_ids": [[5]]},
        {"suppress_tokens": [1]},
        *[
            {"stop_strings": ["end"]},
            {"penalty_alpha": 0.6},
            {"exponential_decay_length_penalty": (5, 1.1)},
        ],
    ],
)
def test_generation_config_that_asks_for_more_than_we_can_is_refused(asks):
    with pytest.raises(InvalidRequestError, match=next(iter(asks))):
        SamplingParams.from_generation_config(GenerationConfig(**asks))


def test_table_in_the_docs_is_that_of_the_dataclass():
    """Else: python -m cbatch.sampling_params > docs/sampling-parameters.md"""
    page = Path(__file__).parents[2] / "docs" / "sampling-parameters.md"
    assert page.read_text(encoding="utf-8") == table()
    for field in dataclasses.fields(SamplingParams):
        assert f"| `{field.name}` |" in table()
    made = subprocess.run([sys.executable, "-m", "cbatch.sampling_params"], capture_output=True, text=True, check=True)
    assert (made.stdout, made.stderr) == (table(), "")
