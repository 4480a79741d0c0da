"""Parameters as written down: vLLM's names and defaults, what contradicts, what a model brings; the table."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import RequestOutputKind, SamplingParams, table


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 0, 1.0, 16)
    assert (params.seed, params.ignore_eos, params.stop_token_ids) == (None, False, ())
    assert (params.n, params.min_p, params.repetition_penalty, params.presence_penalty) == (1, 0.0, 1.0, 0.0)
    assert (params.frequency_penalty, params.min_tokens, params.bad_words, params.logit_bias) == (0.0, 0, (), ())
    assert (params.allowed_token_ids, params.logprobs, params.prompt_logprobs) == (None, None, None)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens, params.detokenize) == (True, True, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


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


def test_stop_strings_are_a_tuple_and_one_string_is_one_of_them():
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)
    assert hash(SamplingParams(stop=["b", "a"])) == hash(SamplingParams(stop=("b", "a")))
    with pytest.raises(InvalidRequestError, match=r"stop=\['END'\].*detokenize=False"):
        SamplingParams(stop="END", detokenize=False)


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


def test_generation_config_that_contradicts_itself_is_named():
    """A request without parameters was refused for a `min_tokens` that its caller had never heard of."""
    with pytest.raises(
        InvalidRequestError, match=r"the model's generation_config: min_tokens=20 .*max_tokens=16: pass"
    ):
        SamplingParams.from_generation_config(GenerationConfig(min_new_tokens=20))


def test_table_in_the_docs_is_that_of_the_dataclass():
    """Else: python -m cbatch.sampling_params > docs/sampling-parameters.md"""
    page = Path(__file__).parents[2] / "docs" / "sampling-parameters.md"
    assert page.read_text(encoding="utf-8") == table()
    for field in dataclasses.fields(SamplingParams):
        assert f"| `{field.name}` |" in table()
    made = subprocess.run([sys.executable, "-m", "cbatch.sampling_params"], capture_output=True, text=True, check=True)
    assert (made.stdout, made.stderr) == (table(), "")
