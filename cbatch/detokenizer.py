"""Streams the text of one answer's tokens, and finds stop strings in it.

Owns which tokens have been shown, which wait for the rest of a character, and which characters may still become a stop
string. The consumer's thread decodes; with stop strings the engine's delivery thread does, as the text decides when the
request ends. Knows a transformers tokenizer and sampling parameters; knows no output and no engine.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cbatch.sampling_params import SamplingParams
from cbatch.tokenizer import decode, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # a decoder's output for bytes that are not (yet) a character
_CONTEXT = 6  # prompt tokens decoded in front of the output: a lone first token would lose its leading space
_MAX_PARTIAL = 3  # tokens that may hold the first bytes of a character: it has at most 4, and a token at least 1
_WINDOW = 16  # tokens decoded again at each push; above that the window is cut, at the price of about two decodes
_MAX_HELD = 64  # tokens held back for an incomplete character; a longer run without one is not text


class Detokenizer:
    """Decodes one answer's tokens as they arrive.

    The deltas of ``push``, joined, are the text by which all tokens continue the prompt: sentencepiece's space before
    the first word is kept if the prompt has text, and an incomplete character is held back until its last byte comes.
    Only text that ends inside a character ends in U+FFFD. A character that begins in the prompt and ends in the output
    belongs to the output.

    Not thread-safe. A push decodes some 20 tokens, plus the new ones.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop_token = params.include_stop_str_in_output
        unspaced = not (params.skip_special_tokens or params.spaces_between_special_tokens)
        self._unspaced = special_ids(tokenizer) if unspaced else frozenset()
        # Skipped here, not by the decoder: a model that repeats its EOS would fill the window with textless tokens.
        self._skipped = special_ids(tokenizer) if params.skip_special_tokens else frozenset()

        # The window: ids[:settled] have been shown and decode to `shown`; the rest is held back.
        self._ids, self._settled = self._context(prompt_token_ids)
        self._shown = self._broken = self._decode(self._ids[: self._settled])
        # If the prompt ends inside a character, `broken` is the window's text with its U+FFFD and `shown` the text
        # before it. Later text continues `broken`, or `shown` if the output completes the character.
        if self._settled < len(self._ids):
            self._broken = self._decode(self._ids)
            before = self._broken.rstrip(_REPLACEMENT)
            if before.startswith(self._shown):
                self._shown = before
        self._previous = self._settled  # where the last delta's tokens begin, and the window can be cut

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> str:
        """Takes the next tokens and returns the text that they add, ``""`` while a character is incomplete.

        With ``finish_reason`` these are the last tokens, and nothing is held back. If it is ``"stop"``, the last one is
        the stop token, which adds no text unless ``include_stop_str_in_output``.
        """
        drops_last = finish_reason == "stop" and not self._include_stop_token
        end = len(token_ids) - 1 if drops_last else len(token_ids)
        self._ids += [t for t in token_ids[:end] if t not in self._skipped]
        held = len(self._ids) - self._settled
        if not held:
            return ""
        window, settled = self._decode(self._ids), len(self._ids)
        if finish_reason is None and window.endswith(_REPLACEMENT):
            if held <= _MAX_PARTIAL:
                return ""
            window, settled = self._without_partial()
            if settled == self._settled:
                return ""
        if window.startswith(self._broken):
            delta = window[len(self._broken) :]
        elif window.startswith(self._shown):
            delta = window[len(self._shown) :]
        else:  # invalid byte tokens: the decoder has changed text that was already shown
            delta = self._decode(self._ids[self._settled : settled])
        if delta:
            self._previous, self._settled = self._settled, settled
            self._shown = self._broken = window
            if settled > _WINDOW and finish_reason is None:
                self._cut()
        elif held >= _MAX_HELD:
            del self._ids[self._settled :]  # ids unknown to the tokenizer: they never become text
        return delta

    def _without_partial(self) -> tuple[str, int]:
        """The window's text without the last, incomplete character, and how many tokens that is."""
        cuts = []
        for settled in range(len(self._ids) - 1, len(self._ids) - 1 - _MAX_PARTIAL, -1):
            text = self._decode(self._ids[:settled])
            if not text.endswith(_REPLACEMENT):
                return text, settled
            cuts.append((text.count(_REPLACEMENT), text, settled))
        if len(self._ids) - self._settled < _MAX_HELD:
            return self._shown, self._settled
        _, text, settled = min(cuts)  # the cut with the fewest U+FFFD: the tokens are U+FFFD themselves
        return text, settled

    def _cut(self) -> None:
        """Cuts the window down to the last delta's tokens, or a few more, which suffice to find the next delta."""
        for start in range(self._previous, max(self._previous - _CONTEXT, 0), -1):
            shown = self._decode(self._ids[start : self._settled])
            # Alone they may decode to "" (sentencepiece's space); with one more they may begin inside a character.
            if shown and (start == self._previous or not shown.startswith(_REPLACEMENT)):
                del self._ids[:start]
                self._shown = self._broken = shown
                self._previous, self._settled = self._previous - start, self._settled - start
                return

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The prompt's last tokens, from a character's first byte on, and how many of them are whole characters."""
        tail = prompt_token_ids[-64:]
        ids = [t for t in tail if t not in self._skipped][-(_CONTEXT + 2 * _MAX_PARTIAL) :]
        for dangling in range(min(_MAX_PARTIAL, len(ids)) + 1):
            whole = ids[: len(ids) - dangling]
            for more in range(_MAX_PARTIAL + 1):
                start = max(len(whole) - _CONTEXT - more, 0)
                text = self._decode(whole[start:])
                if not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT):
                    return ids[start:], len(whole) - start
        return ids[-_CONTEXT:], len(ids[-_CONTEXT:])  # not text

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._unspaced:  # decoded apart, two special tokens get no space between them
            special = [token in self._unspaced for token in ids]
            cuts = [i for i in range(1, len(ids)) if special[i - 1] and special[i]]
            return "".join(decode(self._tokenizer, ids[a:b]) for a, b in itertools.pairwise([0, *cuts, len(ids)]))
        return decode(self._tokenizer, ids)


class TextUntilStop:
    """Decodes one answer's tokens up to its first stop string, and reports that string.

    Characters that may still become a stop string are held back until that is decided, or until the end. Of stop
    strings that end at the same character, the first listed counts. One that ends within the first ``min_tokens``
    tokens is ordinary text.

    Not thread-safe. Costs the detokenizer's decodes and some 0.1 µs a character, however many stop strings there are.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        assert isinstance(params.stop, tuple)
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
        self._stops = _automaton(params.stop)
        self._state = 0
        self._include = params.include_stop_str_in_output
        self._num_exempt = params.min_tokens  # later tokens that cannot complete a stop string
        self._held = ""
        self._parts: list[str] = []
        self._num_taken = 0  # parts that `take` has returned
        self._over = False

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return "".join(self._parts)

    def take(self) -> str:
        """The text since the last call."""
        new = self._parts[self._num_taken :]
        self._num_taken = len(self._parts)
        return "".join(new)

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> str | None:
        """Takes the next tokens, as ``Detokenizer.push`` does; returns the stop string that they complete, if any.

        After a stop string or a ``finish_reason`` it ignores all tokens.
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
            end = len(text) - self._stops.depths[self._state]
            self._held = text[end:]
        if end:
            self._parts.append(text[:end])
        return found

    def _find(self, delta: str, exempt: bool) -> tuple[str | None, int]:
        """The stop string that ends first in ``delta``, and where; none if the text is ``exempt``."""
        stops, state = self._stops, self._state
        children, shorter, ends = stops.children, stops.shorter, stops.ends
        for end, char in enumerate(delta, 1):
            while state and char not in children[state]:
                state = shorter[state]
            state = children[state].get(char, 0)
            if not exempt and ends[state] < len(stops.stops):
                return stops.stops[ends[state]], end
        while state and not children[state]:  # a complete, exempt stop string that is no prefix of another
            state = shorter[state]
        self._state = state
        return None, 0


@dataclass(frozen=True, slots=True)
class _Automaton:
    """Matches all stop strings at once (Aho and Corasick, 1975), in amortised constant time a character.

    A state is the longest prefix of a stop string that the text ends with: as many characters must be held back.
    """

    stops: tuple[str, ...]
    children: list[dict[str, int]]  # each state's next states by character; state 0 is the empty prefix
    shorter: list[int]  # the failure link: the state of the longest proper suffix that is a prefix
    depths: list[int]  # characters of the prefix
    ends: list[int]  # index of the first listed stop string that the state completes; their number: none


@lru_cache(maxsize=8)  # shared by the answers to one prompt, and by a server's requests
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Takes some 1.5 µs and 300 bytes a character."""
    none = len(stops)
    children: list[dict[str, int]] = [{}]
    shorter, depths, ends = [0], [0], [none]
    for number, stop in enumerate(stops):
        state = 0
        for char in stop:
            if char not in children[state]:
                children[state][char] = len(children)
                children.append({})
                shorter.append(0)
                depths.append(depths[state] + 1)
                ends.append(none)
            state = children[state][char]
        ends[state] = min(ends[state], number)
    queue = deque(children[0].values())
    while queue:  # breadth first, so that shorter prefixes are complete
        state = queue.popleft()
        for char, child in children[state].items():
            queue.append(child)
            left = shorter[state]
            while left and char not in children[left]:
                left = shorter[left]
            shorter[child] = children[left].get(char, 0)
            ends[child] = min(ends[child], ends[shorter[child]])
    return _Automaton(stops, children, shorter, depths, ends)
