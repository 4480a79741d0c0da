"""Between text and tokens, in the consumer's thread: prompts to ids, chats to prompts, tokens to outputs as they come.

Where a request has stop strings its text is made in the engine's delivery thread, since it decides when it ends.

Knows a transformers tokenizer; knows nothing of engines, requests or models.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.errors import ConfigError, InvalidRequestError, described, short
from cbatch.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from cbatch.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_CONTEXT = 6  # prompt tokens decoded in front of the output: a lone first token would lose its leading space
_MAX_PARTIAL = 3  # a UTF-8 character has at most 4 bytes and a token at least 1: 3 tokens can dangle
_WINDOW = 16  # tokens decoded again at each push before the window is cut: two short decodes a cut, one a push
_MAX_HELD = 64  # tokens held back in the hope of a character; a run this long that never ends one is no text


class Detokenizer:
    """Makes text of one request's tokens as they arrive.

    The deltas of ``push`` joined are the decode of all tokens as they continue the prompt: a sentencepiece space in
    front of the first word is there if the prompt has text, the prompt itself is not repeated, and half a character
    is held back until its other half comes. Only text that truly ends inside a character (``finish_reason`` came first)
    ends in U+FFFD. A character whose first bytes are the prompt's and whose last bytes are the output's is output; what
    stands before it in the prompt's last token is the prompt's.

    Not for two threads at once. Costs one decode of at most some 20 tokens a push, however many tokens it brings.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        together = not (skip_special_tokens or spaces_between_special_tokens)
        self._together = _special_ids(tokenizer) if together else frozenset()
        # Left out here, not by the decoder: a model that repeats its EOS would fill the window with silence.
        self._silent = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._parts: list[str] = []

        # The window: ids[:settled] have been shown and decode to `shown`; the rest is held back.
        self._ids, self._settled = self._context(prompt_token_ids)
        self._shown = self._broken = self._decode(self._ids[: self._settled])
        # Where the prompt ends inside a character: `broken` is the window's text with that half, `shown` the text
        # before it, which may take a part of the half's own token. What comes continues `broken`, or `shown` if the
        # half was completed.
        if self._settled < len(self._ids):
            self._broken = self._decode(self._ids)
            before = self._broken.rstrip(_REPLACEMENT)
            if before.startswith(self._shown):
                self._shown = before
        self._previous = self._settled  # start of the last delta's tokens: where the window can be cut

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> str:
        """Takes the next tokens and returns the text that they add, ``""`` while a character is incomplete.

        With ``finish_reason`` these are the last ones: nothing is held back any more, and if it is ``"stop"`` the last
        token is the one that stopped the request, which is not text.
        """
        ending = len(token_ids) - 1 if finish_reason == "stop" else len(token_ids)
        self._ids += [t for t in token_ids[:ending] if t not in self._silent]
        held = len(self._ids) - self._settled
        if not held:
            return ""
        window, settled = self._decode(self._ids), len(self._ids)
        if finish_reason is None and window.endswith(_REPLACEMENT):
            if held <= _MAX_PARTIAL:
                return ""
            window, settled = self._without_the_half()
            if settled == self._settled:
                return ""
        if window.startswith(self._broken):
            delta = window[len(self._broken) :]
        elif window.startswith(self._shown):
            delta = window[len(self._shown) :]
        else:  # byte tokens that are no text after all made the decoder take back what is already shown
            delta = self._decode(self._ids[self._settled : settled])
        if delta:
            self._parts.append(delta)
            self._previous, self._settled = self._settled, settled
            self._shown = self._broken = window
            if settled > _WINDOW and finish_reason is None:
                self._cut()
        elif held >= _MAX_HELD:
            del self._ids[self._settled :]  # ids that the tokenizer does not know: no text, ever
        return delta

    def _without_the_half(self) -> tuple[str, int]:
        """The window without the last tokens, those that begin a character; how many tokens that leaves."""
        cuts = []
        for settled in range(len(self._ids) - 1, len(self._ids) - 1 - _MAX_PARTIAL, -1):
            text = self._decode(self._ids[:settled])
            if not text.endswith(_REPLACEMENT):
                return text, settled
            cuts.append((text.count(_REPLACEMENT), text, settled))
        if len(self._ids) - self._settled < _MAX_HELD:
            return self._shown, self._settled
        _, text, settled = min(cuts)  # the fewest: U+FFFD themselves, cut between two of them
        return text, settled

    def _cut(self) -> None:
        """Forgets all but the tokens of the last delta, from which the next one can be told as well."""
        last = self._ids[self._previous : self._settled]
        shown = self._decode(last)
        if shown:  # else they were silent by themselves (a lone space of sentencepiece), so keep more
            self._ids = last + self._ids[self._settled :]
            self._shown = self._broken = shown
            self._previous, self._settled = 0, len(last)

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Last few tokens of the prompt, cut at whole characters, and how many of them do not end inside one."""
        tail = prompt_token_ids[-64:]
        ids = [t for t in tail if t not in self._silent][-(_CONTEXT + 2 * _MAX_PARTIAL) :]
        for dangling in range(min(_MAX_PARTIAL, len(ids)) + 1):
            whole = ids[: len(ids) - dangling]
            for more in range(_MAX_PARTIAL + 1):
                start = max(len(whole) - _CONTEXT - more, 0)
                text = self._decode(whole[start:])
                if not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT):
                    return ids[start:], len(whole) - start
        return ids[-_CONTEXT:], len(ids[-_CONTEXT:])  # not text at all

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._together:  # no space between two special tokens: the text is decoded in parts that meet there
            special = [token in self._together for token in ids]
            cuts = [i for i in range(1, len(ids)) if special[i - 1] and special[i]]
            return "".join(self._decode_part(ids[a:b]) for a, b in itertools.pairwise([0, *cuts, len(ids)]))
        return self._decode_part(ids)

    def _decode_part(self, ids: list[int]) -> str:
        # No clean-up: it rewrites what is already shown ("do" + " n't" -> "don't").
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class TextUntilStop:
    """Makes text of one request's tokens up to the first of its stop strings, and says when that has come.

    What has been shown holds no character of a stop string: what may still become one is held back until it is
    decided, or until the end. Of stop strings that end at the same character, the one listed first counts.

    One that ends within the first ``min_tokens`` tokens is text like any other.

    Not for two threads at once. Beside the detokenizer's cost, some 0.3 µs for each character and stop string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        assert isinstance(params.stop, tuple)
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, params)
        self._matchers = [_Matcher(stop) for stop in params.stop]
        self._include = params.include_stop_str_in_output
        self._num_exempt = params.min_tokens  # tokens to come that cannot end it
        self._held = ""
        self._parts: list[str] = []
        self._num_taken = 0  # parts, in `take`
        self._over = False

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return "".join(self._parts)

    def take(self) -> str:
        """What of it came since the last call."""
        new = self._parts[self._num_taken :]
        self._num_taken = len(self._parts)
        return "".join(new)

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> str | None:
        """Takes the next tokens, as ``Detokenizer.push`` does; returns the stop string if they complete one.

        After the end, which is a stop string or ``finish_reason``, it takes nothing more.
        """
        if self._over:
            return None
        delta = self._detokenizer.push(token_ids, finish_reason)
        self._over = finish_reason is not None
        text = self._held + delta
        exempt = self._num_exempt > 0
        self._num_exempt -= len(token_ids)
        found, end = self._find(delta, exempt)
        if found is not None:
            self._over, self._held = True, ""
            end += len(text) - len(delta) - (0 if self._include else len(found))
        elif self._over or self._include:
            self._held, end = "", len(text)
        else:
            end = len(text) - max(matcher.matched for matcher in self._matchers)
            self._held = text[end:]
        if end:
            self._parts.append(text[:end])
        return found

    def _find(self, delta: str, exempt: bool) -> tuple[str | None, int]:
        """The stop string that ends first in what comes, and where it ends there; none in text that is exempt."""
        for end, char in enumerate(delta, 1):
            # A list, not a generator: all of them must take the character.
            if complete := [matcher for matcher in self._matchers if matcher.add(char)]:
                if not exempt:
                    return complete[0].stop, end
                for matcher in complete:
                    matcher.go_on()
        return None, 0


class _Matcher:
    """How much of a stop string the text ends with, told character by character: the search of Knuth, Morris, Pratt.

    Its state is what must be held back, and no text makes it slow.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # Of each prefix, the length of the longest shorter one that it ends with: what is left when it fails to go on.
        self._borders = [0]
        for char in stop[1:]:
            self.add(char)
            self._borders.append(self.matched)
        self.matched = 0

    def add(self, char: str) -> bool:
        """One more character of the text; whether a stop string ends with it: after that, ``go_on`` comes first."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != char:
            matched = self._borders[matched - 1]
        if stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(stop)

    def go_on(self) -> None:
        """Look for the next one, which may begin inside the one that was found."""
        self.matched = self._borders[-1]


def make_detokenizer(
    tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """One for an answer to a prompt, as its parameters want the text."""
    return Detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens)


TokenLogprobs = tuple[list[int], list[float], int]
"""Of one token: ids, the sampled one first and then the most likely; their log-probabilities; the sampled one's rank"""


def make_logprobs(
    found: Iterable[TokenLogprobs], tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[int, Logprob]]:
    """What a consumer gets of each token's; with the texts of the tokens, where there is a tokenizer."""
    texts = {} if tokenizer is None else _texts_of(tokenizer)

    def text(token: int) -> str | None:
        if tokenizer is None:
            return None
        if token not in texts:
            decoded = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert isinstance(decoded, str)
            texts[token] = decoded
        return texts[token]

    return [
        # A sampled token that is among the most likely ones has the same figures in both places.
        {
            token: Logprob(logprob, rank, text(token))
            for token, logprob, rank in zip(ids, logprobs, (own_rank, *range(1, len(ids))), strict=True)
        }
        for ids, logprobs, own_rank in found
    ]


def cumulative_logprob(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> float:
    """The log-probability of all these tokens together."""
    return sum(found[token].logprob for token, found in zip(token_ids, logprobs, strict=True))


class OutputMaker:
    """Turns what one request brings, chunk by chunk, into ``RequestOutput``s of the kind that it asked for."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._request_id, self._prompt, self._prompt_token_ids = request_id, prompt, prompt_token_ids
        self._kind = params.output_kind
        self._prompt_logprobs_shown = False
        self._detokenizers: list[Detokenizer | None] = [None] * params.n
        if tokenizer is not None and params.detokenize and not params.stop:
            self._detokenizers = [make_detokenizer(tokenizer, prompt_token_ids, params) for _ in range(params.n)]
        logprobs = None if params.logprobs is None else 0.0
        self._answers = [
            CompletionOutput(i, "", [], None, None, logprobs, None if logprobs is None else []) for i in range(params.n)
        ]

    def add(
        self,
        chunks: Iterable[tuple[int, Chunk]],
        metrics: RequestMetrics,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
    ) -> RequestOutput | None:
        """The output after these chunks, each of the answer with this index; None where it is the last one that was
        asked for, and this is not it.
        """
        new = [self._new(index, chunk) for index, chunk in chunks]
        finished = all(answer.finished for answer in self._answers)
        if self._kind is not RequestOutputKind.DELTA:
            if self._kind is RequestOutputKind.FINAL_ONLY and not finished:
                return None
            new = [_copy(answer) for answer in self._answers]
        elif self._prompt_logprobs_shown:
            prompt_logprobs = None
        self._prompt_logprobs_shown = self._prompt_logprobs_shown or prompt_logprobs is not None
        return RequestOutput(
            self._request_id, self._prompt, self._prompt_token_ids, new, finished, metrics, prompt_logprobs
        )

    def _new(self, index: int, chunk: Chunk) -> CompletionOutput:
        """What a chunk brings, which the whole answer takes in."""
        whole, text, detokenizer = self._answers[index], chunk.text, self._detokenizers[index]
        if text is None:
            text = detokenizer.push(chunk.token_ids, chunk.finish_reason) if detokenizer else ""
        whole.finish_reason, whole.stop_reason = chunk.finish_reason, chunk.stop_reason
        together = self._kind is not RequestOutputKind.DELTA
        if together:
            whole.text += text
            whole.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            assert whole.cumulative_logprob is not None and whole.logprobs is not None
            whole.cumulative_logprob += cumulative_logprob(chunk.token_ids, chunk.logprobs)
            if together:
                whole.logprobs += chunk.logprobs
        return CompletionOutput(
            index,
            text,
            chunk.token_ids,
            chunk.finish_reason,
            chunk.stop_reason,
            whole.cumulative_logprob,
            chunk.logprobs,
        )


def _copy(answer: CompletionOutput) -> CompletionOutput:
    logprobs = None if answer.logprobs is None else answer.logprobs.copy()
    return replace(answer, token_ids=answer.token_ids.copy(), logprobs=logprobs)


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> dict[str, list[tuple[int, ...]]]:
    """The token sequences of each word: as it is, and as it is behind a space. None where it has no tokens.

    Raises:
        InvalidRequestError: a word cannot be encoded.
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    for word in words:
        plain, spaced = (
            tuple(encode_prompt(tokenizer, space + word.lstrip(), add_special_tokens=False, what="bad_words item"))
            for space in ("", " ")
        )
        if not plain:
            found[word] = []
        elif spaced[-len(plain) :] == plain:  # the space is a token of its own, and the rest is found anyhow
            found[word] = [plain]
        else:
            found[word] = [plain, spaced]
    return found


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None, text: str, *, add_special_tokens: bool = True, what: str = "prompt"
) -> list[int]:
    """Token ids of a prompt (or ``what`` errors call it), with the special tokens that the tokenizer puts around it.

    Safe from many threads, one at a time per tokenizer: a fast tokenizer changes its own state when it is called.

    Raises:
        InvalidRequestError: there is no tokenizer, or the text cannot be encoded.
    """
    if tokenizer is None:
        raise InvalidRequestError(f"{what} {short(text)} is text, but there is no tokenizer: pass token ids")
    with lock_of(tokenizer):
        try:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # fast tokenizers say TypeError to a lone surrogate
            lone = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            why = error if lone is None else f"character {lone} is a lone surrogate, {text[lone]!r}"
            raise InvalidRequestError(f"{what} {short(text)} is not valid Unicode text: {why}") from None
    return list(ids)


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


def check_conversation(messages: Any) -> None:
    """Whether these are messages of a chat.

    Raises:
        InvalidRequestError: they are not; the message says what is wrong with them.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"a conversation must be a list of messages, each a dict of role and content, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InvalidRequestError(f"message {number} is {short(message)}: it must be a dict of role and content")


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a conversation as the model's chat template writes it, special tokens included.

    Args:
        messages: ``{"role": ..., "content": ...}``, oldest first.
        chat_template: a Jinja template instead of the tokenizer's own.
        add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
        InvalidRequestError: no tokenizer, no template, messages of another shape, or the template refuses them.
    """
    if tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer, and there is none: use generate with token ids")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("the tokenizer has no chat template: pass chat_template, or use generate")
    check_conversation(messages)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # anything: a template is a program of somebody else's
        raise InvalidRequestError(f"the chat template refuses these messages: {described(error)}") from error
    assert isinstance(text, str)
    return text


class PromptLike:
    """A prompt as a user may write it, taken apart: ``text`` or ``token_ids``, the other is None; ``cache_salt``."""

    __slots__ = ("cache_salt", "text", "token_ids")

    def __init__(self, prompt: Any) -> None:
        self.text: str | None = None
        self.token_ids: list[int] | None = None
        self.cache_salt: Any = None  # what it may be, the engine knows
        if isinstance(prompt, Mapping):
            keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            unknown = set(prompt) - {"prompt_token_ids", "prompt", "cache_salt"}
            if not keys or unknown:
                raise InvalidRequestError(
                    f"prompt {short(prompt)} must hold prompt or prompt_token_ids, and nothing else but cache_salt"
                )
            self.cache_salt = prompt.get("cache_salt")
            if "prompt_token_ids" in keys:
                self.token_ids = _token_ids(prompt["prompt_token_ids"])
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt {short(text)} must be text, not {type(text).__name__}")
            self.text = text
        elif isinstance(prompt, str):
            self.text = prompt
        else:
            self.token_ids = _token_ids(prompt)

    def encode(self, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
        """Its token ids. Takes about a millisecond per 1,000 characters of text."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return encode_prompt(tokenizer, self.text)


def _token_ids(value: Any) -> list[int]:
    """A list of ids as it came, only its outer shape checked: what the ids may be, the engine knows."""
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"prompt {short(value)} must be text, a list of token ids or a dict, not {type(value).__name__}"
        )
    return list(value)


_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_specials: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
_token_texts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()  # for the three tables


def lock_of(tokenizer: Any) -> threading.Lock:
    """To be held while a tokenizer is called: a fast one changes its own state then."""
    with _guard:
        return _locks.setdefault(tokenizer, threading.Lock())


def _texts_of(tokenizer: Any) -> dict[int, str]:
    """Texts of single tokens, filled as they are asked for: 21 decodes a token, some 0.2 ms, would be felt."""
    with _guard:
        return _token_texts.setdefault(tokenizer, {})


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out. Kept, as a tokenizer of 1,000 added tokens needs 1 ms to tell."""
    with _guard:
        found = _specials.get(tokenizer)
        if found is None:
            ids = set(getattr(tokenizer, "all_special_ids", ()))
            added = getattr(tokenizer, "added_tokens_decoder", None) or {}
            ids.update(number for number, token in added.items() if getattr(token, "special", False))
            found = _specials[tokenizer] = frozenset(ids)
        return found
