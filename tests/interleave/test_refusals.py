"""Every argument works or is refused, with its value and the limit; a refused call leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from cbatch.errors import CBatchError, ConfigError, InvalidRequestError, PromptTooLongError, UnsupportedModelError
from cbatch.interleave import InterleavedGenerator
from tests.api.tiny import byte_level
from tests.interleave.conftest import Make, expected, prompts
from tests.models.families import make_tiny


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range: it must be at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"temperature": 0}, "temperature=0 must be above 1e-30; do_sample=False is greedy"),
        ({"temperature": 1e-40}, "temperature=1e-40"),  # all logits became infinite, and all tokens token 0
        ({"temperature": 10**400}, "temperature=inf must be finite"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": -1}, "top_k=-1 is out of range: it must be at least 0"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range: it must be above 0 and at most 1"),
        ({"top_p": 2}, "top_p=2"),
        ({"top_p": 0.5, "do_sample": False}, "top_p=0.5 with do_sample=False"),
        ({"do_sample": 1}, "do_sample is 1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 2, "length_penalty": float("inf")}, "length_penalty=inf"),
        ({"num_beams": 2, "length_penalty": 10**400}, "length_penalty=inf must be finite"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"eos_token_id": 101}, "eos_token_id=101 is out of range: it must be at least 0 and at most 100"),
        ({"eos_token_id": [3, -1]}, "eos_token_id=-1"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"eos_token_id": b"x"}, "eos_token_id=b'x'"),
        ({"eos_token_id": {3}}, "eos_token_id={3}"),
        ({"eos_token_id": [[3]]}, "eos_token_id=[3]"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"generator": 5}, "generator is 5"),
        ({"streamer": object()}, "must have put"),
        ({"num_beams": 2, "streamer": object()}, "streamer with num_beams=2"),
    ],
)
def test_options_out_of_range(tiny: Make, options: dict[str, Any], says: str) -> None:
    made = InterleavedGenerator(tiny("llama"))
    ids, mask = prompts("cpu")
    with pytest.raises(InvalidRequestError) as error:
        made.generate(ids, mask, **({"max_new_tokens": 3} | options))
    assert says in str(error.value)
    assert made.generate(ids, mask, 1).shape == (3, 10)


IDS = torch.tensor([[3, 4], [5, 6]])


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        (torch.empty(0, 3, dtype=torch.int64), None, "[0, 3]"),
        (torch.empty(2, 0, dtype=torch.int64), None, "[2, 0]"),
        (IDS[0], None, "of shape [2], but must be int64 [batch_size, length]"),
        (IDS.float(), None, "torch.float32"),
        (IDS + 99, None, "hold 105, but tokens are 0 to 100"),
        (IDS - 4, None, "hold -1"),
        (IDS, torch.ones(2, 3), "[2, 3], but must be of shape [2, 2]"),
        (IDS, [[1, 1], [1, 1]], "attention_mask is list"),
        (IDS, torch.tensor([[1, 1], [1, 0]]), "row 1 ends in padding"),
        (IDS, torch.tensor([[0, 0], [1, 1]]), "row 0 ends in padding"),
        (IDS, torch.tensor([[0.0, 0.0], [-torch.inf, 0.0]]), "attention_mask holds -inf, but must hold 0 and 1"),
        (IDS, torch.tensor([[1, 1], [2, 1]]), "attention_mask holds 2"),
        (IDS.numpy(), torch.ones(2, 2), "must be a tensor, a text or a list of texts"),
        ([[3, 4]], None, "must be a tensor, a text or a list of texts"),
        ([], None, "must be a tensor, a text or a list of texts"),
        (7, None, "must be a tensor"),
        ("text", None, "there is no tokenizer"),
        ("text", torch.ones(1, 1), "attention_mask with prompts that are text"),
    ],
)
def test_prompts_that_cannot_be_served(tiny: Make, ids: Any, mask: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        InterleavedGenerator(tiny("llama")).generate(ids, mask, 3)
    assert says in str(error.value)


class BeyondTheEmbeddings:
    all_special_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3, 101]

    def decode(self, tokens: list[int]) -> str:
        raise NotImplementedError


def test_a_tokenizer_that_knows_more_tokens_than_the_model(tiny: Make) -> None:
    """Tokens were added to it and the embeddings were not resized. On a GPU such a look-up ends the process."""
    made = InterleavedGenerator(tiny("llama"), BeyondTheEmbeddings())
    with pytest.raises(InvalidRequestError, match="hold 101, but tokens are 0 to 100"):
        made.generate("text", max_new_tokens=3)


def test_text_that_is_no_unicode(tiny: Make) -> None:
    """Half of a UTF-16 pair, as a JSON escape may leave it: a fast tokenizer has a TypeError for it, of other words."""
    made = InterleavedGenerator(tiny("llama"), byte_level())
    with pytest.raises(
        InvalidRequestError, match=r"not valid Unicode text: character 1 is a lone surrogate, '\\ud83d'"
    ):
        made.generate(["fine", "a\ud83d"], max_new_tokens=3)


def test_a_prompt_beyond_the_models_positions(tiny: Make) -> None:
    """Beyond its 256 positions GPT-2 would read past its table, which on a GPU ends the process's use of it."""
    made = InterleavedGenerator(tiny("gpt2"))
    with pytest.raises(PromptTooLongError, match="250 tokens and max_new_tokens=7, but the model has 256 positions"):
        made.generate(torch.full((1, 250), 5), max_new_tokens=7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_streams": 0}, "num_streams is 0, but must be a whole number of at least 1"),
        ({"num_streams": 1.5}, "num_streams is 1.5"),
        ({"num_streams": True}, "num_streams is True"),
        ({"num_streams": -(10**5000)}, "num_streams is a int"),  # which Python does not write out
        ({"tokenizer": 3}, "tokenizer is 3, but must be"),  # it failed in the first call with a text
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2', but must be the tokenizer itself"),
        ({"compile": 1}, "compile is 1"),
        ({"compile": "max"}, "compile is 'max', but must be True, False or 'cudagraphs'"),
        ({"cache": "quantized"}, "cache is 'quantized', but must be 'static' or 'dynamic'"),
        ({"compile": True, "cache": "dynamic"}, "compile=True needs cache='static'"),
        ({"compile": "cudagraphs"}, "needs a CUDA device, but the model is on cpu"),
    ],
)
def test_generators_that_cannot_be_made(tiny: Make, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        InterleavedGenerator(tiny("gpt2"), **options)
    assert says in str(error.value)


def test_models_that_cannot_be_run_so() -> None:
    class Wrapped(nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match="a Wrapped, but must be a PreTrainedModel"):
        InterleavedGenerator(Wrapped())  # type: ignore[arg-type]
    for family, says in (("bloom", "no position_ids"), ("llama4_text", "chunks"), ("lfm2", "not attention")):
        with pytest.raises(UnsupportedModelError, match=says):
            InterleavedGenerator(make_tiny(family))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "cache", "says"),
    [
        ("bert_both_ways", "static", "BertLMHeadModel gives other logits in steps with a static cache than at once"),
        ("bert_both_ways", "dynamic", "gives other logits in steps with a dynamic cache"),
        ("doge", "static", "DogeForCausalLM gives other logits in steps with a static cache"),
        ("falcon_alibi", "static", "FalconForCausalLM fails in steps with a static cache: ValueError"),
        ("openai-gpt", "dynamic", "OpenAIGPTLMHeadModel fails in steps with a dynamic cache"),
    ],
)
def test_models_that_would_give_other_tokens_in_silence(family: str, cache: Any, says: str) -> None:
    """They attend both ways, make masks that know no static cache, or look at no cache at all. Nothing they declare
    tells them from the others, so a few tokens are computed in both ways when the generator is made."""
    model: Any
    if family == "openai-gpt":
        sizes = {"vocab_size": 101, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)).eval()
    else:
        model = make_tiny(family)
        model.set_attn_implementation("eager" if family.startswith("falcon") else "sdpa")
    with pytest.raises(UnsupportedModelError, match=says):
        InterleavedGenerator(model, cache=cache)


def test_what_only_the_generation_config_asks_for_is_refused_and_not_ignored(tiny: Make) -> None:
    model = tiny("qwen3")
    ids, mask = prompts("cpu")
    before = model.generation_config
    made = InterleavedGenerator(model)
    try:
        for options in (
            {"repetition_penalty": 1.1},
            {"no_repeat_ngram_size": 2},
            {"do_sample": True, "min_p": 0.1},
            {"renormalize_logits": True},
            {"remove_invalid_values": True},
            {"penalty_alpha": 0.6},
        ):
            model.generation_config = type(before)(**options)
            name = list(options)[-1]
            with pytest.raises(InvalidRequestError, match=f"asks for {name}={options[name]}"):
                made.generate(ids, mask, 3)
        for name in ("suppress_tokens", "begin_suppress_tokens", "min_p"):  # which ask for nothing, and were refused
            model.generation_config = type(before)(do_sample=True, top_k=1, **{name: 0.0 if name == "min_p" else []})
            got = made.generate(ids, mask, 3)
            assert got.equal(model.generate(ids, attention_mask=mask, max_new_tokens=3))
        model.generation_config = type(before)(do_sample=True, min_p=0.1)
        assert made.generate(ids, mask, 3, do_sample=False).shape == (3, 12)  # min_p is about sampling only
    finally:
        model.generation_config = before


def test_a_model_in_training_is_refused() -> None:
    model: Any = make_tiny("gpt2")
    made = InterleavedGenerator(model)
    model.train()
    with pytest.raises(ConfigError, match=r"model\.eval"):
        made.generate(IDS, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"model\.eval"):
        InterleavedGenerator(model)


def test_a_static_cache_within_autocast_is_refused(tiny: Make) -> None:
    """Rotated keys are float32 there and values bfloat16, and it ended in an error about ``index_copy_``."""
    model = tiny("llama")
    with torch.autocast("cpu", torch.bfloat16):
        made = InterleavedGenerator(model)
        with pytest.raises(ConfigError, match="cache='dynamic'"):
            made.generate(IDS, max_new_tokens=2)
        growing = InterleavedGenerator(model, cache="dynamic")
        assert (
            growing.generate(IDS, max_new_tokens=4).tolist() == expected(model, IDS, torch.ones_like(IDS), 4).tolist()
        )
    assert made.generate(IDS, max_new_tokens=2).shape == (2, 4)


def test_a_refusal_says_where_a_value_comes_from(tiny: Make) -> None:
    """A small vocabulary with the stop token of GPT-2's config: "eos_token_id is 50256" in a call that named none."""
    model = tiny("gpt2")
    before = model.generation_config
    made = InterleavedGenerator(model)
    try:
        for options, says in (
            ({"eos_token_id": 50256}, "eos_token_id of the model's generation_config=50256 is out of range"),
            ({"pad_token_id": -1}, "pad_token_id of the model's generation_config=-1"),
            ({"do_sample": True, "temperature": 0.0}, "temperature of the model's generation_config=0.0"),
        ):
            model.generation_config = type(before)(**options)
            with pytest.raises(InvalidRequestError, match=says):
                made.generate(IDS, max_new_tokens=2)
            assert made.generate(IDS, None, 2, eos_token_id=[], pad_token_id=0, do_sample=False).shape == (2, 4)
    finally:
        model.generation_config = before


def test_where_a_model_is_that_is_on_no_device_for_it() -> None:
    """It said "on []": the one device had been taken out of the set before it was written."""
    model: Any = make_tiny("gpt2")
    with pytest.raises(UnsupportedModelError, match=r"but on \['meta'\]"):
        InterleavedGenerator(model.to("meta"))


def test_another_model_is_another_generator(tiny: Make) -> None:
    """A model that was put in place of the first computed prompts, and steps went on with the first."""
    made = InterleavedGenerator(tiny("gpt2"))
    with pytest.raises(AttributeError):
        made.model = make_tiny("gpt2")  # type: ignore[misc]


def test_every_refusal_is_one_error_to_catch() -> None:
    assert issubclass(ConfigError, CBatchError) and issubclass(PromptTooLongError, InvalidRequestError)
