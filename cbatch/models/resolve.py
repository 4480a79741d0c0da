"""Turns a user's model argument (a name, a module, or a ``Model``) into a ``Model``. Knows no engine.

Imports transformers only if it is needed.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from cbatch.config import EngineConfig, find_device, parse_dtype
from cbatch.errors import ConfigError
from cbatch.models.base import Model
from cbatch.tokenizer import check_tokenizer


def resolve_model(model: Any, tokenizer: Any, config: EngineConfig) -> tuple[Model, Any]:
    """The model, loaded if given by name, and its tokenizer or None.

    Raises ConfigError, ModelNotFoundError or UnsupportedModelError.
    """
    check_tokenizer(tokenizer)
    if tokenizer is not None and config.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init is True, but a tokenizer is given")
    named = isinstance(model, (str, PathLike))
    if config.load_format != "auto" and not named:
        raise ConfigError(f"load_format is {config.load_format!r}, but the model is in memory already")
    if isinstance(tokenizer, (str, PathLike)):
        from cbatch.models.loader import load_tokenizer

        tokenizer = load_tokenizer(tokenizer, trust_remote_code=config.trust_remote_code)
    if named:
        return _by_name(model, tokenizer, config)
    if isinstance(model, torch.nn.Module):
        return _of_module(model, config), tokenizer
    if isinstance(model, type) or not hasattr(model, "kv_specs"):
        raise ConfigError(f"model is {model!r}, but must be a name, a folder, an nn.Module or a cbatch Model")
    _refuse_other(config, model)
    return model, tokenizer


def _by_name(name: str | PathLike[str], tokenizer: Any, config: EngineConfig) -> tuple[Model, Any]:
    from cbatch.models.loader import load_model, load_tokenizer

    model = load_model(
        name,
        dtype=config.dtype,
        device=find_device(config.device),
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        seed=config.seed,
        model_impl=config.model_impl,
    )
    if tokenizer is None and config.load_format != "dummy" and not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    return model, tokenizer


def _of_module(module: torch.nn.Module, config: EngineConfig) -> Model:
    from cbatch.models.transformers_model import TransformersModel

    model = TransformersModel(module, device=config.device, dtype=parse_dtype(config.dtype))
    if config.model_impl != "decoder":  # only on request: its copies do not follow the caller's training
        return model
    from cbatch.models.decoder import Decoder

    return Decoder.from_transformers(model, take_weights=False)


def _refuse_other(config: EngineConfig, model: Model) -> None:
    """Refuse options that contradict a finished ``Model``."""
    if config.device is not None and torch.device(config.device).type != model.device.type:
        raise ConfigError(f"device is {config.device!r}, but the model is on {model.device}")
    if config.model_impl != "auto":
        raise ConfigError(f"model_impl is {config.model_impl!r}, but the model is a cbatch Model already")
    dtype = parse_dtype(config.dtype)
    if dtype not in (None, model.dtype):
        raise ConfigError(f"dtype is {config.dtype!r}, but the model computes in {model.dtype}")
