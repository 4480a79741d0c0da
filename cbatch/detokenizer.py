"""Tokens to text as they come, and where a stop string ends it.

Owns, for one answer, which of its tokens are shown, which wait for the rest of a character, and which characters may
still become a stop string. A consumer makes its text in its own thread; where a request has stop strings the engine's
delivery thread makes it, since it decides when the request ends. Knows a tokenizer of transformers and what a request
asks of its text; knows nothing of prompts but their tokens, of outputs, or of engines.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cbatch.sampling_params import SamplingParams
from cbatch.tokenizer import special_ids

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
        include_stop_token: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop_token = include_stop_token
        together = not (skip_special_tokens or spaces_between_special_tokens)
        self._together = special_ids(tokenizer) if together else frozenset()
        # Left out here, not by the decoder: a model that repeats its EOS would fill the window with silence.
        self._silent = special_ids(tokenizer) if skip_special_tokens else frozenset()
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
        token is the one that stopped the request, which is not text unless ``include_stop_token`` asks for it.
        """
        silent_end = finish_reason == "stop" and not self._include_stop_token
        ending = len(token_ids) - 1 if silent_end else len(token_ids)
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
        """Forgets all but the tokens of the last delta, or a few more, from which the next one can be told as well."""
        for start in range(self._previous, max(self._previous - _CONTEXT, 0), -1):
            shown = self._decode(self._ids[start : self._settled])
            # By themselves they may be silent (a lone space of sentencepiece), and one more may begin in a character.
            if shown and (start == self._previous or not shown.startswith(_REPLACEMENT)):
                del self._ids[:start]
                self._shown = self._broken = shown
                self._previous, self._settled = self._previous - start, self._settled - start
                return

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

    Not for two threads at once. Beside the detokenizer's cost, some 0.1 µs a character, however many stop strings.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        assert isinstance(params.stop, tuple)
        self._detokenizer = make_detokenizer(tokenizer, prompt_token_ids, params)
        self._stops = _automaton(params.stop)
        self._state = 0
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
            end = len(text) - self._stops.depths[self._state]
            self._held = text[end:]
        if end:
            self._parts.append(text[:end])
        return found

    def _find(self, delta: str, exempt: bool) -> tuple[str | None, int]:
        """The stop string that ends first in what comes, and where it ends there; none in text that is exempt."""
        stops, state = self._stops, self._state
        children, shorter, ends = stops.children, stops.shorter, stops.ends
        for end, char in enumerate(delta, 1):
            while state and char not in children[state]:
                state = shorter[state]
            state = children[state].get(char, 0)
            if not exempt and ends[state] < len(stops.stops):
                return stops.stops[ends[state]], end
        while state and not children[state]:  # one that was exempt, and is no beginning of another
            state = shorter[state]
        self._state = state
        return None, 0


@dataclass(frozen=True, slots=True)
class _Automaton:
    """All stop strings at once (Aho and Corasick, 1975); a state is the longest beginning that the text ends with.

    So many characters must be held back. No text and no number of stop strings makes a character slow.
    """

    stops: tuple[str, ...]
    children: list[dict[str, int]]  # of each state, by the next character; 0 is that of no beginning
    shorter: list[int]  # the state of the longest shorter beginning: what is left when it fails to go on
    depths: list[int]  # characters
    ends: list[int]  # which of the stop strings is complete there, the one listed first; their number: none


@lru_cache(maxsize=8)  # answers to one prompt share one, and so do a server's requests
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Some 1.5 µs a character, and 300 bytes."""
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
    while queue:  # short ones first: what is shorter is known
        state = queue.popleft()
        for char, child in children[state].items():
            queue.append(child)
            left = shorter[state]
            while left and char not in children[left]:
                left = shorter[left]
            shorter[child] = children[left].get(char, 0)
            ends[child] = min(ends[child], ends[shorter[child]])
    return _Automaton(stops, children, shorter, depths, ends)


def make_detokenizer(
    tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """One for an answer to a prompt, as its parameters want the text."""
    return Detokenizer(
        tokenizer,
        prompt_token_ids,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
        params.include_stop_str_in_output,
    )
