"""What a config says, and when it says more than the layers handed over."""

from types import SimpleNamespace

import pytest

from cbatch.models import config_facts


def config(**facts):
    made = SimpleNamespace(**facts)
    made.get_text_config = lambda decoder: facts.get("text_config", made)
    return made


@pytest.mark.parametrize(
    ("facts", "limit"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": None, "n_ctx": 32}, 32),
        ({}, config_facts.UNLIMITED),
        ({"text_config": SimpleNamespace(max_position_embeddings=16)}, 16),
        ({"max_position_embeddings": 128, "rope_parameters": {"rope_type": "yarn"}}, 128),
        *(  # as its model card tells the user of Qwen3 to do it, then as DeepSeek and gpt-oss have it
            (
                {
                    "max_position_embeddings": said,
                    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
                },
                limit,
            )
            for said, limit in ((40, 128), (128, 128), (160, 160))
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4},
            },
            4,
        ),
        (
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 8,
                "rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}},
            },
            8,
        ),
    ],
)
def test_the_positions_a_model_takes(facts, limit):
    assert config_facts.max_positions(config(**facts)) == limit


@pytest.mark.parametrize(
    ("facts", "windows", "softcaps", "words"),
    [
        ({}, [0, 0], [0, 0], None),
        ({"sliding_window": 8}, [8, 8], [0, 0], None),
        ({"sliding_window": 8}, [0, 0], [0, 0], "sliding window of 8"),
        ({"sliding_window": 8, "use_sliding_window": False}, [0, 0], [0, 0], None),
        ({"sliding_window": 1000}, [0, 0], [0, 0], None),  # longer than any sequence
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [0, 8], [0, 0], None),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [0, 0], [0, 0], "layer 1"),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [8, 8], [0, 0], "layer 0"),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 2}, [0, 0], [0, 0], "chunks of 8"),
        ({"attention_chunk_size": 100, "layer_types": ["chunked_attention"] * 2}, [0, 0], [0, 0], None),
        ({"layer_types": ["full_attention", "deepseek_sparse_attention"]}, [0, 0], [0, 0], "deepseek_sparse"),
        ({"attn_logit_softcapping": 50.0}, [0, 0], [50.0, 50.0], None),
        ({"attn_logit_softcapping": 50.0}, [0, 0], [50.0, 0], "softcapping is 50"),
    ],
)
def test_attention_that_layers_do_not_hand_over_is_named(facts, windows, softcaps, words):
    reason = config_facts.unserved_attention(config(**facts), windows, softcaps, max_model_len=100)
    assert (reason is None) if words is None else (reason is not None and words in reason)
