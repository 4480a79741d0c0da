"""From a name to a model or a tokenizer. Knows aliases, folders and the hub; knows nothing of steps or requests.

Weights come from safetensors alone, never from pickles, and code from a hub repository runs only when asked for.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import initialization as init

from cbatch.config import find_device, parse_dtype
from cbatch.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from cbatch.models.base import Model
from cbatch.models.decoder import Decoder, DecoderMismatch
from cbatch.models.demo import ensure_demo_model
from cbatch.models.transformers_model import TransformersModel

_log = logging.getLogger(__name__)
DEMO = "smollm2-135m"
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def shape_names() -> tuple[str, ...]:
    """The names of configs that ship with cbatch: shapes to measure with random weights (``load_format="dummy"``)."""
    return tuple(sorted(path.stem for path in _CONFIGS.glob("*.json")))


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: Literal["auto", "dummy"] = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
    model_impl: Literal["auto", "transformers", "decoder"] = "transformers",
) -> Model:
    """Load a causal LM on ``device``: an alias, a local folder, or a repository of the hub.

    ``dtype="auto"`` is the checkpoint's own, but float32 on the CPU, where 16-bit arithmetic is slow.
    ``load_format="dummy"`` reads only the config (of a folder, a file, a hub name or one of ``shape_names()``) and
    makes random weights of ``seed`` on the device; the caller's random state is left alone.
    ``model_impl="decoder"`` is our own decoder, ``"auto"`` too where it covers the model.
    Raises ModelNotFoundError, UnsupportedModelError or ConfigError.
    """
    device = find_device(device)
    name = str(name_or_path)

    def through_transformers() -> TransformersModel:
        if load_format == "dummy":
            module = _random_module(_find_config(name), _resolve_dtype(dtype, device), device, trust_remote_code, seed)
        elif load_format == "auto":
            module = _pretrained_module(_find_weights(name), _resolve_dtype(dtype, device), device, trust_remote_code)
        else:
            raise ConfigError(f"load_format={load_format!r} is not one of 'auto', 'dummy'")
        model = TransformersModel(module)
        model.name = name
        return model

    model = through_transformers()
    if model_impl == "transformers":
        return model
    try:
        return Decoder.from_transformers(model, take_weights=True)
    except UnsupportedModelError as error:
        if model_impl == "decoder":
            raise
        mismatch = isinstance(error, DecoderMismatch)
        _log.log(logging.WARNING if mismatch else logging.INFO, "%s runs through transformers: %s", name, error)
    return through_transformers() if mismatch else model  # the decoder that does not match has taken the weights


def load_tokenizer(name_or_path: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that belongs to a model; None for a name of ``shape_names()``, which has none.

    Its end-of-sequence token may be wrong: take that from the model. Raises ModelNotFoundError.
    """
    name = str(name_or_path)
    if name in shape_names():
        return None
    path = _find_weights(name)
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=_only_local(path)
        )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"no tokenizer for {name!r}: tried {_tried(path)}. {error}") from error


def _find_weights(name: str) -> str:
    """The folder or hub name to hand to transformers."""
    if not name.strip():
        raise ModelNotFoundError(f"the name is empty: give an alias ({DEMO!r}), a folder or a hub name")
    if name == DEMO:
        return str(ensure_demo_model())
    path = os.path.expanduser(name)  # os.path, not Path: it says no to a name that cannot be one, and raises nothing
    if os.path.isdir(path):
        return path
    if name in shape_names() and not os.path.exists(path):
        raise ModelNotFoundError(f"{name!r} is a shape without weights: use it with load_format='dummy'")
    if os.path.exists(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"no model folder at {name!r} (aliases: {DEMO!r}; else a folder or a hub name)")
    return name


def _find_config(name: str) -> str:
    """The file, folder or hub name whose config describes the model."""
    if name == DEMO:
        name = "smollm2-shape"
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return path
    if name in shape_names() and not os.path.exists(path):
        return str(_CONFIGS / f"{name}.json")
    return _find_weights(name)


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | None:
    """None stands for the checkpoint's own."""
    parsed = parse_dtype(dtype)
    return torch.float32 if parsed is None and device.type == "cpu" else parsed


def _only_local(path: str) -> bool:
    """Whether transformers should look on the disk alone: a folder, or a hub name while the hub cannot be reached.

    Asked without a second try. transformers would ask for every file by itself, six times each, for 23 s a file,
    before it looks into its cache.
    """
    if os.path.exists(path):
        return True
    try:
        HfApi().model_info(path, timeout=5)
    except (httpx.TransportError, OfflineModeIsEnabled):
        return True
    except (HfHubHTTPError, HFValidationError):  # an answer: what it means, transformers says better
        pass
    return False


def _config(path: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=_only_local(path))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"no config for {path!r}: tried {_tried(path)}. {error}") from error


def _pretrained_module(path: str, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool) -> Any:
    options: dict[str, Any] = {"dtype": dtype or "auto", "use_safetensors": True}
    straight = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    if straight:  # tensor by tensor; without accelerate the whole model passes through host memory first
        options["device_map"] = {"": device}
    config = _config(path, trust_remote_code)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            trust_remote_code=trust_remote_code,
            local_files_only=_only_local(path),
            **options,
        )
    except OSError as error:
        raise ModelNotFoundError(f"no weights for {path!r} in safetensors: tried {_tried(path)}. {error}") from error
    except ValueError as error:
        raise _not_causal(path, error) from error
    return module if straight else module.to(device)


def _random_module(
    path: str, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool, seed: int
) -> nn.Module:
    """Random weights by the family's own rules, made where they will live: 8B parameters in seconds on a GPU.

    Built on the device itself rather than on ``meta``, so that computed buffers (RoPE frequencies) are right. The
    first round of initialisation, torch's own, is skipped: the family's overwrites it.
    """
    config = _config(path, trust_remote_code)
    dtype = dtype or config.dtype or torch.bfloat16
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.device(device):
            with init.no_init_weights():
                module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            torch.manual_seed(seed)
            with torch.no_grad():
                module.init_weights()
    except ValueError as error:
        raise _not_causal(path, error) from error
    return module.eval()


def _not_causal(path: str, error: ValueError) -> UnsupportedModelError:
    reason = str(error).partition("\n")[0]  # the lines after it list all the classes that transformers has
    return UnsupportedModelError(f"transformers makes no causal language model of {path!r}: {reason}")


def _tried(path: str) -> str:
    return f"the folder {path!r}" if os.path.exists(path) else f"the folder {path!r} and the hub repository {path!r}"
