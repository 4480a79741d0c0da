"""Every family that is served gives, packed and paged, the tokens that transformers generates for each prompt alone."""

import pytest
import torch

from cbatch.errors import UnsupportedModelError
from cbatch.models.transformers_model import TransformersModel
from tests.models.families import FAMILIES, REFUSED, WINDOW, make_tiny
from tests.models.paged import generate_together

PROMPTS = [[5, 17, 42, 9, 77, 23, 61, 3, 88, 14, 30, 52, 71], [90, 11, 64, 7, 33]]
NUM_TOKENS = 12


def generate_alone(module, prompt, num_tokens=NUM_TOKENS):
    ids = torch.tensor([prompt])
    out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def test_at_least_22_families_are_served_by_this_version_of_transformers():
    assert len(FAMILIES) >= 22


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_paged_tokens_equal_those_of_each_prompt_alone(name):
    """13 and 5 prompt tokens in chunks of 5, the second prompt joining at the second step, 12 tokens each.

    So a step has decodes and chunks, and contexts reach 24 where the window, if there is one, is 8."""
    module = make_tiny(name)
    expected = [generate_alone(module, prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 3, "a model that repeats itself proves little"
    assert generate_together(TransformersModel(module), PROMPTS, NUM_TOKENS) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_give_wrong_tokens_is_refused_and_the_error_says_why(name):
    words = REFUSED[name][1]
    with pytest.raises(UnsupportedModelError, match=words):
        TransformersModel(make_tiny(name))


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("llama", [(2, 16, 16, 0)] * 3),
        ("deepseek_v3", [(4, 24, 16, 0)] * 3),
        ("gpt_bigcode", [(1, 16, 16, 0)] * 3),
        ("gemma2", [(2, 16, 16, WINDOW), (2, 16, 16, 0), (2, 16, 16, WINDOW)]),
        ("gemma4_text", [(2, 16, 16, WINDOW), (2, 32, 32, 0)] * 2),
    ],
)
def test_shapes_of_keys_and_values_come_from_the_calls_and_not_from_the_config(name, specs):
    found = TransformersModel(make_tiny(name)).kv_specs
    assert [(s.num_kv_heads, s.k_head_dim, s.v_head_dim, s.window) for s in found] == specs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_oss", "llama", "mixtral"])
def test_the_probe_takes_rounding_in_16_bits_for_what_it_is(name, dtype):
    model = TransformersModel(make_tiny(name, dtype=dtype))
    assert model.dtype == dtype


def test_longrope_ends_at_its_original_length():
    """Past it, transformers takes other frequencies for the whole batch as soon as one sequence is longer."""
    module = make_tiny("phi3_longrope")
    assert module.config.max_position_embeddings == 256
    assert TransformersModel(module).max_model_len == 64
