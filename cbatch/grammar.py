"""Compiles structured-output parameters to grammars, through llguidance. Knows no engine, step or tensor.

llguidance computes masks lazily, by walking the vocabulary: a grammar takes about a millisecond to compile and a mask
a few µs, in Rust and without the interpreter lock.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import StructuredOutputsParams
from cbatch.tokenizer import lock_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 256  # grammars; most take some KiB
_MAX_CACHED_CHARS = 2_000_000  # of them together; the largest take 60 bytes a character
_MAX_MESSAGE = 500  # characters of an error of llguidance's; it quotes lines of the grammar, which may be long
# In every grammar; the last setting wins. Where only one text can follow, llguidance would compute all of it at each
# token: 25 to 600 ms for 100,000 characters, for ever for a rule such as `a: /x+/ a`. It would then allow only the
# tokenizer's encoding of it, which may be a special token, which the grammar rejects.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

# llguidance's compiler calls itself for each rule or definition that another one leads to, and where the stack ends, so
# does the process: with 8 MiB, some 900 definitions in a row. The most that ``MAX_CHARS`` allow take 64 MiB.
_STACK_BYTES = 128 << 20  # of addresses; the system gives memory as it is used
_stack_size = threading.Lock()  # the size is the process's
_T = TypeVar("_T")


def _on_a_deep_stack(call: Callable[[], _T]) -> _T:
    """Calls it in a thread of its own, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                called = pool.submit(call)
            finally:
                threading.stack_size(before)
        return called.result()


class Grammars:
    """The grammars over one tokenizer, cached by their parameters. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self.num_words = 0  # int32 words of each mask that ``fill`` writes, once the vocabulary has been read
        self._executor: LLExecutor
        self._limits: LLParserLimits

    def matcher(self, asked: StructuredOutputsParams) -> LLMatcher:
        """A grammar's initial state. It is shared: an answer advances a ``deep_copy``, of up to a MiB.

        Compiles a new grammar, which takes milliseconds, or a second if it is huge. The first call also reads the
        vocabulary, which takes some 0.2 s.

        Raises:
            InvalidRequestError: the grammar or the tokenizer cannot be used.
        """
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                f"structured_outputs needs llguidance ({error}): pip install cbatch[grammar]"
            ) from None
        with self._lock:
            vocabulary = self._read_vocabulary()
            if (start := self._cache.get(asked)) is not None:
                self._cache.move_to_end(asked)
                return start

        def compiled() -> LLMatcher:
            found = llguidance.LLMatcher(vocabulary, _source(asked), log_level=0, limits=self._limits)
            if not found.is_error():  # a first mask shows whether the grammar allows any text
                self.fill([(found, 0)], np.empty((1, self.num_words), np.int32))
            if found.is_error():
                raise ValueError(first_lines(found.get_error()))
            return found

        try:
            start = _on_a_deep_stack(compiled)
        except ValueError as error:
            raise InvalidRequestError(f"{_name(asked)}: {error}") from None
        with self._lock:
            self._cache[asked] = start
            while len(self._cache) > _MAX_CACHED or sum(map(_num_chars, self._cache)) > _MAX_CACHED_CHARS:
                self._cache.popitem(last=False)
        return start

    def fill(self, matchers: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
        """Write each matcher's allowed tokens into its row of ``masks [rows, num_words]``.

        Token i is bit i % 32 of word i // 32. llguidance's own threads fill several rows at once.
        """
        assert masks.flags.c_contiguous and masks.shape[1] == self.num_words
        assert all(row < len(masks) for _, row in matchers)
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.strides[0])
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            import llguidance

            fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
            if not hasattr(fast, "to_str"):
                found = "there is none" if self._tokenizer is None else f"this is a {type(self._tokenizer).__name__}"
                raise InvalidRequestError(f"structured_outputs needs a fast tokenizer, but {found}")
            if not self._eos_token_ids:
                raise InvalidRequestError(
                    "structured_outputs needs an end-of-sequence token to end with, but the model has none"
                )
            with lock_of(self._tokenizer):
                text, ids = fast.to_str(), fast.get_vocab(with_added_tokens=True).values()
            # Models often pad the vocabulary for alignment; some tokenizers have more tokens than their model.
            num_tokens = max(self._vocab_size, max(ids) + 1)
            try:
                vocabulary = llguidance.LLTokenizer(text, n_vocab=num_tokens, eos_token=self._eos_token_ids)
            except Exception as error:  # llguidance does not know this kind of tokenizer
                raise InvalidRequestError(f"structured_outputs cannot be had with this tokenizer: {error}") from error
            self.num_words = -(-vocabulary.vocab_size // 32)
            self._executor = llguidance.LLExecutor()
            self._limits = llguidance.LLParserLimits(verbose_errors=False)
            self._vocabulary = vocabulary  # last: after a Ctrl-C in here, the next request reads it again
        return self._vocabulary


def _source(asked: StructuredOutputsParams) -> str:
    """llguidance's grammar source. Raises ValueError for errors that show before it is compiled."""
    import llguidance

    if asked.json is not None or asked.json_object:
        assert asked.json is None or isinstance(asked.json, str)
        schema = '{"type": "object"}' if asked.json is None else asked.json
        options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        return _without_forcing(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options))
    if asked.regex is not None:
        return _without_forcing(llguidance.LLMatcher.grammar_from_regex(asked.regex))
    if asked.choice is not None:
        # One terminal, since the parser tries each alternative of a rule in every row, and takes at most 2,000. JSON's
        # ASCII, since the grammar reader refuses a raw DEL.
        texts = " | ".join(map(json.dumps, asked.choice))
        return f"start: CHOICE\nCHOICE: {texts}\n{_NO_FORCING}"
    assert asked.grammar is not None
    return llguidance.grammar_from("grammar", asked.grammar) + f"\n{_NO_FORCING}"


def _without_forcing(grammars: str) -> str:
    """llguidance's JSON of one grammar, with a second one that nothing refers to; its setting counts for both."""
    found = json.loads(grammars)
    found["grammars"].append({"lark_grammar": f'start: ""\n{_NO_FORCING}'})
    return json.dumps(found)


def _num_chars(asked: StructuredOutputsParams) -> int:
    return sum(len(text) for text in (asked.json, asked.regex, asked.grammar, *(asked.choice or ())) if text)


def _name(asked: StructuredOutputsParams) -> str:
    """The field that is set, with the beginning of its value and any ``whitespace_pattern``, for an error."""
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(asked, name)) is not None:
            shown = str(value)
            found = f"structured_outputs.{name}={shown if len(shown) <= 80 else f'{shown[:77]}...'}"
            break
    else:
        found = "structured_outputs.json_object"
    return found if asked.whitespace_pattern is None else f"{found} with whitespace_pattern={asked.whitespace_pattern}"


def first_lines(message: str) -> str:
    """An llguidance error without the parser's state."""
    said = message.partition("\n<")[0].strip()
    if said == "NoExtensionBias":
        return "there is no text that it allows"
    return said if len(said) <= _MAX_MESSAGE else f"{said[: _MAX_MESSAGE - 3]}..."
