"""The differences between families of decoders: about thirty facts, as data. Knows names and shapes of weights, but no
weight.

A family is an entry of ``FAMILIES``; everything else comes from the config, under transformers' names. A config with
an unknown option is not covered, and its model runs through transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.configuration_utils import PreTrainedConfig

from cbatch.errors import UnsupportedModelError
from cbatch.scheduler.kv_spec import KVSpec


@dataclass(frozen=True, kw_only=True)
class Names:
    """A family's names of its weights; the defaults are Llama's. None: the family has no such weight.

    A tuple has the parts of one fused matrix, in order.
    """

    body: str = "model"
    layers: str = "layers"
    embed: str = "embed_tokens"
    positions: str | None = None  # learned position embeddings
    final_norm: str = "norm"
    attn_norm: str | None = "input_layernorm"
    attn_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    @property
    def embedding(self) -> str:
        return f"{self.body}.{self.embed}.weight"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The facts that ``Decoder.forward`` depends on."""

    names: Names
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_positions: int  # rows of the learned position embeddings, if any
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool  # the embedding is the head

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    transposed: bool = False  # the layers' matrices are stored [in, out]
    init_std: float = 0.02  # of random weights

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norm_offset: float = 0.0  # 1.0: weights are stored minus one (Gemma)
    qk_norm: Literal["none", "head", "row"] = "none"  # over each head, or over all heads of a token together

    attn_scale: float
    attn_softcap: float = 0.0
    windows: tuple[int, ...]  # of each layer, in positions; 0: all
    ropes: tuple[str | None, ...]  # of each layer, the name of its rotary table; None: no RoPE
    rope_interleaved: bool = False  # rotates neighbours (2i, 2i + 1) instead of the halves (i, i + dim / 2)
    rope_partial: bool = False  # rope_type "default" heeds partial_rotary_factor

    gated: bool = True
    act: str = "silu"

    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return tuple(KVSpec(self.num_kv_heads, self.head_dim, self.head_dim, window) for window in self.windows)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight in transformers, in the order of use."""
        names, hidden = self.names, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {names.embedding: (self.vocab_size, hidden)}
        if names.positions:
            shapes[f"{names.body}.{names.positions}.weight"] = (self.num_positions, hidden)
        for layer in range(self.num_layers):
            at = f"{names.body}.{names.layers}.{layer}"
            shapes |= {f"{at}.{name}": shape for name, shape in self._layer_shapes()}
        shapes |= dict(self._norm_shapes(f"{names.body}.{names.final_norm}"))
        shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        names, hidden = self.names, self.hidden_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,)
        up = (2 if self.gated else 1) * self.intermediate_size // len(names.up)
        for norm in (names.attn_norm, names.attn_post_norm, names.mlp_norm, names.mlp_post_norm):
            if norm:
                yield from self._norm_shapes(norm)
        if self.qk_norm != "none":
            for name, width in zip(names.qk_norm, (q, kv), strict=True):
                yield f"{name}.weight", (self.head_dim if self.qk_norm == "head" else width,)
        for name, width in zip(names.qkv, parts, strict=True):
            yield from self._matrix_shapes(name, width, hidden, self.qkv_bias)
        yield from self._matrix_shapes(names.o, hidden, q, self.o_bias)
        for name in names.up:
            yield from self._matrix_shapes(name, up, hidden, self.mlp_bias)
        yield from self._matrix_shapes(names.down, hidden, self.intermediate_size, self.mlp_bias)

    def _norm_shapes(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (self.hidden_size,)
        if self.norm_bias:
            yield f"{name}.bias", (self.hidden_size,)

    def _matrix_shapes(
        self, name: str, num_outputs: int, num_inputs: int, bias: bool
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (num_inputs, num_outputs) if self.transposed else (num_outputs, num_inputs)
        if bias:
            yield f"{name}.bias", (num_outputs,)


_POST: dict[str, Any] = {"attn_norm": None, "attn_post_norm": "post_attention_layernorm", "mlp_norm": None}
_SANDWICH: dict[str, Any] = {"attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
_AFTER_MLP: dict[str, Any] = {"mlp_post_norm": "post_feedforward_layernorm"}
_PLAIN_MLP: dict[str, Any] = {"up": ("mlp.c_fc",), "down": "mlp.c_proj"}
_FUSED_MLP: dict[str, Any] = {"up": ("mlp.gate_up_proj",)}

# Whether a family has biases: a bool, or the config's option that says so.
_BIASES: dict[str, bool | str] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_ALL_OR_NONE: dict[str, Any] = {"qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias"}

_GPT2: dict[str, Any] = {
    "names": Names(
        body="transformer",
        layers="h",
        embed="wte",
        positions="wpe",
        final_norm="ln_f",
        attn_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        o="attn.c_proj",
        **_PLAIN_MLP,
    ),
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "gated": False,
    "ropes": "nowhere",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {"names": Names(up=("mlp.up_proj",)), "gated": False},
    "ernie4_5": {**_ALL_OR_NONE, "rope_interleaved": True},
    "exaone4": {"names": Names(**_POST, **_AFTER_MLP), "qk_norm": "head", "ropes": "where windows slide"},
    "gemma": {"norm_offset": 1.0, "embed_scale": "root of the hidden size"},
    "gemma2": {"names": Names(**_SANDWICH, **_AFTER_MLP), "norm_offset": 1.0, "embed_scale": "root of the hidden size"},
    "gemma3_text": {
        "names": Names(**_SANDWICH, **_AFTER_MLP),
        "norm_offset": 1.0,
        "qk_norm": "head",
        "embed_scale": "root of the hidden size",
    },
    "glm": {"names": Names(**_FUSED_MLP), "rope_interleaved": True, "rope_partial": True, "o_bias": False},
    "glm4": {
        "names": Names(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm", **_FUSED_MLP),
        "rope_interleaved": True,
        "rope_partial": True,
        "o_bias": False,
    },
    "gpt2": {**_GPT2, "transposed": True},
    "gpt_bigcode": _GPT2,
    "granite": {},
    "helium": {"rope_interleaved": True, "o_bias": False},
    "llama": {},
    "ministral": {},
    "mistral": {},
    "nemotron": {
        "names": Names(up=("mlp.up_proj",)),
        "norm": "layer",
        "norm_bias": True,
        "norm_offset": 1.0,
        "rope_partial": True,
        "gated": False,
    },
    "olmo2": {"names": Names(**_POST, **_AFTER_MLP), "qk_norm": "row"},
    "olmo3": {"names": Names(**_POST, **_AFTER_MLP), "qk_norm": "row"},
    "phi3": {"names": Names(qkv=("self_attn.qkv_proj",), **_FUSED_MLP), "rope_partial": True},
    "qwen2": {"qkv_bias": True, "o_bias": False},
    "qwen3": {"qk_norm": "head"},
    "seed_oss": {"o_bias": "attention_out_bias"},
    "smollm3": {},
    "stablelm": {"norm": "layer", "norm_bias": True, "qkv_bias": "use_qkv_bias", "o_bias": False, "rope_partial": True},
    "starcoder2": {"names": Names(**_PLAIN_MLP), "norm": "layer", "norm_bias": True, **_ALL_OR_NONE, "gated": False},
    "vaultgemma": {
        "names": Names(mlp_norm="pre_feedforward_layernorm"),
        "norm_offset": 1.0,
        "embed_scale": "root of the hidden size",
    },
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# The options that a config may set: those read below, those that show in the rotary tables or in layer_types, and those
# that change no logit. Any other must have its class's default.
_READ = {
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim", "n_head", "n_layer"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("layer_types", "sliding_window", "use_sliding_window", "rope_parameters", "no_rope_layers"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "final_logit_softcapping"),
    *("vocab_size", "hidden_size", "intermediate_size", "n_embd", "n_inner", "n_positions", "tie_word_embeddings"),
    *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias", "initializer_range"),
}
_SHOWS_ELSEWHERE = {
    *("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"),
    *("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
}
_CHANGES_NO_LOGIT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
    *("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "ignore_keys_at_rope_validation"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
}


def decoder_config(config: Any, dtype: torch.dtype) -> DecoderConfig:
    """Derive the facts from a transformers config, for weights of a dtype.

    Raises:
        UnsupportedModelError: the family, or something in its config, is not covered; the message names it.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise UnsupportedModelError(f"the decoder does not cover the family {kind!r}: it knows {', '.join(FAMILIES)}")
    options = _known_options(config)
    facts = {**_BIASES, **FAMILIES[kind]}
    for name in _BIASES:
        facts[name] = bool(options.get(option, False)) if isinstance(option := facts[name], str) else option
    sizes = _sizes(config, options)
    num_layers, num_heads, head_dim = config.num_hidden_layers, config.num_attention_heads, sizes["head_dim"]
    act = next(options[name] for name in ("hidden_act", "hidden_activation", "activation_function") if name in options)
    if act not in _ACTIVATIONS:
        raise not_covered(config, f"the activation {act!r}")
    windows = _windows(config, num_layers, options)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"):
        if options.get(name) == 0.0:  # it would mean none to us; transformers divides by it
            raise not_covered(config, f"{name}={options[name]}")
    attn_softcap = options.get("attn_logit_softcapping") or 0.0
    if attn_softcap and kind == "gemma3_text":  # transformers has the option, but ignores it
        raise not_covered(config, f"attn_logit_softcapping={attn_softcap}")
    embed_scale = options.get("embedding_multiplier", 1.0)
    if facts.pop("embed_scale", None):
        embed_scale = torch.tensor(math.sqrt(config.hidden_size), dtype=dtype).item()  # Gemma's is rounded
    attn_scale = head_dim**-0.5
    if "query_pre_attn_scalar" in options:
        if (scalar := options["query_pre_attn_scalar"]) <= 0:
            raise not_covered(config, f"query_pre_attn_scalar={scalar}")
        attn_scale = scalar**-0.5
    return DecoderConfig(
        **{"names": Names(), **facts, "ropes": _ropes(config, num_layers, options, windows, facts.get("ropes"))},
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=sizes["intermediate_size"],
        num_positions=config.max_position_embeddings,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        init_std=options.get("initializer_range") or 0.02,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=head_dim,
        norm_eps=next(value for name, value in options.items() if name.endswith(("norm_eps", "norm_epsilon"))),
        attn_scale=float(options.get("attention_multiplier", attn_scale)),
        attn_softcap=attn_softcap,
        windows=windows,
        act=_ACTIVATIONS[act],
        embed_scale=float(embed_scale),
        residual_scale=float(options.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / options.get("logits_scaling", 1.0),
        logit_softcap=options.get("final_logit_softcapping") or 0.0,
    )


def not_covered(config: Any, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{config.model_type}: the decoder does not cover {what}")


def _known_options(config: Any) -> dict[str, Any]:
    """The values of the options that the config's class knows; transformers reads no others either."""
    base, default = vars(PreTrainedConfig()), vars(type(config)())
    options = {
        name: getattr(config, name) for name in default if name not in base and not name.startswith("base_model_")
    }
    for name, value in options.items():
        if name not in _READ | _SHOWS_ELSEWHERE | _CHANGES_NO_LOGIT and value != default[name]:
            raise not_covered(config, f"{name}={value!r}")
    if getattr(config, "quantization_config", None) is not None:
        raise not_covered(config, "quantised weights")
    if not getattr(config, "is_causal", True):  # no class declares it, but transformers' masks heed it
        raise not_covered(config, f"is_causal={config.is_causal!r}")
    return options


def _sizes(config: Any, options: dict[str, Any]) -> dict[str, int]:
    """Sizes by name; those that a config leaves open are derived from the others."""
    num_heads, hidden = config.num_attention_heads, config.hidden_size
    sizes: dict[str, int] = {
        name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")
    }
    for name, given, derived in (
        ("intermediate_size", options.get("intermediate_size", options.get("n_inner")), 4 * hidden),
        ("num_key_value_heads", options.get("num_key_value_heads"), num_heads),
        ("head_dim", getattr(config, "head_dim", None), hidden // max(num_heads, 1)),
    ):
        sizes[name] = derived if given is None else given
    for name, size in sizes.items():
        if size < 1:
            raise not_covered(config, f"{name}={size}")
    if num_heads % (num_kv_heads := sizes["num_key_value_heads"]):
        raise not_covered(config, f"num_key_value_heads={num_kv_heads} of {num_heads} heads")
    return sizes


def _windows(config: Any, num_layers: int, options: dict[str, Any]) -> tuple[int, ...]:
    window, used = options.get("sliding_window"), options.get("use_sliding_window", True)
    named = options.get("layer_types")
    types = named or ["sliding_attention"] * num_layers
    other = set(types) - {"sliding_attention", "full_attention"}
    if other:
        raise not_covered(config, f"layers of type {other.pop()!r}")
    # transformers' masks have the window even with use_sliding_window=False, and without a window they fail.
    if (named or window is not None) and "sliding_attention" in types and not (window and window > 0 and used):
        but = "" if used else " with use_sliding_window=False"
        raise not_covered(config, f"sliding layers of sliding_window={window!r}{but}")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in types)


def _ropes(
    config: Any, num_layers: int, options: dict[str, Any], windows: tuple[int, ...], where: str | None
) -> tuple[str | None, ...]:
    """Each layer's rotary table: that of its type if the config has one per type, else the only one, ""."""
    if where == "nowhere":
        return (None,) * num_layers
    if where == "where windows slide" and options["sliding_window"] is not None:
        return tuple("" if window else None for window in windows)
    if (turned := options.get("no_rope_layers")) is not None:
        if len(turned) < num_layers:
            raise not_covered(config, f"no_rope_layers={turned} of {num_layers} layers")
        return tuple("" if turns else None for turns in turned[:num_layers])
    types = options.get("layer_types") or ()
    return ("",) * num_layers if config.rope_parameters.keys().isdisjoint(types) else tuple(types)
