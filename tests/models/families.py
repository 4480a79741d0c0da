"""Tiny random models of many families, the same weights on every device. Other tests take them from here.

``FAMILIES`` are served; ``REFUSED`` cannot be served right, each with words that the error has to contain. Both map a
name to a factory of a transformers config. All have 2 to 4 layers, heads of 16 to 32, no stop token, and where there
is a sliding window it is ``WINDOW``, so that short tests run past it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 101
WINDOW = 8  # positions

# Most config classes take Llama's names. `...` drops one that a class does not know.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WIDE: dict[str, Any] = {"hidden_size": 48, "head_dim": 16}  # heads that are wider together than the hidden state
_LOCAL: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    **_MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {  # multi-head latent attention: keys of 24, values of 16
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FEW: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "partial_rotary_factor": 1.0,
}

_SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", {**_COMMON, **_MOE, **_LOCAL, "head_dim": 16, "num_experts": 4, "num_dense_layers": 1}),
    "apertus": ("ApertusConfig", {**_COMMON, **_WIDE}),
    "arcee": ("ArceeConfig", {**_COMMON, **_WIDE}),
    "bert_decoder": ("BertConfig", {**_COMMON, "num_key_value_heads": ..., "is_decoder": True, "pad_token_id": 0}),
    "biogpt": ("BioGptConfig", {**_COMMON, "num_key_value_heads": ..., "pad_token_id": 1}),
    "bitnet": ("BitNetConfig", _COMMON),
    "cohere": ("CohereConfig", _COMMON),
    "cohere2": ("Cohere2Config", {**_COMMON, **_LOCAL}),
    "deepseek_v2": ("DeepseekV2Config", {**_COMMON, **_LATENT, **_ROUTED}),
    "deepseek_v3": ("DeepseekV3Config", {**_COMMON, **_LATENT, **_ROUTED}),
    "dots1": ("Dots1Config", {**_COMMON, **_WIDE, **_ROUTED}),
    "ernie4_5": ("Ernie4_5Config", {**_COMMON, **_WIDE}),
    "exaone4": ("Exaone4Config", {**_COMMON, **_LOCAL}),
    "gemma": ("GemmaConfig", {**_COMMON, **_WIDE}),
    "gemma2": (
        "Gemma2Config",
        {
            **_COMMON,
            **_WIDE,
            **_LOCAL,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", {**_COMMON, **_WIDE, **_LOCAL, "query_pre_attn_scalar": 16}),
    "gemma4_text": (  # local and global heads of different sizes; the last two layers reuse K and V of the first two
        "Gemma4TextConfig",
        {
            **_COMMON,
            **_LOCAL,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "glm": ("GlmConfig", {**_COMMON, **_WIDE}),
    "glm4": ("Glm4Config", {**_COMMON, **_WIDE}),
    "glm4_moe": ("Glm4MoeConfig", {**_COMMON, **_WIDE, **_ROUTED}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", {**_GPT2, "multi_query": True}),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "num_key_value_heads": ...}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_COMMON,
            **_WIDE,
            **_LOCAL,
            **_FEW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": ("GraniteConfig", {**_COMMON, "attention_multiplier": 0.3}),
    "granitemoe": ("GraniteMoeConfig", {**_COMMON, **_FEW}),
    "helium": ("HeliumConfig", {**_COMMON, "head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**_COMMON, **_WIDE}),
    "llama": ("LlamaConfig", {**_COMMON, **_WIDE}),
    "llama4_text": (
        "Llama4TextConfig",
        {**_COMMON, "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "llama_dynamic": ("LlamaConfig", {**_COMMON, "rope_parameters": _DYNAMIC}),
    "llama_tied_yarn": ("LlamaConfig", {**_COMMON, **_WIDE, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**_COMMON, **_LOCAL, **_MOE, "head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4},
    ),
    "minicpm3": ("MiniCPM3Config", {**_COMMON, **_LATENT}),
    "minimax_m2": ("MiniMaxM2Config", {**_COMMON, **_WIDE, **_FEW}),
    "ministral": ("MinistralConfig", {**_COMMON, **_WIDE, **_LOCAL}),
    "mistral": ("MistralConfig", {**_COMMON, **_WIDE, "sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {**_COMMON, **_WIDE, **_FEW, "sliding_window": WINDOW}),
    "nanochat": ("NanoChatConfig", _COMMON),
    "nemotron": ("NemotronConfig", {**_COMMON, **_WIDE}),
    "olmo": ("OlmoConfig", _COMMON),
    "olmo2": ("Olmo2Config", _COMMON),
    "olmo3": ("Olmo3Config", {**_COMMON, **_LOCAL}),
    "olmoe": ("OlmoeConfig", {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        "OPTConfig",
        {
            **_COMMON,
            "num_key_value_heads": ...,
            "intermediate_size": ...,
            "ffn_dim": 80,
            "word_embed_proj_dim": 64,
            "pad_token_id": 1,
        },
    ),
    "persimmon": ("PersimmonConfig", {**_COMMON, "num_key_value_heads": ...}),
    "phi": ("PhiConfig", _COMMON),
    "phi3": ("Phi3Config", {**_COMMON, "original_max_position_embeddings": 256, "sliding_window": WINDOW}),
    "phi3_longrope": (
        "Phi3Config",
        {**_COMMON, "original_max_position_embeddings": 64, "rope_parameters": _LONGROPE, "sliding_window": None},
    ),
    "phimoe": ("PhimoeConfig", {**_COMMON, **_FEW, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen2_window": (
        "Qwen2Config",
        {**_COMMON, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_COMMON, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Config", {**_COMMON, **_WIDE}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_COMMON, **_WIDE, **_MOE, "num_experts": 4}),
    "seed_oss": ("SeedOssConfig", {**_COMMON, **_WIDE}),
    "smollm3": ("SmolLM3Config", {**_COMMON, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLmConfig", _COMMON),
    "starcoder2": ("Starcoder2Config", {**_COMMON, "sliding_window": WINDOW}),
    "vaultgemma": ("VaultGemmaConfig", {**_COMMON, **_WIDE, **_LOCAL, "query_pre_attn_scalar": 16}),
}

_NOT_SERVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert_both_ways": ("BertConfig", {**_COMMON, "num_key_value_heads": ..., "pad_token_id": 0}, "not causal"),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "takes no position_ids",
    ),
    "doge": ("DogeConfig", _COMMON, "masks of its own"),
    "falcon": ("FalconConfig", {**_COMMON, "num_key_value_heads": ...}, "ignores registered attention"),
    "falcon_alibi": ("FalconConfig", {**_COMMON, "num_key_value_heads": ..., "alibi": True}, "ignores registered"),
    "falcon_h1": (
        "FalconH1Config",
        {**_COMMON, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "hybrid",
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
        "0 calls of the registered attention",
    ),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}, "0 calls of the registered attention"),
    "lfm2": (
        "Lfm2Config",
        {**_COMMON, "layer_types": ["conv", "full_attention", "conv"]},
        "1 calls of the registered attention, but the config has 3 layers",
    ),
    "llama4_chunked": (
        "Llama4TextConfig",
        {
            **_COMMON,
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
        },
        "chunks of 8",
    ),
    "phimoe_window": ("PhimoeConfig", {**_COMMON, **_FEW, "sliding_window": WINDOW}, "sliding window of 8"),
}

Factory = Callable[[], Any]


def _config(kind: str, options: dict[str, Any]) -> Any:
    return getattr(transformers, kind)(**{name: value for name, value in options.items() if value is not ...})


# An older transformers does not know the newest families.
FAMILIES: dict[str, Factory] = {
    name: partial(_config, kind, options) for name, (kind, options) in _SERVED.items() if hasattr(transformers, kind)
}
REFUSED: dict[str, tuple[Factory, str]] = {
    name: (partial(_config, kind, options), words)
    for name, (kind, options, words) in _NOT_SERVED.items()
    if hasattr(transformers, kind)
}


def make_tiny(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model of a family, in eval mode, with eager attention.

    The weights are the same on every device and in every dtype, up to rounding. The global random state is left alone.
    """
    factory = FAMILIES[name] if name in FAMILIES else REFUSED[name][0]
    with torch.random.fork_rng([]), torch.device(device), warnings.catch_warnings():
        # The modules of some families (gpt_bigcode) use torch.jit.script when they are imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = AutoModelForCausalLM.from_config(factory(), dtype=dtype, attn_implementation="eager")
    _randomise(model)
    return model.eval()


@torch.no_grad()
def widen_head(model: nn.Module, num_more: int) -> nn.Module:
    """Give the head rows for tokens that the embedding does not have, as padding does. They win most of the time."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    rows = head.weight[:num_more] * 3.0
    head.weight = nn.Parameter(torch.cat([head.weight, rows, -rows]))
    head.out_features = len(head.weight)
    return model


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Weights large enough that the tokens depend on everything, with biases and norms that are not their defaults.

    A matrix gets a gain of 1.5: much less, and attention averages all positions; much more, and it sees one alone.
    """
    dice = torch.Generator().manual_seed(2)
    state = model.state_dict(keep_vars=True)
    done: set[int] = set()
    for name in sorted(state):
        tensor = state[name]
        if id(tensor) in done or not tensor.is_floating_point():
            continue
        done.add(id(tensor))
        noise = torch.randn(tensor.shape, generator=dice)
        if tensor.dim() < 2:
            tensor.add_((0.1 * noise).to(tensor))
        elif "embed" in name or "wte" in name or "wpe" in name:
            tensor.copy_((0.8 * noise).to(tensor))
        else:
            tensor.copy_((1.5 * min(tensor.shape[-2:]) ** -0.5 * noise).to(tensor))
