"""Reads positions, layers and stop tokens from a transformers config, under its many names. Knows no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cbatch.errors import UnsupportedModelError

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)
UNLIMITED = 1 << 20  # positions, if a config names no limit


@dataclass(frozen=True)
class ModelFacts:
    """The fields of ``Model`` that do not follow from the weights."""

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    generation_config: Any


def model_facts(config: Any, generation_config: Any, name: str) -> ModelFacts:
    return ModelFacts(name, max_positions(config), eos_token_ids(generation_config, config), generation_config)


def text_config(config: Any) -> Any:
    """The part of a config that describes the decoder: the config itself, except in composite models."""
    return config.get_text_config(decoder=True)


def num_layers(config: Any) -> int | None:
    value = getattr(text_config(config), "num_hidden_layers", None)
    return value if isinstance(value, int) else None


def max_positions(config: Any) -> int:
    """The largest context whose RoPE frequencies do not depend on other requests in the batch.

    LongRoPE changes its frequencies once the largest position of the batch passes the original length, so one long
    request would change the tokens of all others: the original length is the limit. Dynamic NTK does so beyond
    ``max_position_embeddings``, which is the limit anyway. YaRN's frequencies are fixed, and serve ``factor`` times the
    original length; ``max_position_embeddings`` often still has the original length.
    """
    text = text_config(config)
    limits = [value for name in _LENGTH_NAMES if isinstance(value := getattr(text, name, None), int) and value > 0]
    limit = limits[0] if limits else UNLIMITED
    for rope in _rope_parameters(text):
        kind, original = rope.get("rope_type", rope.get("type")), rope.get("original_max_position_embeddings")
        if kind == "longrope":
            original = original or getattr(text, "original_max_position_embeddings", None)
            limit = min(limit, original or limit)
        elif kind == "yarn" and original:
            limit = max(limit, int(original * (rope.get("factor") or 1)))
    return limit


def _rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    """The RoPE settings: one dict, or one per layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]


def eos_token_ids(generation_config: Any, config: Any) -> tuple[int, ...]:
    """The stop tokens of the generation config, else of the config. A tokenizer's may be wrong.

    Raises UnsupportedModelError if they are not integers."""
    for source in (generation_config, config, text_config(config)):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids = value if isinstance(value, (list, tuple)) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise UnsupportedModelError(f"eos_token_id is {value!r}, but must be a token id or a list of them")
            return tuple(dict.fromkeys(int(i) for i in ids if i >= 0))
    return ()


def unserved_attention(config: Any, windows: list[int], softcaps: list[float], max_model_len: int) -> str | None:
    """How the config's attention differs from that of its layers' calls; None if it does not.

    ``windows`` and ``softcaps`` come from each layer's call in one forward. A family may express a window, a chunk or a
    sparse pattern in its attention mask alone; no mask is built for us, and a short probe would not show the loss.
    """
    text = text_config(config)
    chunk = getattr(text, "attention_chunk_size", None)
    window = getattr(text, "sliding_window", None)
    types = list(getattr(text, "layer_types", None) or ())
    explicit = len(types) == len(windows)
    if not explicit:
        windowed = bool(window) and getattr(text, "use_sliding_window", True) and not any(windows)
        types = ["sliding_attention" if windowed else "full_attention"] * len(windows)
    for layer, kind in enumerate(types):
        if kind == "chunked_attention" and chunk and chunk < max_model_len:
            return f"layer {layer} attends within chunks of {chunk} positions, which only an attention mask expresses"
        if kind == "sliding_attention" and not windows[layer] and (not window or window < max_model_len):
            return f"layer {layer} has a sliding window of {window}, which only its attention mask expresses"
        if kind == "full_attention" and windows[layer] and explicit:
            return f"layer {layer} hands over a window of {windows[layer]}, but the config says that it attends to all"
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            return f"layer {layer} is of type {kind!r}"
    if getattr(text, "attn_logit_softcapping", None) and not all(softcaps):
        return f"attn_logit_softcapping is {text.attn_logit_softcapping}, but not every layer hands it over"
    return None
