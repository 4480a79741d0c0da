"""A tokenizer for models of random weights, which have none. Knows no engine."""

from __future__ import annotations

import random
from typing import Any


def made_up_tokenizer(vocab_size: int) -> Any:
    """Byte-level, with as many tokens: three special ones, the bytes, and made-up words of up to twelve letters.

    Words begin with a space, a quote or nothing, and share their beginnings as real ones do. The same each time.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng, special = random.Random(0), ["<unk>", "<s>", "</s>"]
    tokens = dict.fromkeys([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    stems = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 4))) for _ in range(2000)]
    while len(tokens) < vocab_size:
        tokens[rng.choice(["Ġ", "", "", '"']) + "".join(rng.choices(stems, k=rng.randint(1, 3)))] = None
    vocab = {token: number for number, token in enumerate(list(tokens)[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
