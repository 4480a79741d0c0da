"""Makes grammars of what a request's structured output must be, through llguidance. Knows no engine, step or tensor.

Nothing of a grammar is computed beforehand: llguidance walks the tokens of the vocabulary as it needs them. So one is
made in about a millisecond, and a mask takes a few µs, in Rust and without the interpreter lock.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import StructuredOutputsParams
from cbatch.tokenizer import lock_of, special_ids

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 256  # grammars; each takes some KiB to some MiB
_MAX_MESSAGE = 500  # characters of llguidance's own; it quotes lines of the grammar, which may be long
# The last line of a grammar of the user's own, which goes before what he has set. Where one text alone can come,
# llguidance would look for all of it at once, and behind a rule such as `a: /x+/ a` that is for ever: it would neither
# return nor end with the request. JSON, expressions and choices have no such rules.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class Grammars:
    """The grammars over one tokenizer, cached by what they say. Any thread may ask for one."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._limits: LLParserLimits
        self._specials: frozenset[int] = frozenset()

    @property
    def num_words(self) -> int:
        """int32 words of a mask that ``fill`` writes."""
        assert self._vocabulary is not None
        return -(-self._vocabulary.vocab_size // 32)

    def matcher(self, asked: StructuredOutputsParams, who: str) -> LLMatcher:
        """The beginning of a grammar, for one answer to advance.

        Compiles it if it is new, which takes milliseconds, or seconds for a huge one; the first of an engine reads the
        vocabulary too, which takes some 0.2 s.

        Raises:
            InvalidRequestError: no such grammar, or none over this tokenizer; ``who`` is the request.
        """
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                f"{who}: structured_outputs needs llguidance ({error}): pip install cbatch[grammar]"
            ) from None
        with self._lock:
            vocabulary = self._read_vocabulary(who)
            if (start := self._cache.get(asked)) is not None:
                self._cache.move_to_end(asked)
                return start.deep_copy()
        try:
            text = _source(asked)
        except ValueError as error:
            raise InvalidRequestError(f"{who}: {_name(asked)}: {error}") from None
        start = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=self._limits)
        try:
            if not start.is_error():  # a grammar of no text at all is found out here
                self.fill([(start, 0)], np.empty((1, self.num_words), np.int32))
            if start.is_error():
                raise ValueError(first_lines(start.get_error()))
        except ValueError as error:
            raise InvalidRequestError(f"{who}: {_name(asked)}: {error}") from None
        with self._lock:
            self._cache[asked] = start
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return start.deep_copy()

    def fill(self, matchers: list[tuple[LLMatcher, int]], masks: NDArray[np.int32]) -> None:
        """The tokens that may come next, for each in the row of its number: bit i % 32 of word i // 32 for token i.

        Several rows of ``masks [rows, num_words]`` are made at once, by threads of llguidance's own.
        """
        assert masks.flags.c_contiguous and masks.shape[1] == self.num_words
        assert self._executor is not None and all(row < len(masks) for _, row in matchers)
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.strides[0])
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))

    def spell_out(self, matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
        """Where a text that must come is that of a special token, put a token that spells it into ``mask [num_words]``.

        llguidance has the tokenizer encode such a text, and forces what it finds: the special token, of which it holds
        afterwards, rightly, that it is no text. An end of sequence would end the answer there. Not for a grammar of the
        user's own, where nothing is forced.
        """
        if np.count_nonzero(mask) != 1:
            return
        index = int(mask.nonzero()[0][0])
        word = int(mask[index]) & 0xFFFFFFFF
        token = 32 * index + word.bit_length() - 1
        if word & (word - 1) or token not in self._specials or matcher.is_accepting():
            return
        if matcher.validate_tokens([token]):  # it is in the grammar as itself
            return
        text = matcher.compute_ff_bytes().decode("utf-8", "ignore")
        assert self._vocabulary is not None
        if spelled := self._vocabulary.greedy_tokenize(text):
            mask[index] = 0
            mask[spelled[0] // 32] = np.uint32(1 << spelled[0] % 32).view(np.int32)

    def _read_vocabulary(self, who: str) -> LLTokenizer:
        if self._vocabulary is None:
            import llguidance

            fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
            if not hasattr(fast, "to_str"):
                found = "there is none" if self._tokenizer is None else f"this is a {type(self._tokenizer).__name__}"
                raise InvalidRequestError(f"{who}: structured_outputs needs a fast tokenizer, but {found}")
            if not self._eos_token_ids:
                raise InvalidRequestError(
                    f"{who}: structured_outputs needs an end-of-sequence token to end with, but the model has none"
                )
            with lock_of(self._tokenizer):
                text, ids = fast.to_str(), fast.get_vocab(with_added_tokens=True).values()
            # Models have more tokens than their tokenizer, for the sake of alignment; some tokenizers have more.
            num_tokens = max(self._vocab_size, max(ids) + 1)
            try:
                self._vocabulary = llguidance.LLTokenizer(text, n_vocab=num_tokens, eos_token=self._eos_token_ids)
            except Exception as error:  # of a kind of tokenizer that it does not know
                raise InvalidRequestError(
                    f"{who}: structured_outputs cannot be had with this tokenizer: {error}"
                ) from error
            self._specials = special_ids(self._tokenizer)
            self._executor = llguidance.LLExecutor()
            self._limits = llguidance.LLParserLimits(verbose_errors=False)
        return self._vocabulary


def _source(asked: StructuredOutputsParams) -> str:
    """As llguidance reads it. Raises ValueError for what is seen to be wrong so early."""
    import llguidance

    if asked.json is not None or asked.json_object:
        assert asked.json is None or isinstance(asked.json, str)
        schema = '{"type": "object"}' if asked.json is None else asked.json
        options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
        if asked.whitespace_pattern is not None:
            options["whitespace_pattern"] = asked.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if asked.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        # One terminal, since a parser would look at each text in every row, and takes 2,000; and in ASCII, since its
        # reader refuses a raw DEL.
        texts = " | ".join(map(json.dumps, asked.choice))
        return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    assert asked.grammar is not None
    return llguidance.grammar_from("grammar", asked.grammar) + _NO_FORCING


def _name(asked: StructuredOutputsParams) -> str:
    """Which of its fields it has, and the beginning of that; and its pattern, which may be what is wrong."""
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(asked, name)) is not None:
            shown = str(value)
            found = f"structured_outputs.{name}={shown if len(shown) <= 80 else f'{shown[:77]}...'}"
            break
    else:
        found = "structured_outputs.json_object"
    return found if asked.whitespace_pattern is None else f"{found} with whitespace_pattern={asked.whitespace_pattern}"


def first_lines(message: str) -> str:
    """What llguidance says, without the state of its parser."""
    said = message.partition("\n<")[0].strip()
    if said == "NoExtensionBias":
        return "there is no text that it allows"
    return said if len(said) <= _MAX_MESSAGE else f"{said[: _MAX_MESSAGE - 3]}..."
