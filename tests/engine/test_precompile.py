"""What is compiled when an engine is made: that the calls are right, and that no step compiles anything afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.models.decoder import Decoder
from cbatch.models.transformers_model import TransformersModel
from cbatch.precompile import _attention, _pages, _sampling, _Stored
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.kv_spec import group_layers
from tests.models.families import make_tiny


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "olmo2"])
def test_what_is_launched_at_the_start_is_what_a_decoder_takes(family: str) -> None:
    """Each call by itself, as on a GPU, with the operations that stand for its kernels on the CPU."""
    model = Decoder.from_transformers(TransformersModel(make_tiny(family)), take_weights=False)
    groups = group_layers(model.kv_specs)
    config = EngineConfig(max_num_seqs=4, block_size=16).resolve(model.max_model_len, model.device)
    stored = _Stored(_pages(model, config, groups, 40, 1))
    with torch.inference_mode():
        calls = [*_sampling(model), *_attention(model, config, groups)]
        for call in itertools.chain(calls, model.products(16, stored), model.products(80, stored)):
            call()


@pytest.fixture
def split_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product of 65 to 80 rows is split by 4, as that of an 8B model's down projection is, and no other."""
    from cbatch.kernels import linear
    from cbatch.kernels.skinny_gemm import Config

    heuristic = linear.heuristic
    shapes = ("64x128", "64x64", "128x64")  # QKV, output, down
    tables = {torch.cuda.get_device_name(): {shape: {80: Config(64, 64, 2, 4, 4)} for shape in shapes}}
    monkeypatch.setattr(linear, "_tables", lambda: tables)
    linear._choose.cache_clear()
    assert heuristic(64, 64, 32, "linear", 132).split_k == 1
    yield
    linear._choose.cache_clear()


@pytest.mark.gpu
def test_no_step_with_log_probabilities_of_prompts_compiles_anything(
    monkeypatch: pytest.MonkeyPatch, split_products: None
) -> None:
    """No graph has such a step, so it met kernels that no graph had run: keys that are not split, penalties without a
    filter, logits that begin at no 16 bytes, products of a number of rows that no bucket has. Each took a second."""
    import triton
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.random.fork_rng([torch.cuda.current_device()]), torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    compiled: list[str] = []

    def note(src: Any, **_: Any) -> None:
        compiled.append(src.name)

    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 1, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 1, "top_k": 5, "logit_bias": {3: 1.0}},
    ]
    options = {"max_num_seqs": 4, "block_size": 16, "num_blocks": 400, "max_num_batched_tokens": 256}
    with Engine.from_model(model, model_impl="decoder", **options) as engine:
        assert engine.stats()["num_graphs"]
        monkeypatch.setattr(triton.knobs.compilation, "listener", note)
        for length, way in itertools.product((1, 2, 9, 70, 150, 256, 1300), ways):
            params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2, **way)
            beside = engine.submit([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
            handle = engine.submit([(7 * i + 3) % 101 for i in range(length)], params)
            assert len(handle.result(60).outputs[0].token_ids) == 3
            beside.result(60)
            assert not compiled, (length, way)
