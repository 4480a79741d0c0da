"""Loads models and tokenizers by name. Knows aliases, folders and the hub; knows nothing of steps or requests.

Weights come from safetensors only, never from pickles; a hub repository's code runs only with ``trust_remote_code``.
For a model that the decoder covers, weights go straight from the files into the decoder, and the modelling stack of
transformers is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from safetensors import SafetensorError
from torch import nn

from cbatch.config import find_device, parse_dtype
from cbatch.errors import CBatchError, ConfigError, ModelNotFoundError, UnsupportedModelError, described
from cbatch.models.base import Model
from cbatch.models.checkpoint import COMPUTED, Checkpoint, find_files, refuse_scaled
from cbatch.models.config_facts import model_facts
from cbatch.models.decoder import Decoder, DecoderMismatch
from cbatch.models.decoder_config import FAMILIES, Names, decoder_config
from cbatch.models.demo import NAME as DEMO
from cbatch.models.demo import ensure_demo_model
from cbatch.models.light_imports import light_imports
from cbatch.models.weight_sources import RandomSource

if TYPE_CHECKING:
    from cbatch.models.transformers_model import TransformersModel

_log = logging.getLogger(__name__)
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def shape_names() -> tuple[str, ...]:
    """The configs that ship with cbatch, to run with random weights (``load_format="dummy"``)."""
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
    draws weights from ``seed`` on the device, without touching the caller's random state.
    ``model_impl="decoder"`` is our own decoder, and so is ``"auto"`` if it covers the model. Its weights come straight
    from the files, if those match the config exactly; else from transformers' model, with which it is then compared.
    Raises ModelNotFoundError, UnsupportedModelError or ConfigError.
    """
    device = find_device(device)
    name = str(name_or_path)
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format={load_format!r} is not one of 'auto', 'dummy'")
    if model_impl != "transformers":
        try:
            return _straight(name, parse_dtype(dtype), device, load_format == "dummy", trust_remote_code, seed)
        except UnsupportedModelError as error:
            _log.info("%s is not loaded straight into the decoder: %s", name, error)

    def through_transformers() -> TransformersModel:
        from cbatch.models.transformers_model import TransformersModel

        if load_format == "dummy":
            module = _random_module(_find_config(name), _resolve_dtype(dtype, device), device, trust_remote_code, seed)
        else:
            module = _pretrained_module(_find_weights(name), _resolve_dtype(dtype, device), device, trust_remote_code)
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
    return through_transformers() if mismatch else model  # a mismatch has consumed the model's weights


def load_tokenizer(name_or_path: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """Load a model's tokenizer; None for a name in ``shape_names()``.

    Its end-of-sequence token may be wrong: use the model's. Raises ModelNotFoundError.
    """
    name = str(name_or_path)
    if name in shape_names():
        return None
    import transformers

    path = _find_weights(name)
    local_only = _only_local(path)
    try:
        named = _named_tokenizer(path, local_only)
        tokenizers = getattr(transformers, named) if named else transformers.AutoTokenizer
        tokenizer = tokenizers.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=local_only)
    except Exception as error:  # of any type: for a broken file, tokenizers raises a bare Exception
        raise ModelNotFoundError(
            f"no tokenizer for {name!r} (skip_tokenizer_init=True needs none): tried {_tried(path)}. {_words(error)}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # several classes load without any file
        raise ModelNotFoundError(
            f"no tokenizer for {name!r} (skip_tokenizer_init=True needs none): tried {_tried(path)}, where no "
            "vocabulary is"
        )
    return tokenizer


def _find_weights(name: str) -> str:
    """The folder or hub name for transformers."""
    if not name.strip():
        raise ModelNotFoundError(f"the name is empty: give an alias ({DEMO!r}), a folder or a hub name")
    if name == DEMO:
        return str(ensure_demo_model())
    path = os.path.expanduser(name)  # os.path returns False for an impossible name, where Path raises
    if os.path.isdir(path):
        return path
    if name in shape_names() and not os.path.exists(path):
        raise ModelNotFoundError(
            f"{name!r} is a shape without weights: use it with load_format='dummy' (cbatch bench: --load-format dummy)"
        )
    if os.path.exists(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "a file, not a model folder," if os.path.isfile(path) else "no model folder"
        raise ModelNotFoundError(f"{found} at {name!r} (aliases: {DEMO!r}; else a folder or a hub name)")
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
    """None: the checkpoint's own."""
    parsed = parse_dtype(dtype)
    return torch.float32 if parsed is None and device.type == "cpu" else parsed


def _only_local(path: str) -> bool:
    """Whether to look on the disk only: for a folder, or while the hub cannot be reached.

    One request of up to 5 s decides. transformers would try six times for each file, 23 s, before it reads its cache.
    """
    if os.path.exists(path):
        return True
    try:
        HfApi().model_info(path, timeout=5)
    except (httpx.TransportError, OfflineModeIsEnabled):
        return True
    except (HfHubHTTPError, HFValidationError):  # the hub answers; transformers has the better error
        pass
    return False


def _config(path: str, trust_remote_code: bool, local_only: bool) -> Any:
    from transformers import AutoConfig

    try:
        with light_imports():
            return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=local_only)
    except Exception as error:  # of any type: a config class may fail on any value
        _refuse_adapter(path, local_only=True)
        raise ModelNotFoundError(f"no config for {path!r}: tried {_tried(path)}. {_words(error)}") from error


def _refuse_adapter(path: str, local_only: bool) -> None:
    """transformers would ignore an adapter or load it, depending on the packages installed."""
    try:
        found = find_files(path, ["adapter_config.json"], local_only)
    except OSError:  # of the hub; transformers has the better error
        return
    if found:
        raise UnsupportedModelError(
            f"{path!r} is an adapter, or has one beside its model (adapter_config.json), and adapters are not "
            "supported: merge it into the model first (merge_and_unload() of PEFT)"
        )


def _straight(
    name: str, dtype: torch.dtype | None, device: torch.device, dummy: bool, trust_remote_code: bool, seed: int
) -> Decoder:
    """A decoder loaded without a module of transformers, so without a comparison of logits.

    Instead, every option of the config must be known, and names, shapes and dtypes of the weights must be exactly those
    of the config. Raises UnsupportedModelError otherwise.
    """
    path = _find_config(name) if dummy else _find_weights(name)
    local_only = _only_local(path)
    config = _config(path, trust_remote_code, local_only)
    if trust_remote_code and getattr(config, "auto_map", None):
        raise UnsupportedModelError("it brings code of its own")
    if config.model_type not in FAMILIES:  # and may have no decoder at all
        raise UnsupportedModelError(f"the decoder does not cover the family {config.model_type!r}")
    dtype = dtype or (torch.float32 if device.type == "cpu" else config.dtype)
    if dtype not in (None, *COMPUTED):
        raise UnsupportedModelError(f"the decoder does not compute in {dtype}")
    if dummy:
        facts = model_facts(config, _generation_config(None, config, local_only), name)
        dtype = dtype or torch.bfloat16
        decoder = decoder_config(config, dtype)
        return Decoder.from_source(decoder, config, RandomSource(decoder, device, dtype, seed), facts)
    _refuse_adapter(path, local_only)
    names = FAMILIES[config.model_type].get("names", Names())
    tied_to = names.embedding if getattr(config, "tie_word_embeddings", False) else None
    with Checkpoint(path, local_only=local_only, device=device, dtype=dtype, tied_to=tied_to) as checkpoint:
        facts = model_facts(config, _generation_config(path, config, local_only), name)
        return Decoder.from_source(decoder_config(config, checkpoint.dtype), config, checkpoint, facts)


def _generation_config(path: str | None, config: Any, local_only: bool) -> Any:
    """The file, or else the config's values, as in transformers; but a broken file is an error."""
    from transformers import GenerationConfig

    if path is None:
        return GenerationConfig.from_model_config(config)
    options: dict[str, Any] = {}
    try:
        if not find_files(path, ["generation_config.json"], local_only):
            options = {"config_file_name": "config.json", "_from_model_config": True}
        return GenerationConfig.from_pretrained(path, local_files_only=local_only, **options)
    except Exception as error:  # of any type, likewise
        raise ModelNotFoundError(f"the generation config of {path!r} cannot be used: {_words(error)}") from error


# AutoTokenizer's class for a family, used if the repository names it too. Importing AutoTokenizer would import the
# modelling stack.
_TOKENIZERS = {
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
_ANY_TOKENIZER = ("PreTrainedTokenizer", "TokenizersBackend")
_SPECIAL_RULES = {"mistral", "ministral", "qwen2"}  # AutoTokenizer may choose another class than the one named


def _named_tokenizer(path: str, local_only: bool) -> str | None:
    """The tokenizer's class, if the files determine it; None: AutoTokenizer decides."""
    files = find_files(path, ["config.json", "tokenizer_config.json", "tokenizer.json"], local_only)
    if len(files) < 3:
        return None
    says, config = (json.loads(files[name].read_bytes()) for name in ("tokenizer_config.json", "config.json"))
    kind = config.get("model_type")
    named = (says.get("tokenizer_class") or "").removesuffix("Fast")
    if "auto_map" in says or kind not in FAMILIES:
        return None
    if named in _ANY_TOKENIZER and kind not in _SPECIAL_RULES:
        return "TokenizersBackend"
    return named if named and named == _TOKENIZERS.get(kind) else None


def _pretrained_module(path: str, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool) -> Any:
    local_only = _only_local(path)
    # For shapes other than the config's, transformers would only refer to its log; below, the error names them.
    options: dict[str, Any] = {"dtype": dtype or "auto", "use_safetensors": True, "ignore_mismatched_sizes": True}
    straight = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    if straight:  # tensor by tensor; without accelerate, the whole model is loaded into host memory first
        options["device_map"] = {"": device}
    config = _config(path, trust_remote_code, local_only)
    _refuse_adapter(path, local_only)
    _generation_config(path, config, local_only)  # transformers would ignore a broken one
    from transformers import AutoModelForCausalLM

    try:
        if (quantised := getattr(config, "quantization_config", None)) is None:  # transformers would cast raw integers
            refuse_scaled(path, local_only)
        else:
            _refuse_unknown_quantisation(path, quantised)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            trust_remote_code=trust_remote_code,
            local_files_only=local_only,
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError) as error:
        raise ModelNotFoundError(f"no weights for {path!r} in safetensors: tried {_tried(path)}. {error}") from error
    except (CBatchError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any type: a class fails on its config, a quantisation lacks a package
        raise _not_causal(path, error) from error
    module, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers has initialised them at random
        raise ModelNotFoundError(f"the weights of {path!r} lack {missing[0]}{_and_more(missing)}")
    if other := sorted(found["mismatched_keys"]):  # and these
        name, stored, wanted = other[0]
        raise ModelNotFoundError(
            f"the weights of {path!r} do not fit its config: {name} is of shape {tuple(stored)}, but the config tells "
            f"of {tuple(wanted)}{_and_more(other)}"
        )
    return module if straight else module.to(device)


def _random_module(
    path: str, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool, seed: int
) -> nn.Module:
    """Random weights by the family's rules, made on their device: 8B parameters in seconds on a GPU.

    Not built on ``meta``, so that computed buffers (RoPE frequencies) are right. torch's own initialisation is skipped:
    the family's overwrites it.
    """
    config = _config(path, trust_remote_code, _only_local(path))
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{path!r}: load_format='dummy' makes floating point numbers alone, and the config names a quantisation"
        )
    from transformers import AutoModelForCausalLM
    from transformers import initialization as init

    dtype = dtype or config.dtype or torch.bfloat16
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.device(device):
            with init.no_init_weights():
                module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            torch.manual_seed(seed)
            with torch.no_grad():
                module.init_weights()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type, likewise
        raise _not_causal(path, error) from error
    return module.eval()


def _refuse_unknown_quantisation(path: str, quantised: Any) -> None:
    """Raise UnsupportedModelError for a method unknown to transformers, which would warn and take integers for weights.

    Raises ValueError if the config names no method."""
    from transformers.quantizers.auto import AutoHfQuantizer

    options = quantised if isinstance(quantised, dict) else quantised.to_dict()
    if not AutoHfQuantizer.supports_quant_method(options):
        method = options["quant_method"]
        raise UnsupportedModelError(f"{path!r}: transformers does not know the quantisation {method!r} of the config")


def _and_more(names: list[Any]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _not_causal(path: str, error: Exception) -> UnsupportedModelError:
    reason = _words(error).partition("\n")[0]  # the other lines list all of transformers' classes
    return UnsupportedModelError(f"transformers makes no causal language model of {path!r}: {reason}")


def _words(error: Exception) -> str:
    """An error's message, with its type unless transformers raised it on purpose."""
    return str(error) if isinstance(error, (OSError, ValueError)) else described(error)


def _tried(path: str) -> str:
    return f"the folder {path!r}" if os.path.exists(path) else f"the folder {path!r} and the hub repository {path!r}"
