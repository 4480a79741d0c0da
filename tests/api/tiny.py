"""Tiny tokenizers of the kinds that split characters, and a tiny model to go with one: made in milliseconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world hello", "don't stop 123", "naïve café"] * 20

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad ones') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _trained(
    texts: list[str], vocab_size: int, specials: list[str], pre_tokenizer: Any, **model: Any
) -> PreTrainedTokenizerFast:
    """A BPE over bytes; the last special token ends a text, and the first of two begins it."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[-1], bos_token=specials[0] if len(specials) > 1 else None
    )


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's: text outside the tiny training corpus falls apart into bytes, so tokens split characters."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained([*CORPUS, "你好你好你好"], 400, ["<|start|>", "<|end|>"], pre_tokenizer)


def straddling() -> PreTrainedTokenizerFast:
    """Byte level over whole texts of CJK and emoji: tokens that end and start inside characters."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("你好世界界你世👨👩👧🎉🎊中文字") for _ in range(40)) for _ in range(200)]
    return _trained(texts, 500, ["<|end|>"], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def spaced() -> PreTrainedTokenizerFast:
    """Byte level with a token for a space and the first half of any emoji, as GPT-2 and its heirs have."""
    text = "".join(f" {chr(0x1F300 + i)}" for i in range(256))
    return _trained([text], 260, ["<|end|>"], pre_tokenizers.ByteLevel(add_prefix_space=False))


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a space is part of the word after it and lost at the start; unknown characters become bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    # The bytes came in as special tokens, which `decode` would skip; a real Llama's are plain entries.
    return _without_special_bytes(fast)


def metaspace() -> PreTrainedTokenizerFast:
    """Like those of newer sentencepiece models: pieces of a unigram model, bytes for what it does not know, and a
    decoder that knows which space belongs to the start."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    words = sorted({word for line in CORPUS for word in line.split()})
    pieces += [("▁" + word, -3.0) for word in words] + [("▁", -2.0)]
    pieces += [(letter, -6.0) for letter in sorted(set("".join(words)))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tiktoken_like() -> PreTrainedTokenizerFast:
    """Like Llama 3's and GPT-4's: bytes split by a pattern that keeps at most three digits and one space together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    )
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = [*CORPUS, "你好世界 🎉🎊 你好"]
    return _trained(texts, 420, ["<|begin|>", "<|end|>"], pre_tokenizer, ignore_merges=True)


def _without_special_bytes(fast: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    state = json.loads(fast.backend_tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


MAKERS = [byte_level, straddling, spaced, sentencepiece_like, metaspace, tiktoken_like]


def save_tiny_model(folder: Path) -> Path:
    """A random Llama of two small layers with the byte-level tokenizer and a chat template, as a folder to load."""
    import torch

    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    return folder
