"""What is kept beside a tokenizer of transformers for as long as it lives, whichever engines and requests share it.

Owns its lock, the ids of its special tokens and the texts of single tokens, and says what is a tokenizer at all. What
is encoded and decoded with it is the business of ``prompts.py``, ``detokenizer.py`` and ``output_maker.py``.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from cbatch.errors import ConfigError, short

_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_specials: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
_token_texts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()  # for the three tables


def check_tokenizer(tokenizer: Any) -> None:
    """Whether it is a tokenizer, the name of one, or None.

    Raises:
        ConfigError: it is something else.
    """
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        return
    usable = all(hasattr(tokenizer, name) for name in ("encode", "decode", "all_special_ids"))
    try:
        weakref.ref(tokenizer)  # its lock is kept by it
    except TypeError:
        usable = False
    if not usable or isinstance(tokenizer, type):
        raise ConfigError(
            f"tokenizer is {short(tokenizer)}, but must be a folder, a hub name or a tokenizer of transformers"
        )


def lock_of(tokenizer: Any) -> threading.Lock:
    """To be held while a tokenizer is called: a fast one changes its own state then."""
    with _guard:
        return _locks.setdefault(tokenizer, threading.Lock())


def is_busy(tokenizer: Any) -> bool:
    """Whether another thread is calling it, perhaps with a long text, for which an event loop must not wait."""
    return tokenizer is not None and lock_of(tokenizer).locked()


def texts_of(tokenizer: Any) -> dict[int, str]:
    """Texts of single tokens, filled as they are asked for: 21 decodes a token, some 0.2 ms, would be felt."""
    with _guard:
        return _token_texts.setdefault(tokenizer, {})


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out. Kept, as a tokenizer of 1,000 added tokens needs 1 ms to tell."""
    with _guard:
        found = _specials.get(tokenizer)
        if found is None:
            ids = set(getattr(tokenizer, "all_special_ids", ()))
            added = getattr(tokenizer, "added_tokens_decoder", None) or {}
            ids.update(number for number, token in added.items() if getattr(token, "special", False))
            found = _specials[tokenizer] = frozenset(ids)
        return found
