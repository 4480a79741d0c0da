"""The caller's module is left as it was, and what cannot be served right is noticed at load."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel, T5Config, T5ForConditionalGeneration

from cbatch import LLM, SamplingParams
from cbatch.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from cbatch.models.transformers_model import TransformersModel
from tests.models.families import make_tiny, widen_head
from tests.models.paged import PagedRunner, generate_together

IDS = torch.tensor([[5, 17, 42, 9, 77, 23, 61]])


@torch.no_grad()
def plain_logits(module):
    return module(input_ids=IDS, use_cache=False).logits[0]


def packed_logits(model, attend=None):
    """Logits of IDS in one step of our own, over pages."""
    runner = PagedRunner(model, [IDS[0].tolist()])
    seen = []
    forward = model.forward

    def all_rows(input_ids, positions, sample_rows, inner):
        seen.append(forward(input_ids, positions, torch.arange(len(input_ids)), attend or inner))
        return seen[-1][sample_rows]

    model.forward = all_rows
    try:
        runner.step([(0, IDS.shape[1])])
    finally:
        del model.forward
    return seen[0]


# The caller's module


def test_a_plain_forward_gives_the_same_logits_before_during_and_after():
    module = make_tiny("gemma2").train()
    implementation, buffers = module.config._attn_implementation, dict(module.named_buffers())
    before = plain_logits(module)
    model = TransformersModel(module)
    assert torch.equal(plain_logits(module), before)

    during = []

    def attend(layer, q, k, v, *, scale, window, softcap, sinks):
        during.append(plain_logits(module))  # in the middle of our own forward, in the same thread
        return torch.zeros(*q.shape[:2], v.shape[2])

    packed_logits(model, attend)
    assert len(during) == 3
    assert all(torch.equal(logits, before) for logits in during)
    assert torch.equal(plain_logits(module), before)
    assert module.config._attn_implementation == implementation
    assert all(part.training for part in module.modules())
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())


def test_training_the_module_while_the_model_lives_is_seen_at_once():
    module = make_tiny("llama").train()
    model = TransformersModel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    before = packed_logits(model)
    for _ in range(3):
        module(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        packed = packed_logits(model)
        torch.testing.assert_close(packed, plain_logits(module), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(packed, before, atol=0.1)
    assert all(p.requires_grad for p in module.parameters())


def test_weights_are_shared_and_computed_buffers_are_not():
    module = make_tiny("deepseek_v3")
    copy = TransformersModel(module)._module
    assert [id(p) for p in copy.parameters()] == [id(p) for p in module.parameters()]
    router_bias = "model.layers.1.mlp.gate.e_score_correction_bias"  # saved with the weights, and trained
    assert copy.get_buffer(router_bias) is module.get_buffer(router_bias)
    assert copy.model.rotary_emb.inv_freq is not module.model.rotary_emb.inv_freq
    assert copy.config is not module.config
    assert copy.model.layers[0].self_attn.config is copy.config, "one config, shared as in the original"


def test_dynamic_frequencies_of_a_long_forward_by_the_caller_stay_the_callers():
    module = make_tiny("llama_dynamic")
    model = TransformersModel(module)
    before = packed_logits(model)
    with torch.no_grad():
        module(input_ids=torch.ones(1, 300, dtype=torch.int64), use_cache=False)  # past max_position_embeddings
    assert torch.equal(packed_logits(model), before)


def test_random_state_is_left_alone():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    module = make_tiny("mixtral")
    python, numpy, pytorch = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    packed_logits(TransformersModel(module))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy)
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_hooks_are_called_and_their_owner_is_not_copied():
    class Owner:
        calls = 0

        def __deepcopy__(self, memo):
            raise AssertionError("the owner of a hook was copied")

        def hook(self, module, args, output):
            self.calls += 1
            return 2 * output

    module, owner = make_tiny("llama"), Owner()
    module.lm_head.register_forward_hook(owner.hook)
    model = TransformersModel(module)
    assert owner.calls > 0
    torch.testing.assert_close(packed_logits(model), plain_logits(module), atol=1e-4, rtol=1e-4)


def test_a_caller_under_autocast_and_inference_mode_gets_a_float32_model():
    module = make_tiny("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        model = TransformersModel(module)
    assert model.dtype == torch.float32
    torch.testing.assert_close(packed_logits(model), plain_logits(module), atol=1e-4, rtol=1e-4)


def test_a_matmul_precision_that_was_set_for_one_backend_alone_is_no_trouble(monkeypatch):
    """torch then raises when it is asked for the precision of all of them."""

    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    TransformersModel(make_tiny("llama"))


# torch.compile


@pytest.mark.parametrize("how", ["whole", "forward", "inner", "in_place"])
def test_a_compiled_module_is_unwrapped(how):
    """Nothing is compiled here: a wrapper that was left in the copy would call the caller's module, or the compiler."""
    plain = make_tiny("llama")
    expected = plain_logits(plain)
    module = plain
    if how == "whole":
        module = torch.compile(plain, backend=_refuse_to_compile)
    elif how == "forward":
        plain.forward = torch.compile(plain.forward, backend=_refuse_to_compile)
    elif how == "inner":
        plain.model = torch.compile(plain.model, backend=_refuse_to_compile)
    else:
        plain.compile(backend=_refuse_to_compile)
    torch.testing.assert_close(packed_logits(TransformersModel(module)), expected, atol=1e-4, rtol=1e-4)


def _refuse_to_compile(graph, inputs):
    raise AssertionError("the compiler was called")


# Facts


def test_stop_tokens_come_from_the_generation_config_then_from_the_config():
    module = make_tiny("llama")
    assert TransformersModel(module).eos_token_ids == ()
    module.config.eos_token_id = 3
    module.generation_config.eos_token_id = None
    assert TransformersModel(module).eos_token_ids == (3,)
    module.generation_config.eos_token_id = [7, 4, 7]
    assert TransformersModel(module).eos_token_ids == (7, 4)


def test_a_model_that_looks_at_data_on_the_host_is_not_capturable():
    assert TransformersModel(make_tiny("llama")).capturable
    assert not TransformersModel(make_tiny("llama_dynamic")).capturable, "it looks at the largest position"
    moe = make_tiny("mixtral")
    moe.config._experts_implementation = "grouped_mm"
    assert TransformersModel(moe).capturable
    moe.config._experts_implementation = "eager"
    assert not TransformersModel(moe).capturable, "it loops over the experts that were hit"


def test_a_step_may_sample_nothing():
    """Chunks in the middle of a prompt have no row to sample."""
    model = TransformersModel(make_tiny("llama"))
    assert generate_together(model, [[5, 17, 42, 9, 77, 23, 61]], 2, chunk=2) == generate_together(
        model, [[5, 17, 42, 9, 77, 23, 61]], 2, chunk=7
    )


def test_tokens_of_a_padded_head_that_the_embedding_lacks_are_never_sampled():
    """Fed back as the next input, such a token ended the engine and all its requests: vocab_size was the head's."""
    module, prompts = make_tiny("llama"), [[5, 17, 42], [9]]
    expected = generate_together(TransformersModel(module), prompts, 8)
    widen_head(module, 40)
    assert (plain_logits(module).argmax(-1) >= 101).any(), "they would be"
    model = TransformersModel(module)
    assert (model.vocab_size, packed_logits(model).shape[1]) == (101, 101)
    assert generate_together(model, prompts, 8) == expected
    with LLM(module, num_blocks=20, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
        with pytest.raises(InvalidRequestError, match="the vocabulary has 101"):
            llm.generate([[101]])


# Refusals


def test_another_device_or_dtype_than_the_modules_own_is_refused_and_the_module_stays():
    module = make_tiny("llama")
    assert TransformersModel(module, device="cpu", dtype=torch.float32).device == torch.device("cpu")
    with pytest.raises(ConfigError, match="the module is on cpu"):
        TransformersModel(module, device="cuda:0")
    with pytest.raises(ConfigError, match=r"the module is torch\.float32"):
        TransformersModel(module, dtype=torch.bfloat16)
    assert module.dtype == torch.float32


def test_a_model_over_several_devices_is_refused():
    module = make_tiny("llama")
    module.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(UnsupportedModelError, match="spread over 0, 1"):
        TransformersModel(module)
    module.hf_device_map = {"": "cpu"}
    TransformersModel(module)
    module.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="spread over cpu, meta"):
        TransformersModel(module)
    with pytest.raises(UnsupportedModelError, match="on the meta device, where it has a shape and no weights"):
        TransformersModel(make_tiny("llama").to("meta"))


def test_float64_is_refused_as_such_and_not_for_its_rounding():
    with pytest.raises(UnsupportedModelError, match="computes in float64"):
        TransformersModel(make_tiny("llama").double())


def test_a_forward_that_was_replaced_is_refused_as_such():
    """A wrapper of `*args` calls the caller's module: run through our copy, it would not even be the copy that runs."""
    module = make_tiny("llama")
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"has been replaced by one that takes \(\*args, \*\*kwargs\)"):
        TransformersModel(module)
    del module.forward
    TransformersModel(module)


def test_what_is_no_causal_language_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear is not a model of transformers"):
        TransformersModel(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="no language modelling head"):
        TransformersModel(LlamaModel(make_tiny("llama").config))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        TransformersModel(t5)


class IgnoresPositions(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


class MixesNeighbours(LlamaForCausalLM):
    """A convolution over the last two tokens: a state besides the KV cache."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        x = self.get_input_embeddings()(input_ids)
        x = x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return super().forward(inputs_embeds=x, position_ids=position_ids, **kwargs)


class DropsSampleRows(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("kind", [IgnoresPositions, MixesNeighbours, DropsSampleRows])
def test_the_comparison_with_the_model_alone_notices(kind):
    module = make_tiny("llama")
    module.__class__ = kind
    with pytest.raises(UnsupportedModelError, match="does not give the logits of the model alone"):
        TransformersModel(module)


def test_a_model_that_gives_nan_is_refused():
    module = make_tiny("llama")
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    with pytest.raises(UnsupportedModelError, match="100% of the rows"):
        TransformersModel(module)
