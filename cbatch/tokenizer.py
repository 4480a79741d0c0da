"""State kept per transformers tokenizer, shared by all engines and requests that use it.

Owns its lock, its special ids, the texts of single tokens and the most characters that a token can stand for; checks
whether an object is a tokenizer. ``prompts.py`` encodes; ``detokenizer.py`` and ``output_maker.py`` decode.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from typing import Any

from cbatch.errors import CBatchError, ConfigError, described, short

_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_specials: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
_token_texts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
_spans: weakref.WeakKeyDictionary[Any, tuple[int, tuple[int, str] | None]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()  # for the four tables


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ConfigError if this is neither a tokenizer, nor the name of one, nor None."""
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        return
    usable = all(hasattr(tokenizer, name) for name in ("encode", "decode", "all_special_ids"))
    try:
        weakref.ref(tokenizer)  # a key of the tables above
    except TypeError:
        usable = False
    if not usable or isinstance(tokenizer, type):
        raise ConfigError(
            f"tokenizer is {short(tokenizer)}, but must be a folder, a hub name or a tokenizer of transformers"
        )


def lock_of(tokenizer: Any) -> threading.Lock:
    """The lock to hold while calling a tokenizer: a fast one changes its own state then."""
    with _guard:
        return _locks.setdefault(tokenizer, threading.Lock())


def is_busy(tokenizer: Any) -> bool:
    """Whether another thread is calling it, perhaps for long; an event loop must not wait for that."""
    return tokenizer is not None and lock_of(tokenizer).locked()


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Text with special tokens, and without clean-up, which changes earlier text: "do" and " n't" become "don't".

    Raises CBatchError if the tokenizer fails: one over sentencepiece does, on an id that only the model knows.
    """
    try:
        text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not isinstance(text, str):
            raise TypeError(f"it returned a {type(text).__name__}, not text")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # it is the user's, and a panic in a Rust one is no Exception
        raise CBatchError(f"the tokenizer failed: {described(error)}") from error
    return text


def texts_of(tokenizer: Any) -> dict[int, str]:
    """Texts of single tokens, a cache that the caller fills: 21 decodes for each sampled token take some 0.2 ms."""
    with _guard:
        return _token_texts.setdefault(tokenizer, {})


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out. Cached: with 1,000 added tokens, finding them takes 1 ms."""
    with _guard:
        found = _specials.get(tokenizer)
        if found is None:
            ids = set(getattr(tokenizer, "all_special_ids", ()))
            added = getattr(tokenizer, "added_tokens_decoder", None) or {}
            ids.update(number for number, token in added.items() if getattr(token, "special", False))
            found = _specials[tokenizer] = frozenset(ids)
        return found


def least_tokens(tokenizer: Any, text: str) -> int:
    """A lower bound of a text's token count, without encoding it; 0 if the tokenizer allows none.

    The first call for a tokenizer reads its vocabulary, which takes some 0.5 s.
    """
    known = len(tokenizer)  # grows with tokens that are added later, which may be long ones
    if (found := _spans.get(tokenizer)) is None or found[0] != known:
        found = known, _span(_state_of(tokenizer))
        with _guard:
            _spans[tokenizer] = found
    span = found[1]
    return 0 if span is None else (len(text) - sum(map(text.count, span[1]))) // span[0]


def _state_of(tokenizer: Any) -> dict[str, Any] | None:
    """What it is made of, as its file says it; None where it has parts that no file can hold: functions in Python."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    try:
        state: dict[str, Any] | None = json.loads(backend.to_str()) if hasattr(backend, "to_str") else None
    except Exception:  # ``tokenizers`` has no class of its own for it
        return None
    return state


def _span(state: dict[str, Any] | None) -> tuple[int, str] | None:
    """The most characters that a token can stand for, and the characters that no token stands for.

    None but for a BPE over bytes whose other parts drop nothing, so that all other characters end up in some token.
    """
    if state is None:
        return None
    model, added = state["model"], state["added_tokens"]
    parts = _parts(state["normalizer"], "normalizers") + _parts(state["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in parts}
    if (
        model["type"] != "BPE"
        or model["continuing_subword_prefix"]  # a byte inside of a word is looked up with it, and dropped without
        or model["end_of_word_suffix"]
        or kinds - {"NFC", "Prepend", "Replace", "ByteLevel", "Metaspace", "Split", "Digits"}
        or any(token["lstrip"] or token["rstrip"] for token in added)  # these take in any number of spaces
        or any(part["type"] == "Split" and part["behavior"] == "Removed" for part in parts)
        or any(part["type"] == "Replace" and len(part["pattern"].get("String", "")) != 1 for part in parts)
        or any(part["type"] == "Replace" and not part["content"] for part in parts)
    ):
        return None
    vocab, dropped = model["vocab"], ""
    if "ByteLevel" in kinds:
        # How it writes bytes: those that can be seen as themselves, the others as the characters from 256 on.
        seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in seen]
        missing = [byte for byte in seen if chr(byte) not in vocab]
        missing += [byte for i, byte in enumerate(hidden) if chr(256 + i) not in vocab]
        if any(0x80 <= byte < 0xC0 for byte in missing):  # one of them is in every character beyond ASCII
            return None
        dropped = "".join(chr(byte) for byte in missing if byte < 0x80)
    elif not (model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256))):
        return None
    longest = max(map(len, [*vocab, *(token["content"] for token in added)]))
    return (longest * 4 if "NFC" in kinds else longest), dropped  # at most four characters are composed into one


def _parts(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [one for each in part[name] for one in _parts(each, name)] if part["type"] == "Sequence" else [part]
