"""The decoder inside the engine on a GPU: captured, never waiting, and the same tokens in every bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbatch.engine import Engine
from cbatch.sampling_params import SamplingParams
from tests.engine.test_cuda import check_that_nothing_synchronises
from tests.models.families import make_tiny

pytestmark = pytest.mark.gpu
KINDS = ("llama", "qwen3", "gemma3_text", "gpt2", "olmo2")  # rotary, head norms, sandwich, positions, row norms


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_step_never_waits_for_the_device(family: str, enforce_eager: bool) -> None:
    """CUDA calls that wait on their own (a copy from pageable memory, ``.item()``) raise in this mode."""
    check_that_nothing_synchronises(family, enforce_eager=enforce_eager, model_impl="decoder")


@pytest.mark.parametrize("family", KINDS)
def test_every_bucket_gives_the_tokens_of_transformers(family: str) -> None:
    """1 to 40 requests that end one after the other, so that each bucket of decode steps is replayed, padding too."""
    model = make_tiny(family, device="cuda")
    dice = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 101, (1 + i % 23,), generator=dice).tolist() for i in range(40)]
    answers = []
    for model_impl in ("transformers", "decoder"):
        options = {"max_num_seqs": 40, "block_size": 16, "num_blocks": 400, "model_impl": model_impl}
        with Engine.from_model(model, **options) as engine:
            handles = [engine.submit(prompt, greedy(4 + i)) for i, prompt in enumerate(prompts)]
            answers.append([handle.result(120).outputs[0].token_ids for handle in handles])
    assert answers[0] == answers[1]


def test_taking_the_weights_holds_them_once() -> None:
    """A model of about 210 MB: what is left after the load is that, and the peak is one layer's matrices more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from cbatch.models.decoder import Decoder
    from cbatch.models.transformers_model import TransformersModel

    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        module = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    like = TransformersModel(module)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = sum(p.nbytes for p in module.model.layers[0].parameters())
    torch.cuda.reset_peak_memory_stats()
    decoder = Decoder.from_transformers(like, take_weights=True)
    del like, module
    assert torch.cuda.memory_allocated() - before < layer / 2
    assert torch.cuda.max_memory_allocated() - before < 2 * layer
    assert decoder.num_weight_bytes > 5 * layer


def test_no_large_kernel_is_compiled_after_all_were_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the list at the start of an engine lacks is compiled in a row, and a cold start takes twice as long."""
    import triton

    from cbatch import engine as engine_module

    compiled: list[str] = []

    def note(src: Any, **_: Any) -> None:
        compiled.append(src.name)

    def precompile(*args: Any) -> None:
        real(*args)
        compiled.clear()

    real = engine_module.precompile
    monkeypatch.setattr(engine_module, "precompile", precompile)
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    model = make_tiny("llama", device="cuda").to(torch.bfloat16)
    with Engine.from_model(model, max_num_seqs=129, block_size=16, num_blocks=400, model_impl="decoder") as engine:
        assert engine.submit([1, 2, 3], greedy(4)).result(120).outputs[0].token_ids
    assert not {"_skinny_gemm_kernel", "_threshold_kernel", "decode_kernel", "prefill_kernel"} & set(compiled)
