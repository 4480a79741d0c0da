"""The same tokens as transformers' own loop: greedy and beams, padded and not, with ends in the middle."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cbatch.errors import PromptTooLongError
from cbatch.interleave import InterleavedGenerator
from cbatch.interleave.decoding import Batch, Decoding
from cbatch.interleave.options import resolve
from cbatch.interleave.search import Tokens
from tests.interleave.conftest import Make, expected, prompts
from tests.models.families import make_tiny, widen_head

FAMILIES = ["gpt2", "llama", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral"]  # the last three with a window of 8


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_beams_equal_transformers(tiny: Make, device: str, family: str) -> None:
    """29 tokens, so that sliding windows slide; rows that end at the sixth token, at others, and not at all."""
    model = tiny(family, device)
    ids, mask = prompts(device)
    generators = [InterleavedGenerator(model), InterleavedGenerator(model, cache="dynamic")]
    for attention_mask in (torch.ones_like(mask), mask):
        check = functools.partial(check_equal, generators, ids, attention_mask)
        tokens = check()
        stop = {"eos_token_id": int(tokens[0, 9 + 5]), "pad_token_id": 1}
        check(**stop)
        check(eos_token_id=[stop["eos_token_id"], int(tokens[1, 9 + 2])], pad_token_id=2)
        check(num_beams=3)
        check(num_beams=3, **stop)


def check_equal(
    generators: list[InterleavedGenerator], ids: torch.Tensor, mask: torch.Tensor, count: int = 20, **options: Any
) -> torch.Tensor:
    """The generators are of one model."""
    right = expected(generators[0].model, ids, mask, count, **options)
    for generator in generators:
        tokens = generator.generate(ids, mask, count, **options)
        assert isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int64 and tokens.device == right.device
        assert tokens.tolist() == right.tolist(), (generator.cache, options)
    return right


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_that_ends_early_is_padded_while_others_go_on(tiny: Make, device: str, attention: str) -> None:
    model = tiny("llama", device)
    model.set_attn_implementation(attention)
    ids, mask = prompts(device)
    free = expected(model, ids, mask, 20)
    stop = int(free[0, 9 + 3])
    tokens = InterleavedGenerator(model).generate(ids, mask, 20, eos_token_id=stop, pad_token_id=7)
    model.set_attn_implementation("sdpa")
    assert tokens[0, 9 + 4 :].eq(7).all() and tokens[0, : 9 + 4].tolist() == free[0, : 9 + 4].tolist()
    assert any(row.tolist() == whole.tolist() for row, whole in zip(tokens, free, strict=True)), "no row went on"


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.0])
def test_beams_with_every_way_to_stop(tiny: Make, device: str, early_stopping: Any, length_penalty: float) -> None:
    """Several stop tokens, so that beams end all the time, and what an ended search would still do is seen."""
    generator = InterleavedGenerator(tiny("llama", device))
    ids, mask = prompts(device, rows=2)
    ends = {"eos_token_id": list(range(3, 18)), "pad_token_id": 0}
    how = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for beams in (2, 4):
        check_equal([generator], ids, mask, count=12, num_beams=beams, **ends, **how)


def test_the_callers_default_dtype_is_not_that_of_the_scores(tiny: Make, device: str) -> None:
    """A notebook that had loaded a model in bfloat16 by ``set_default_dtype``: sums of beams were rounded to it, and
    other beams won. In float16 -1e9 does not exist, and the call ended in an error."""
    generator = InterleavedGenerator(tiny("gpt2", device))
    ids, mask = prompts(device)
    options: dict[str, Any] = {"eos_token_id": list(range(3, 100, 9)), "pad_token_id": 0}
    before = torch.get_default_dtype()
    right = [expected(generator.model, ids, mask, 20, num_beams=beams, **options).tolist() for beams in (2, 3, 4, 6)]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            tokens = [generator.generate(ids, mask, 20, num_beams=beams, **options) for beams in (2, 3, 4, 6)]
        finally:
            torch.set_default_dtype(before)
        assert [rows.tolist() for rows in tokens if isinstance(rows, torch.Tensor)] == right, dtype


def test_numbers_of_numpy_are_numbers(tiny: Make, device: str) -> None:
    """As in ``SamplingParams``. "max_new_tokens is np.int64(3), but must be a whole number" is no help."""
    generator = InterleavedGenerator(tiny("llama", device))
    ids, mask = prompts(device)
    check_equal([generator], ids, mask, np.int64(6), num_beams=np.int32(2), length_penalty=np.float32(0.5))  # type: ignore[arg-type]
    check_equal([generator], ids, mask, 6, eos_token_id=[np.int64(7), np.int16(8)], pad_token_id=np.uint8(1))
    warm: Any = {"temperature": np.float16(0.5), "top_k": np.int8(5), "top_p": np.float32(0.9)}
    torch.manual_seed(3)
    tokens = generator.generate(ids, mask, 6, **warm)
    torch.manual_seed(3)
    plain = {name: value.item() for name, value in warm.items()}
    assert torch.equal(tokens, generator.generate(ids, mask, 6, **plain))  # type: ignore[arg-type]


def test_the_models_generation_config_decides_what_a_call_leaves_out(tiny: Make, device: str) -> None:
    model = tiny("qwen3", device)
    ids, mask = prompts(device)
    stop = int(expected(model, ids, mask, 12)[1, 9 + 4])
    before = model.generation_config
    model.generation_config = type(before)(max_new_tokens=12, eos_token_id=[stop], pad_token_id=1, num_beams=2)
    try:
        tokens = InterleavedGenerator(model).generate(ids, mask)
        assert tokens.tolist() == model.generate(ids, attention_mask=mask).tolist()
    finally:
        model.generation_config = before


def test_the_models_max_length_counts_where_nothing_else_says_how_many(tiny: Make, device: str) -> None:
    """Older checkpoints have it in their ``generation_config``. It was passed over, and 20 tokens came instead."""
    model = tiny("qwen3", device)
    ids, mask = prompts(device)
    before = model.generation_config
    generator = InterleavedGenerator(model)
    try:
        model.generation_config = type(before)(max_length=14)
        tokens = generator.generate(ids, mask)
        assert tokens.tolist() == model.generate(ids, attention_mask=mask).tolist() and tokens.shape[1] == 14
        assert generator.generate(ids, mask, 7).shape[1] == 9 + 7
        model.generation_config = type(before)(max_length=9)
        with pytest.raises(PromptTooLongError, match="9 tokens, but the model's generation_config has max_length=9"):
            generator.generate(ids, mask)
        model.generation_config = type(before)(max_length=9, max_new_tokens=3)
        assert generator.generate(ids, mask).shape[1] == 9 + 3
    finally:
        model.generation_config = before


def test_padding_is_found_where_no_mask_says_it(tiny: Make, device: str) -> None:
    """As transformers does: where the pad token is, unless it is a stop token too."""
    model = tiny("gpt2", device)
    ids, mask = prompts(device)
    ids = ids.masked_fill(mask == 0, 1)
    generator = InterleavedGenerator(model)
    for stop in (100, 1):
        options = {"eos_token_id": stop, "pad_token_id": 1}
        right = model.generate(ids, max_new_tokens=10, do_sample=False, **options)
        assert generator.generate(ids, max_new_tokens=10, **options).tolist() == right.tolist()


def test_a_head_with_more_rows_than_the_embedding_chooses_no_token_beyond_it(device: str) -> None:
    """Padding of a head that wins: such a token cannot be computed with. It ended in an IndexError, on a GPU in an
    assertion of the device that ends its use."""
    narrow, wide = make_tiny("llama", device), widen_head(make_tiny("llama", device), 7)
    ids, mask = prompts(device)
    for options in ({}, {"num_beams": 2}):
        tokens = InterleavedGenerator(wide).generate(ids, mask, 12, **options)  # type: ignore[arg-type]
        assert tokens.tolist() == expected(narrow, ids, mask, 12, **options).tolist()


def test_a_model_too_short_to_be_compared_is_taken() -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=5, n_positions=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    assert InterleavedGenerator(model).generate(torch.tensor([[1, 2]]), max_new_tokens=2).shape[1] <= 4


def test_one_token_and_one_row_and_the_last_position(tiny: Make, device: str) -> None:
    generator = InterleavedGenerator(tiny("gpt2", device))  # of 256 positions
    for length, count in ((9, 1), (1, 9), (250, 6)):
        ids = torch.randint(3, 101, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
        check_equal([generator], ids, torch.ones_like(ids), count)


def test_what_is_kept_from_one_prompt_serves_another(tiny: Make, device: str) -> None:
    """A captured step keeps its tensors for the next prompt: nothing of the trial steps or of the last prompt, longer
    and padded elsewhere, may be left in them. Run here without the graph, so that the CPU sees it too."""
    model = tiny("gemma2", device)
    choice = resolve(model.generation_config, 101)
    search = Tokens(choice, 3, 40, torch.device(device))
    decoding = Decoding(model, model, search, 40, "static")
    with torch.no_grad():
        for trial, length in enumerate((20, 9, 14)):
            ids, mask = prompts(device, length=length)
            decoding.load(Batch(ids, mask, True, 10))
            if not trial:  # what ``capture`` does before it captures
                decoding.prefill()
                for _ in range(2):
                    decoding._rewind()
                    decoding._step()
                decoding._rewind()
                decoding.load(Batch(ids, mask, True, 10))
            decoding.prefill()
            for _ in range(9):
                decoding.step()
            assert search.result(10).tolist() == expected(model, ids, mask, 10)[:, length:].tolist()
