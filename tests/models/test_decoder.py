"""The decoder gives what transformers gives, for each family that it covers, and refuses what it does not know."""

from __future__ import annotations

import copy
import logging
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import ConfigError, UnsupportedModelError
from cbatch.models import decoder as decoder_module
from cbatch.models import loader
from cbatch.models.comparison import packed_logits
from cbatch.models.config_facts import ModelFacts
from cbatch.models.decoder import Decoder, DecoderMismatch
from cbatch.models.decoder_config import FAMILIES as COVERED_KINDS
from cbatch.models.loader import load_model
from cbatch.models.transformers_model import TransformersModel
from tests.models.families import FAMILIES, make_tiny, widen_head
from tests.models.paged import PagedRunner, generate_together

PROMPTS = [[5, 17, 42, 9, 77, 23, 61, 3, 88, 14, 30, 52, 71], [90, 11, 64, 7, 33]]
COVERED = [name for name, config in FAMILIES.items() if config().model_type in COVERED_KINDS]
NOT_COVERED = [name for name in FAMILIES if name not in COVERED]


def decoder_of(module, take_weights=False):
    return Decoder.from_transformers(TransformersModel(module), take_weights=take_weights)


def logits_of_steps(model):
    """The logits of packed, chunked, paged steps in which the second sequence joins late, greedily on and on."""
    seen = []
    forward = model.forward

    def recording(*args):
        seen.append(forward(*args))
        return seen[-1]

    model.forward = recording
    try:
        return generate_together(model, PROMPTS, 8), torch.cat(seen)
    finally:
        del model.forward


def test_every_kind_that_the_decoder_knows_is_tested():
    """An older transformers lacks some, but 20 are always there."""
    assert len(COVERED) >= 20
    assert {FAMILIES[name]().model_type for name in COVERED} <= COVERED_KINDS.keys()


@pytest.mark.parametrize("take_weights", [False, True])
def test_tokens_of_a_padded_head_that_the_embedding_lacks_are_never_sampled(take_weights):
    tokens, logits = logits_of_steps(TransformersModel(make_tiny("phi3")))
    decoder = decoder_of(widen_head(make_tiny("phi3"), 40), take_weights)
    assert decoder.vocab_size == 101
    wide_tokens, wide_logits = logits_of_steps(decoder)
    assert wide_tokens == tokens
    torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", COVERED)
def test_logits_and_tokens_equal_those_through_transformers(name):
    module = make_tiny(name)
    tokens, logits = logits_of_steps(decoder_of(module))
    expected_tokens, expected_logits = logits_of_steps(TransformersModel(module))
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected_logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", COVERED)
def test_logits_equal_those_of_a_plain_forward(name):
    """Without our attention, our pages and our packing on the other side."""
    module = make_tiny(name)
    decoder = decoder_of(module)
    runner = PagedRunner(decoder, [PROMPTS[0]])
    seen = []
    forward = decoder.forward

    def all_rows(input_ids, positions, sample_rows, attend):
        seen.append(forward(input_ids, positions, torch.arange(len(input_ids)), attend))
        return seen[-1][sample_rows]

    decoder.forward = all_rows
    runner.step([(0, len(PROMPTS[0]))])
    with torch.no_grad():
        expected = module(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    torch.testing.assert_close(seen[0], expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", COVERED)
def test_taken_weights_give_the_same_and_leave_the_module_empty(name):
    module = make_tiny(name)
    expected = packed_logits(decoder_of(module))
    decoder = decoder_of(module, take_weights=True)
    for got, want in zip(packed_logits(decoder), expected, strict=True):
        assert torch.equal(got, want)
    assert sum(p.numel() for p in module.parameters()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma3_text", "glm4", "gpt2", "granite", "llama", "olmo2", "phi3"])
def test_rounding_in_16_bits_is_not_taken_for_a_mismatch(name, dtype):
    decoder = decoder_of(make_tiny(name, dtype=dtype))
    assert decoder.dtype == dtype
    assert all(logits.dtype == dtype for logits in packed_logits(decoder))


def test_the_callers_module_stays_and_is_not_followed():
    module = make_tiny("llama_tied_yarn")
    before = copy.deepcopy(module.state_dict())
    decoder = decoder_of(module)
    logits = packed_logits(decoder)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for got, want in zip(packed_logits(decoder), logits, strict=True):
        assert torch.equal(got, want)
    assert module.state_dict().keys() == before.keys()


def calls_of_a_step(decoder):
    """The pairs of calls that follow each other in a step, of operators and attention, with shapes for tensors.

    Pairs, because a kernel may differ by what came before it: a product may leave parts for the next to add up.
    """
    calls = []

    def shape(value):
        if isinstance(value, (tuple, list)):
            return tuple(map(shape, value))
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    def recorded(name, function):
        def call(*args, **how):
            calls.append((name, shape(args), tuple((key, shape(value)) for key, value in sorted(how.items()))))
            return function(*args, **how)

        return call

    ops = decoder._ops
    decoder._ops = replace(ops, **{f.name: recorded(f.name, getattr(ops, f.name)) for f in fields(ops)})
    attend = recorded("attend", lambda q, k, v, **how: q)
    ids = torch.tensor([5, 17, 42, 9])
    decoder.forward(ids, torch.arange(4), ids[:2] % 4, lambda layer, *args, **how: attend(*args, **how))
    decoder._ops = ops
    return set(pairwise(calls))


@pytest.mark.parametrize("name", COVERED)
def test_a_shallow_decoder_calls_everything_that_all_layers_call(name):
    """It runs before a capture in place of all layers. A kernel that it left out would be loaded within the capture."""
    once = decoder_of(make_tiny(name))
    config, weights = once.config, once.weights
    deep = replace(config, num_layers=4 * config.num_layers, windows=4 * config.windows, ropes=4 * config.ropes)
    decoder = Decoder(deep, replace(weights, layers=4 * weights.layers), ModelFacts("deep", 64, (), None))
    shallow = decoder.shallow()
    assert shallow.config.num_layers == len(shallow.weights.layers) <= config.num_layers + 1
    assert calls_of_a_step(shallow) == calls_of_a_step(decoder)


def test_facts_are_those_of_the_model_that_it_stands_for():
    like = TransformersModel(make_tiny("gemma2"))
    decoder = Decoder.from_transformers(like, take_weights=False)
    for fact in ("kv_specs", "vocab_size", "max_model_len", "dtype", "device", "eos_token_ids", "name"):
        assert getattr(decoder, fact) == getattr(like, fact)
    assert decoder.generation_config is like.generation_config
    assert decoder.capturable


def test_dynamic_frequencies_cannot_wait_for_the_device_here():
    """transformers looks at the largest position in each forward; the table is made once."""
    like = TransformersModel(make_tiny("llama_dynamic"))
    assert not like.capturable
    assert Decoder.from_transformers(like, take_weights=False).capturable


def test_a_step_may_sample_nothing():
    decoder = decoder_of(make_tiny("llama"))
    assert generate_together(decoder, PROMPTS[:1], 2, chunk=2) == generate_together(decoder, PROMPTS[:1], 2, chunk=13)


# What is not covered


@pytest.mark.parametrize("name", NOT_COVERED)
def test_a_family_that_is_not_covered_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=f"does not cover the family '{FAMILIES[name]().model_type}'"):
        decoder_of(make_tiny(name))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("stablelm", "qk_layernorm", True),
        ("stablelm", "use_parallel_residual", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gpt_bigcode", "multi_query", False),
    ],
)
def test_an_option_that_is_not_covered_is_named(name, option, value):
    config = FAMILIES[name]()
    setattr(config, option, value)
    with pytest.raises(
        UnsupportedModelError, match=f"{config.model_type}: the decoder does not cover {option}={value}"
    ):
        decoder_module.decoder_config(config, torch.float32)


def test_an_activation_that_is_not_covered_is_named():
    config = FAMILIES["llama"]()
    config.hidden_act = "mish"
    with pytest.raises(UnsupportedModelError, match="does not cover the activation 'mish'"):
        decoder_module.decoder_config(config, torch.float32)


def test_quantised_weights_are_not_covered():
    config = FAMILIES["llama"]()
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quantised"):
        decoder_module.decoder_config(config, torch.float32)


def test_weights_that_the_facts_do_not_stand_for_are_named_and_nothing_is_taken():
    module = make_tiny("llama")
    module.model.layers[1].mlp.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(
        UnsupportedModelError, match=r"has model\.layers\.1\.mlp\.gain, which the decoder does not know"
    ):
        decoder_of(module, take_weights=True)
    assert all(p.numel() for p in module.parameters())


def test_a_class_of_somebody_elses_and_hooks_are_refused():
    class Other(LlamaForCausalLM):
        pass

    module = make_tiny("llama")
    module.lm_head.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(UnsupportedModelError, match="hooks"):
        decoder_of(module)
    module.__class__ = Other
    with pytest.raises(UnsupportedModelError, match="Other"):
        decoder_of(module)


def test_a_wrong_fact_is_noticed_before_the_first_request(monkeypatch):
    monkeypatch.setitem(COVERED_KINDS, "llama", {"rope_interleaved": True})
    with pytest.raises(DecoderMismatch, match="llama: the decoder gives other logits than transformers"):
        decoder_of(make_tiny("llama"))


# Which implementation runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2", "mixtral"):
        make_tiny(name).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_name_gets_the_decoder_unless_transformers_is_asked_for(folders, name):
    with Engine.from_model(folders / name, load_format="dummy") as engine:
        assert isinstance(engine.model, Decoder)
        assert engine.model.name == str(folders / name)
    with Engine.from_model(folders / name, load_format="dummy", model_impl="transformers") as engine:
        assert isinstance(engine.model, TransformersModel)


def test_a_name_that_is_not_covered_runs_through_transformers_and_says_so(folders, caplog):
    caplog.set_level(logging.INFO, "cbatch.models.loader")
    assert isinstance(load_model(folders / "mixtral", model_impl="auto"), TransformersModel)
    assert "mixtral runs through transformers: the decoder does not cover the family 'mixtral'" in caplog.text
    with pytest.raises(UnsupportedModelError, match="does not cover the family 'mixtral'"):
        load_model(folders / "mixtral", model_impl="decoder")


def test_a_mismatch_falls_back_with_a_warning_to_a_model_that_has_its_weights(folders, caplog, monkeypatch):
    """Where the weights came through transformers: straight from the files, there is nothing to compare with."""

    def not_straight(*args):
        raise UnsupportedModelError("for the test")

    monkeypatch.setattr(loader, "_straight", not_straight)
    monkeypatch.setitem(COVERED_KINDS, "llama", {"rope_interleaved": True})
    model = load_model(folders / "llama", model_impl="auto")
    assert isinstance(model, TransformersModel)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert generate_together(model, PROMPTS, 4) == generate_together(TransformersModel(make_tiny("llama")), PROMPTS, 4)
    with pytest.raises(DecoderMismatch):
        load_model(folders / "llama", model_impl="decoder")


def test_a_module_in_hand_is_followed_unless_the_decoder_is_asked_for():
    module = make_tiny("llama")
    with Engine.from_model(module) as engine:
        assert isinstance(engine.model, TransformersModel)
    with Engine.from_model(module, model_impl="decoder") as engine:
        assert isinstance(engine.model, Decoder)
    assert all(p.numel() for p in module.parameters())


def test_a_model_of_our_own_is_run_as_it_is():
    decoder = decoder_of(make_tiny("llama"))
    with Engine.from_model(decoder) as engine:
        assert engine.model is decoder
    with pytest.raises(ConfigError, match="model_impl is 'transformers'"):
        Engine.from_model(decoder, model_impl="transformers")
    with pytest.raises(ConfigError, match="model_impl is 'own'"):
        EngineConfig(model_impl="own")
