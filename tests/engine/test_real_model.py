"""Real text through a real model: nothing that the engine does on the way may change one token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cbatch
from cbatch.engine import Engine
from cbatch.sampling_params import SamplingParams

NEW_TOKENS = 64
DEMO_PROMPTS = Path(cbatch.__file__).parent / "data" / "demo_prompts.json"


@pytest.fixture(scope="module")
def model_and_prompts(demo_model: Path) -> tuple[Any, list[list[int]]]:
    """SmolLM2 in float32, and 16 prompts of about 10 to 300 tokens: plain, chat, and several joined."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    texts = json.loads(DEMO_PROMPTS.read_text())
    prompts = []
    for i in range(16):
        text = " ".join(texts[i : i + 1 + (i % 4) * 4])
        if i % 2:
            prompts.append(tokenizer(text)["input_ids"])
        else:
            chat = [{"role": "user", "content": text}]
            prompts.append(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
    return model, prompts


@pytest.mark.slow
@pytest.mark.timeout(900)
@torch.inference_mode()
def test_tokens_equal_generate_under_chunked_prefill_and_preemption(
    model_and_prompts: tuple[Any, list[list[int]]], demo_model: Path
) -> None:
    """16 requests at once through steps of 48 tokens and a pool that holds a third of them.

    Every request's tokens must be those of ``generate`` for it alone, and the asynchronous run's those of the
    synchronous one.
    """
    model, prompts = model_and_prompts
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=2
        )
        expected.append(out[0, len(prompt) :].tolist())

    # The caller's module on both schedules, and the decoder that a model given by name gets.
    for source, schedule in ((model, "async"), (model, "sync"), (demo_model, "async")):
        # Blocks of 16 tokens: the longest request needs 25 of them, and all of them together about 170.
        options = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "block_size": 16, "num_blocks": 56}
        with Engine.from_model(source, schedule=schedule, max_model_len=1024, **options) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
            handles = [engine.submit(prompt, params) for prompt in prompts]
            answers = [handle.result(600).outputs[0].token_ids for handle in handles]
            kind, preemptions = type(engine.model).__name__, engine.stats()["num_preemptions"]
        engine.scheduler.check()
        assert preemptions > 0, "the pool was too large to force a preemption"
        assert answers == expected, (kind, schedule)
    assert kind == "Decoder"
    assert max(len(p) for p in prompts) > 3 * 48, "no prompt is long enough to be cut into chunks"


def test_callers_model_is_left_as_it_was(model_and_prompts: tuple[Any, list[list[int]]]) -> None:
    """A plain forward on the module that was handed in gives the same logits before, during and after."""
    model, prompts = model_and_prompts
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        before = model(ids).logits
        with Engine.from_model(model, max_num_seqs=4, max_model_len=512) as engine:
            handles = [engine.submit(p, SamplingParams(temperature=0.0, max_tokens=20)) for p in prompts[:4]]
            handles[0].next_chunk(60)
            during = model(ids).logits
            for handle in handles:
                handle.result(120)
        after = model(ids).logits
    assert torch.equal(before, during) and torch.equal(before, after)
    assert model.config._attn_implementation == "sdpa"
