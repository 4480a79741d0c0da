"""Weights that go from files, or from dice, straight into the decoder: the same model, and nothing that is guessed."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import json
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cbatch.errors import ModelNotFoundError, UnsupportedModelError
from cbatch.models import config_facts, loader
from cbatch.models import light_imports as light_imports_module
from cbatch.models.comparison import DenseAttend, packed_logits
from cbatch.models.decoder import Decoder
from cbatch.models.decoder_config import FAMILIES as COVERED_KINDS
from cbatch.models.decoder_config import decoder_config
from cbatch.models.decoder_weights import load_weights
from cbatch.models.light_imports import light_imports
from cbatch.models.loader import load_model, load_tokenizer
from cbatch.models.rope_table import rope_tables
from cbatch.models.transformers_model import TransformersModel
from cbatch.models.weight_sources import ModuleSource, RandomSource
from tests.models.families import FAMILIES, make_tiny, widen_head

COVERED = [name for name, config in FAMILIES.items() if config().model_type in COVERED_KINDS]
OPTIONS = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias", "tie_word_embeddings")


def dense(weight):
    """A matrix as it was before it was packed."""
    return weight.to_dense() if weight.is_mkldnn else weight


@pytest.fixture
def straight_only(monkeypatch):
    def refuse(*args):
        raise AssertionError("went through transformers")

    monkeypatch.setattr(loader, "_pretrained_module", refuse)
    monkeypatch.setattr(loader, "_random_module", refuse)


def variants(name):
    """Configs of a family with every option that adds a bias or ties the head off, and on."""
    config = FAMILIES[name]()
    options = [option for option in OPTIONS if hasattr(config, option)]
    for values in itertools.product((False, True), repeat=len(options)):
        for option, value in zip(options, values, strict=True):
            setattr(config, option, value)
        yield copy.deepcopy(config)


def tiny(name, monkeypatch, **options):
    """A tiny model of a family whose config says something else than usual."""
    factory = FAMILIES[name]

    def config():
        made = factory()
        for option, value in options.items():
            setattr(made, option, value)
        return made

    monkeypatch.setitem(FAMILIES, name, config)
    return make_tiny(name)


def assert_same(decoder, module):
    """The decoder is the one that its module makes, bit by bit, and gives the logits that transformers gives."""
    assert isinstance(decoder, Decoder)
    like = TransformersModel(module)
    twin = Decoder.from_transformers(like, take_weights=False)
    for got, same, other in zip(*(packed_logits(model) for model in (decoder, twin, like)), strict=True):
        assert torch.equal(got, same)
        torch.testing.assert_close(got, other, atol=2e-5, rtol=2e-5)
    for fact in ("kv_specs", "vocab_size", "max_model_len", "dtype", "device", "eos_token_ids"):
        assert getattr(decoder, fact) == getattr(like, fact)


# Checkpoints


@pytest.mark.parametrize("name", COVERED)
def test_a_checkpoint_gives_the_logits_of_the_module_that_was_saved(name, tmp_path, straight_only):
    module = make_tiny(name)
    module.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, model_impl="auto")
    assert decoder.name == str(tmp_path)
    assert_same(decoder, module)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exaone4", {"layer_types": ["full_attention"] * 3}),  # nothing slides, and nothing is turned
        ("exaone4", {"layer_types": ["full_attention"] * 3, "sliding_window": None}),  # everything is
        ("smollm3", {"sliding_window": 8, "use_sliding_window": False}),  # of which no layer makes use
    ],
)
def test_windows_that_no_layer_has(name, options, tmp_path, straight_only, monkeypatch):
    module = tiny(name, monkeypatch, **options)
    module.save_pretrained(tmp_path)
    assert_same(load_model(tmp_path, model_impl="auto"), module)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"is_causal": False}),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}),
        ("mistral", {"sliding_window": 0}),
        ("llama", {"num_hidden_layers": 0}),
        ("gemma2", {"attn_logit_softcapping": 0.0}),
        ("gemma2", {"final_logit_softcapping": 0.0}),
        ("granite", {"logits_scaling": 0.0}),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": False},
        ),
    ],
)
def test_what_only_transformers_makes_of_a_config_is_not_covered(name, options, tmp_path, monkeypatch):
    """The decoder took the first for an ordinary model, softened what transformers does not, saw all positions where
    a mask hid some, and read a divisor of 0 as none."""
    tiny(name, monkeypatch, **options).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{name}: .*not cover .*{list(options)[-1]}"):
        loader._straight(str(tmp_path), None, torch.device("cpu"), False, False, 0)
    with contextlib.suppress(UnsupportedModelError):  # most cannot be run in packed steps at all
        assert isinstance(load_model(tmp_path, model_impl="auto"), TransformersModel)


def rope(rope_type, **options):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gemma2", {"sliding_window": None}, "sliding layers of sliding_window=None"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 of 4 heads"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("llama", {"head_dim": 0}, "head_dim=0"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("gpt2", {"n_inner": 0}, "intermediate_size=0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] of 3 layers"),
        ("smollm3", {"no_rope_layers": []}, r"no_rope_layers=\[\] of 3 layers"),
        ("llama", {"hidden_act": "magic"}, "activation 'magic'"),
        ("llama", rope("mrope"), "rope_type='mrope'"),
        ("llama", rope("linear", factor=4.0, partial_rotary_factor=0.5), "turn 8 elements of heads of 16"),
        ("phi3", rope("default", partial_rotary_factor=2.0), "turn 32 elements of heads of 16"),
    ],
    ids=str,
)
def test_a_config_of_which_transformers_makes_no_model_is_refused(name, options, reason, tmp_path):
    """The decoder read None and 0 as if nothing had been said, and ran; or both it and transformers tripped, over a key
    that is not there or a division by zero, and that was the error."""
    FAMILIES[name]().save_pretrained(tmp_path)
    edit_config(tmp_path, **options)
    with pytest.raises(UnsupportedModelError, match=f"{name}: the decoder does not .*{reason}"):
        loader._straight(str(tmp_path / "config.json"), None, torch.device("cpu"), True, False, 0)
    with pytest.raises(UnsupportedModelError):
        load_model(tmp_path / "config.json", load_format="dummy", model_impl="auto")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["arcee", "ernie4_5", "glm", "gpt2", "llama", "nemotron", "seed_oss", "stablelm"])
def test_biases_and_tied_heads(name, tied, tmp_path, straight_only, monkeypatch):
    with_biases = {option: True for option in OPTIONS if hasattr(FAMILIES[name](), option)}
    module = tiny(name, monkeypatch, **with_biases | {"tie_word_embeddings": tied})
    module.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, model_impl="auto")
    assert torch.equal(dense(decoder.weights.head.weight), decoder.weights.embed) == tied
    assert_same(decoder, module)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("another", [False, True])
def test_a_head_beside_a_tied_embedding(name, another, tmp_path, straight_only, monkeypatch):
    """Saved although the config says that it is the embedding. Where it is another one, transformers believes the file;
    the decoder believed the config, and gave the logits of a model that nobody has trained."""
    tiny(name, monkeypatch, tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = decoder_config(FAMILIES[name](), torch.float32).names.embedding
    edit_tensors(tmp_path, lambda t: t | {"lm_head.weight": t[embedding].flip(0) if another else t[embedding].clone()})
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    decoder = load_model(tmp_path, model_impl="auto")
    assert torch.equal(dense(decoder.weights.head.weight), decoder.weights.embed) == (not another)
    assert_same(decoder, module)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied_yarn", "phi3"])
def test_a_checkpoint_in_shards(name, tmp_path, straight_only):
    """Small ones, so that the parts of a fused matrix lie in several files."""
    module = make_tiny(name)
    module.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    assert_same(load_model(tmp_path, model_impl="auto"), module)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_yarn_goes_on_behind_the_length_that_it_extends(model_impl, tmp_path):
    """A config is extended by the scaling alone, and the length that it names stays. The model ended there."""
    make_tiny("llama_tied_yarn").save_pretrained(tmp_path)  # 4 times 64 positions
    edit_config(tmp_path, max_position_embeddings=64)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model = load_model(tmp_path, model_impl=model_impl)
    assert isinstance(model, Decoder) == (model_impl == "auto") and model.max_model_len == 256
    ids, dense_attend = torch.arange(256) % 101, DenseAttend()

    def attend(layer, q, k, v, **options):
        return dense_attend(layer, q, k, v, mask=None, extras={}, **options)

    dense_attend.begin([("A", 0, ids.tolist())])
    got = model.forward(ids, torch.arange(256), torch.arange(256), attend)
    with torch.no_grad():
        expected = module(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_shards_in_a_folder_of_their_own(model_impl, tmp_path):
    """An index may say so. They were called missing, since they were looked for by their last name."""
    module = make_tiny("llama")
    module.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "parts").mkdir()
    for shard in tmp_path.glob("*.safetensors"):
        shard.rename(tmp_path / "parts" / shard.name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"parts/model-'))
    model = load_model(tmp_path, model_impl=model_impl)
    assert isinstance(model, Decoder) == (model_impl == "auto")
    for got, want in zip(packed_logits(model), packed_logits(TransformersModel(module)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama"])
def test_a_checkpoint_in_16_bits_as_float32(name, saved, tmp_path, straight_only):
    make_tiny(name, dtype=saved).save_pretrained(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(load_model(tmp_path, model_impl="auto"), module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_checkpoint_in_16_bits(dtype, tmp_path, straight_only):
    make_tiny("gemma2").save_pretrained(tmp_path)
    decoder = load_model(tmp_path, dtype=dtype, model_impl="auto")
    like = TransformersModel(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    twin = Decoder.from_transformers(like, take_weights=False)
    assert decoder.config == twin.config
    for got, want in zip(packed_logits(decoder), packed_logits(twin), strict=True):
        assert got.dtype == dtype and torch.equal(got, want)


def test_tokens_of_a_padded_head_are_never_sampled(tmp_path, straight_only):
    widen_head(make_tiny("phi3"), 40).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, model_impl="auto")
    assert decoder.vocab_size == 101
    expected = packed_logits(TransformersModel(make_tiny("phi3")))
    for got, want in zip(packed_logits(decoder), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("with_file", [False, True])
def test_stop_tokens_and_sampling_parameters_are_those_of_the_files(with_file, tmp_path, straight_only, monkeypatch):
    module = tiny("llama", monkeypatch, eos_token_id=7, bos_token_id=1)
    module.generation_config.update(eos_token_id=[5, 7], top_k=11, temperature=0.5, do_sample=True)
    module.save_pretrained(tmp_path)
    if not with_file:
        (tmp_path / "generation_config.json").unlink()
    decoder = load_model(tmp_path, model_impl="auto")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert decoder.generation_config.to_dict() == expected.to_dict()
    assert decoder.eos_token_ids == ((5, 7) if with_file else (7,))


def test_the_weights_do_not_follow_the_file(tmp_path, straight_only):
    """On the CPU, safetensors hands out views of the file."""
    make_tiny("phi3").save_pretrained(tmp_path)
    decoder = load_model(tmp_path, model_impl="auto")
    before = packed_logits(decoder)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 8)
        file.write(bytes(size - size // 8))
    assert all(torch.equal(a, b) for a, b in zip(packed_logits(decoder), before, strict=True))


def test_frequencies_that_old_checkpoints_carry_are_no_weights(tmp_path, straight_only):
    module = make_tiny("llama")
    module.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_same(load_model(tmp_path, model_impl="auto"), module)


def test_a_repository_in_the_cache_of_the_hub(tmp_path, straight_only, monkeypatch):
    module = make_tiny("llama")
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    module.save_pretrained(snapshot, max_shard_size="30KB")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loader, "_only_local", lambda path: True)
    assert_same(load_model("some/model", model_impl="auto"), module)


@pytest.mark.gpu
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_on_a_gpu_memory_holds_the_weights_and_one_tensor_more(saved, tmp_path, straight_only, monkeypatch):
    """A model of about 94 MB in bfloat16, the largest tensor of which has 8 MB there."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "head_dim": 64}
    module = tiny("llama", monkeypatch, num_attention_heads=16, num_key_value_heads=8, **sizes).to(saved)
    module.save_pretrained(tmp_path, max_shard_size="50MB")
    expected = sum(p.numel() * 2 for p in module.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoder = load_model(tmp_path, dtype="bfloat16", device="cuda", model_impl="auto")
    torch.cuda.synchronize()
    slack = 4 << 20  # tables, norms in float32, rounding of the allocator
    assert torch.cuda.memory_allocated() - before < expected + slack
    largest = 4096 * 1024 * (2 if saved == torch.bfloat16 else 6)  # a cast has both of them
    assert torch.cuda.max_memory_allocated() - before < expected + largest + slack
    twin = load_model(tmp_path, dtype="bfloat16", device="cpu", model_impl="auto")
    for got, want in zip(weights_of(decoder), weights_of(twin), strict=True):
        assert torch.equal(got.cpu(), want)


# What a checkpoint may lack


def edit_tensors(folder, edit):
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def edit_config(folder, **options):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.fixture
def sharded(tmp_path):
    make_tiny("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    return tmp_path


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_missing_shard_is_named(sharded, model_impl):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFoundError, match=rf"model\.safetensors\.index\.json names {shard.name}, which is not"):
        load_model(sharded, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_file_that_ends_early_is_named(sharded, model_impl):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    message = rf"{shard.name} is not a whole safetensors file" if model_impl == "auto" else "no weights .*incomplete"
    with pytest.raises(ModelNotFoundError, match=message):
        load_model(sharded, model_impl=model_impl)


def test_an_index_that_promises_too_much_or_is_none_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    says = json.loads(index.read_text())
    says["weight_map"]["model.norm.bias"] = min(says["weight_map"].values())
    index.write_text(json.dumps(says))
    with pytest.raises(ModelNotFoundError, match=r"has no model\.norm\.bias, which .*index\.json says"):
        load_model(sharded, model_impl="auto")
    for text in ("{", "[]", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ModelNotFoundError, match=r"model\.safetensors\.index\.json is no index"):
            load_model(sharded, model_impl="auto")


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("has lm_head.bias", lambda path: edit_tensors(path, lambda t: t | {"lm_head.bias": torch.zeros(101)})),
        (
            "has model.layers.0.self_attn.q_proj.bias",  # which the config does not tell of, and transformers drops
            lambda path: edit_tensors(path, lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        ),
        ("misses model.layers.0.mlp.down_proj.bias", lambda path: edit_config(path, mlp_bias=True)),
        ("of shape", lambda path: edit_config(path, head_dim=32)),
        ("of shape", lambda path: edit_config(path, intermediate_size=40)),
        ("stored as F64", lambda path: edit_tensors(path, lambda t: {n: x.double() for n, x in t.items()})),
        ("written for None", lambda path: save_file(load_file(path / "model.safetensors"), path / "model.safetensors")),
        ("quantised", lambda path: edit_config(path, quantization_config={"quant_method": "fp8"})),
        ("the family 'mixtral'", lambda path: edit_config(path, model_type="mixtral")),
        ("is an adapter", lambda path: (path / "adapter_config.json").write_text("{}")),
        ("code of its own", lambda path: edit_config(path, auto_map={"AutoModelForCausalLM": "code.Model"})),
        ("no model.safetensors", lambda path: (path / "model.safetensors").unlink()),
        ("compute in torch.float64", lambda path: edit_config(path, dtype="float64")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_loaded_straight(reason, change, tmp_path):
    """What becomes of it instead, transformers decides."""
    make_tiny("llama").save_pretrained(tmp_path)
    change(tmp_path)
    elsewhere = torch.device("meta" if "float64" in reason else "cpu")  # on the CPU, auto means float32
    with pytest.raises(UnsupportedModelError, match=reason):
        loader._straight(str(tmp_path), None, elsewhere, False, True, 0)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (
            r"lack model.layers.1.self_attn.q_proj.weight$",
            lambda path: edit_tensors(path, lambda t: {n: x for n, x in t.items() if "1.self_attn.q_proj" not in n}),
        ),
        (
            r"lack model.layers.3.input_layernorm.weight, and 8 more",
            lambda path: edit_config(path, num_hidden_layers=4),
        ),
        (
            r"do not fit its config: lm_head.weight is of shape \(101, 48\), .* of \(99, 48\), and 1 more",
            lambda path: edit_config(path, vocab_size=99),
        ),
        *(
            (
                f"q_proj.weight is stored as {stored}, and the config names no quantisation",
                lambda path, dtype=dtype: edit_tensors(
                    path, lambda t: {n: x.to(dtype) if n.endswith("q_proj.weight") else x for n, x in t.items()}
                ),
            )
            for stored, dtype in (("I8", torch.int8), ("F8_E4M3", torch.float8_e4m3fn))
        ),
        (
            "does not know the quantisation 'magic'",
            lambda path: [
                edit_config(path, quantization_config={"quant_method": "magic"}),
                edit_tensors(path, lambda t: {n: x.to(torch.int8) if "q_proj" in n else x for n, x in t.items()}),
            ],
        ),
        ("adapters are not supported", lambda path: (path / "adapter_config.json").write_text("{}")),
        ("requires optimum", lambda path: edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4})),
        ("generation config .* not a valid JSON", lambda path: (path / "generation_config.json").write_text("{")),
        ("generation config", lambda path: (path / "generation_config.json").write_text("[]")),
        (
            r"eos_token_id is \[5, 'x'\]",
            lambda path: (path / "generation_config.json").write_text('{"eos_token_id": [5, "x"]}'),
        ),
        ("no config .*floaty", lambda path: edit_config(path, dtype="floaty")),
        ("no config", lambda path: (path / "config.json").write_text("[]")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_loaded_at_all(reason, change, model_impl, tmp_path):
    """transformers rolls dice for weights that are missing, casts integers as if they were the weights, also of a
    quantisation that it does not know, and looks past an adapter and a broken generation config: there were answers,
    and no error. The others were errors of another kind than those that we promise.
    """
    make_tiny("llama").save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises((ModelNotFoundError, UnsupportedModelError), match=reason):
        load_model(tmp_path, model_impl=model_impl)


def test_an_adapter_alone_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapters are not supported"):
        load_model(tmp_path)


def test_a_checkpoint_under_other_names_becomes_a_decoder_through_transformers(tmp_path, caplog):
    """The original GPT-2 has neither the prefix nor the head."""
    module = make_tiny("gpt2")
    module.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: {n.removeprefix("transformer."): x for n, x in tensors.items()})
    caplog.set_level("INFO", "cbatch.models.loader")
    decoder = load_model(tmp_path, model_impl="auto")
    assert "is not loaded straight into the decoder" in caplog.text and "misses transformer.h.0" in caplog.text
    assert_same(decoder, module)


# Names, shapes and tables


@pytest.mark.parametrize("name", COVERED)
def test_the_config_stands_for_exactly_the_weights_of_the_module(name):
    for config in variants(name):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = AutoModelForCausalLM.from_config(config)
        expected = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        assert decoder_config(config, torch.float32).weight_shapes() == expected


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": LINEAR}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        *((name, None) for name in COVERED),
        *(("llama", rope) for rope in (LINEAR, LLAMA3, PARTIAL)),
        *((name, PARTIAL) for name in ("glm", "glm4", "nemotron", "phi3", "stablelm", "qwen2", "ernie4_5")),
        ("gemma3_text", BY_TYPE),
        ("olmo3", BY_TYPE),
    ],
)
def test_rotary_tables_are_those_of_the_module(name, rope, monkeypatch):
    module = tiny(name, monkeypatch, **({"rope_parameters": copy.deepcopy(rope)} if rope else {}))
    config = decoder_config(module.config, torch.float32)
    length = config_facts.max_positions(module.config)
    tables = rope_tables(module.config, config, length, torch.device("cpu"))
    assert set(tables) == {kind for kind in config.ropes if kind is not None}
    for kind, table in tables.items():
        rotary = copy.deepcopy(module.get_submodule(f"{config.names.body}.rotary_emb"))
        positions = torch.arange(length)[None]
        cos, sin = rotary(torch.empty(0), positions, *([kind] if kind else []))
        half = cos.shape[-1] // 2  # both come twice, once for each half of a head
        assert torch.equal(table, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1))


def test_a_fused_matrix_is_made_in_place():
    """Beside the decoder's own weights, one tensor of the source at most is in memory."""
    module = make_tiny("llama")
    config = decoder_config(module.config, torch.float32)
    asked = Counter()

    class Watched(ModuleSource):
        def take(self, name):
            asked["take"] += "weight" in name and "norm" not in name
            return super().take(name)

        def read(self, name, out):
            asked["read"] += 1
            assert out._base is not None
            super().read(name, out)

    tables = rope_tables(module.config, config, 8, torch.device("cpu"))
    load_weights(Watched(module, take=True), config, tables)
    assert asked == {"take": 2 + 2 * 3, "read": 5 * 3}  # embedding, head, o, down; q, k, v, gate, up
    gc.collect()
    assert sum(p.numel() for p in module.parameters()) == 0


# Dice


def weights_of(decoder):
    found = [decoder.weights.embed, decoder.weights.head.weight, decoder.weights.final_norm.weight]
    for layer in decoder.weights.layers:
        found += [layer.qkv.weight, layer.o.weight, layer.up.weight, layer.down.weight]
    return [dense(weight) for weight in found]


def test_dummy_weights_of_a_seed_are_the_same_and_random_state_is_left_alone(tmp_path, straight_only):
    make_tiny("llama").save_pretrained(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    options = {"load_format": "dummy", "model_impl": "auto"}
    one, two, other = (load_model(tmp_path / "config.json", seed=seed, **options) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(two), strict=True))
    assert not torch.equal(dense(one.weights.head.weight), dense(other.weights.head.weight))
    assert not torch.equal(dense(one.weights.layers[0].o.weight), dense(one.weights.layers[1].o.weight))
    assert dense(one.weights.layers[0].up.weight).std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", COVERED)
def test_dummy_weights_are_normal_norms_one_and_biases_zero(name):
    hf_config = FAMILIES[name]()
    hf_config.initializer_range = 0.5
    config = decoder_config(hf_config, torch.float32)
    source = RandomSource(config, torch.device("cpu"), torch.float32, 0)
    weights = load_weights(source, config, rope_tables(hf_config, config, 8, torch.device("cpu")))
    assert torch.equal(weights.final_norm.weight, torch.ones(config.hidden_size))
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.up, layer.down):
            assert matrix.weight.std().item() == pytest.approx(0.5, rel=0.1)
            assert matrix.bias is None or not matrix.bias.any()
        for norm in (layer.attn_norm, layer.attn_post_norm, layer.mlp_norm, layer.mlp_post_norm):
            if norm is not None:
                assert (norm.weight == 1.0).all()
                assert norm.bias is None or not norm.bias.any()
    assert (weights.head.weight is weights.embed) == config.tied


def test_dummy_weights_of_a_family_that_is_not_covered_are_made_by_transformers(tmp_path):
    make_tiny("mixtral").save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path, load_format="dummy", model_impl="auto"), TransformersModel)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_dummy_weights_of_a_quantised_config_are_refused(model_impl, tmp_path):
    """They were made of a model that is not quantised, and measured as if it were."""
    FAMILIES["llama"]().save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"'dummy' makes floating point .* names a quantisation"):
        load_model(tmp_path / "config.json", load_format="dummy", model_impl=model_impl)


# Start-up


def runs(script):
    """In a process of its own: in this one, everything is imported already."""
    root = Path(loader.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_covered_model_loads_without_the_modelling_stack_which_works_afterwards(tmp_path):
    for name in ("llama", "mixtral"):
        make_tiny(name).save_pretrained(tmp_path / name)
    plain_tokenizer(tmp_path / "llama", "PreTrainedTokenizerFast")
    script = f"""
import sys
from cbatch import LLM
from cbatch.models.loader import load_model
with LLM({str(tmp_path / "llama")!r}, model_impl="auto", device="cpu", max_model_len=64, num_blocks=16) as llm:
    assert type(llm.engine.model).__name__ == "Decoder"
    assert type(llm.get_tokenizer()).__name__ == "TokenizersBackend"
heavy = ["torch._dynamo", "torch.distributed.tensor", "sympy", "sklearn", "transformers.activations"]
heavy += ["transformers.modeling_utils", "transformers.models.auto.auto_factory"]
assert not [name for name in heavy if name in sys.modules], [name for name in heavy if name in sys.modules]
model = load_model({str(tmp_path / "mixtral")!r}, model_impl="auto")
assert type(model).__name__ == "TransformersModel"
import transformers
from transformers.activations import ACT2FN
assert len(ACT2FN) > 10
assert "Args" in transformers.Qwen2Config.__doc__
"""
    runs(script)


def test_a_covered_model_loads_without_torchvision_where_that_is_installed(tmp_path):
    """For the types of two arguments, validators of configs import it, and it imports torch._dynamo: a second."""
    make_tiny("llama").save_pretrained(tmp_path / "llama")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('torchvision was imported')")
    (tmp_path / "torchvision-0.26.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.26.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.26.0\n")
    script = f"""
import sys
sys.path.append({str(tmp_path)!r})
from cbatch.models.loader import load_model
from transformers.utils import is_torchvision_available
assert is_torchvision_available()
assert type(load_model({str(tmp_path / "llama")!r}, model_impl="auto")).__name__ == "Decoder"
from transformers.utils.type_validators import resampling_validator
resampling_validator(2)
assert not set(sys.modules) & {{"torchvision", "transformers.image_utils", "transformers.video_utils"}}
try:
    import transformers.image_utils
except RuntimeError as error:  # the real one, which imports it
    assert "was imported" in str(error)
else:
    sys.exit("a stand-in was left")
"""
    runs(script)


def test_a_capture_begins_without_torch_dynamo():
    """Torch wraps what dispatches for a mode, so that its first operator imports that: a second of a start."""
    script = """
import sys, torch
from cbatch.graphs import _BeforeOperators
seen = []
with _BeforeOperators(lambda: seen.append(1)):
    torch.zeros(2)
assert seen and "torch._dynamo" not in sys.modules
"""
    runs(script)


def test_models_that_load_at_once_leave_the_library_as_it_was():
    """The second thread took the first one's stand-in for the original, and put that back."""
    docstrings = importlib.import_module("transformers.utils.auto_docstring")  # a function has its name, too

    before = docstrings.auto_class_docstring
    first_is_out = threading.Event()

    def second():
        with light_imports():
            first_is_out.wait(10)

    with light_imports():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)  # as long as it takes to come in, if it may
    first_is_out.set()
    thread.join()
    assert docstrings.auto_class_docstring is before


def test_what_is_kept_of_a_stand_in_is_as_good_as_the_module():
    """A checkpoint's own config code is imported among the stand-ins. One that kept the activations could look them up
    and no more: to walk over them was a KeyError, to add one a TypeError."""
    script = """
import sys
from cbatch.models.light_imports import light_imports
with light_imports():
    from transformers.activations import ACT2FN as kept
    assert "torch.distributed.tensor" not in sys.modules and "gelu" in kept
from transformers.activations import ACT2FN
assert kept is not ACT2FN
kept.update(mine=1)
assert list(kept) == list(ACT2FN) and len(kept) == len(ACT2FN) and ACT2FN.pop("mine") == 1
assert kept.get("none") is None and type(kept["gelu"]) is type(ACT2FN["gelu"]) and len(kept.items()) == len(ACT2FN)
"""
    runs(script)


def test_another_thread_gets_the_module_and_no_stand_in():
    """A program that imported a model while an engine was loading left that model with the stand-in for good."""
    script = """
import sys, threading
from cbatch.models.light_imports import light_imports
kept = []
def other():
    from transformers.activations import ACT2FN
    from transformers.video_utils import VideoMetadataType
    kept.extend([ACT2FN, VideoMetadataType])
with light_imports():
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
from transformers.activations import ACT2FN
from transformers.video_utils import VideoMetadataType
assert kept[0] is ACT2FN and kept[1] is VideoMetadataType
"""
    runs(script)


def test_a_module_that_took_its_place_is_not_removed_with_the_stand_in(monkeypatch):
    """Of two threads that saw the stand-in, the second removed what the first had imported by then: from then on there
    were two modules of one name, or an import that failed."""
    name, seen, go_on = "cbatch_stand_in", threading.Event(), threading.Event()

    class Modules(dict):
        def get(self, key, default=None):
            found = super().get(key, default)
            if key == name and threading.current_thread() is second:
                seen.set()
                go_on.wait(0.3)  # as long as it takes the first, if it may
            return found

    modules = Modules({name: light_imports_module._OnDemand(name, ("", object))})
    monkeypatch.setattr(light_imports_module, "sys", SimpleNamespace(modules=modules))
    second = threading.Thread(target=light_imports_module._remove, args=(name,))
    second.start()
    assert seen.wait(10)
    light_imports_module._remove(name)
    modules.setdefault(name, "the module")
    go_on.set()
    second.join()
    assert modules[name] == "the module"


def plain_tokenizer(folder, named):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="b").save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    says = json.loads(file.read_text())
    says.pop("tokenizer_class", None)
    file.write_text(json.dumps(says | ({"tokenizer_class": named} if named else {})))


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "its own", "GPT2Tokenizer", None])
@pytest.mark.parametrize("name", COVERED)
def test_the_tokenizer_is_of_the_class_that_transformers_chooses(name, named, tmp_path):
    FAMILIES[name]().save_pretrained(tmp_path)
    if named == "its own":
        named = loader._TOKENIZERS.get(FAMILIES[name]().model_type, "LlamaTokenizerFast")
    plain_tokenizer(tmp_path, named)
    mine, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(mine) is type(expected)
    assert mine.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert mine.special_tokens_map == expected.special_tokens_map


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tokenizer_class": 3}', "version https://git-lfs"])
def test_a_broken_file_of_a_tokenizer_ends_in_our_error(file, text, tmp_path):
    FAMILIES["llama"]().save_pretrained(tmp_path)
    plain_tokenizer(tmp_path, "PreTrainedTokenizerFast")
    (tmp_path / file).write_text(text)
    try:
        assert load_tokenizer(tmp_path)("ab")["input_ids"] == [0, 1]  # not every file matters
    except ModelNotFoundError as error:
        assert f"no tokenizer for '{tmp_path}'" in str(error)


@pytest.mark.parametrize("name", ["gemma", "gpt2", "llama", "qwen3", "bert_decoder"])
def test_a_tokenizer_is_not_made_of_nothing(name, tmp_path):
    """Of a folder without its files, GPT-2's read any text as no token, Gemma's as one unknown token."""
    FAMILIES[name]().save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no tokenizer for"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_needs_no_config_beside_it(tmp_path):
    plain_tokenizer(tmp_path, "PreTrainedTokenizerFast")
    assert load_tokenizer(tmp_path)("ab")["input_ids"] == [0, 1]
