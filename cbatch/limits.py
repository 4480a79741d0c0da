"""Checks requests against the engine's limits. Errors have the value and the limit. Knows no engine."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.errors import InvalidRequestError, PromptTooLongError, short
from cbatch.kernels.slot_layout import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIASES
from cbatch.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from cbatch.scheduler.scheduler import Policy
from cbatch.scheduler.sequence import MAX_PRIORITY

_FOREVER_S = 1e12  # an int may be more than a float holds


@dataclass(frozen=True)
class Limits:
    """The engine's limits, and checks that raise InvalidRequestError or PromptTooLongError."""

    vocab_size: int
    max_model_len: int
    num_usable_blocks: int
    longest_len: int  # tokens of the longest request that fits into the empty pool
    blocks_for: Callable[[int], int]  # context length -> blocks
    has_tokenizer: bool = True
    policy: Policy = "fcfs"

    def prompt(self, prompt_token_ids: Iterable[int]) -> NDArray[np.int32]:
        """The prompt as int32 ``[num_tokens]``, from any sequence of integers."""
        if isinstance(prompt_token_ids, (str, bytes)):
            raise InvalidRequestError("the prompt is text; submit takes token ids (LLM.generate takes text)")
        try:
            if not isinstance(prompt_token_ids, Sized):
                prompt_token_ids = list(itertools.islice(prompt_token_ids, self.max_model_len + 1))  # maybe endless
            elif getattr(prompt_token_ids, "ndim", 1) == 1 and (length := len(prompt_token_ids)) > self.max_model_len:
                raise self._too_long(length)  # to convert 10 million ids would hold the GIL for 0.6 s
            if isinstance(prompt_token_ids, torch.Tensor):
                prompt_token_ids = prompt_token_ids.tolist()
            prompt = np.array(prompt_token_ids)
        except PromptTooLongError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(f"the prompt is no list of token ids: {error}") from None
        if prompt.ndim != 1:
            what = f"has {prompt.ndim} dimensions" if prompt.ndim else f"is a {type(prompt_token_ids).__name__}"
            raise InvalidRequestError(f"the prompt {what}, but must be a flat list of token ids")
        if prompt.size == 0:
            raise InvalidRequestError("the prompt is empty; at least one token is needed")
        integers = prompt.dtype.kind in "iu"
        low, high = (int(prompt.min()), int(prompt.max())) if integers else (0, 0)
        # numpy turns bools among integers into 0 and 1, so only a list with one of these needs a look at its types.
        if not integers or (low <= 1 and not isinstance(prompt_token_ids, np.ndarray)):
            odd = {t for t in set(map(type, prompt_token_ids)) if t is bool or not issubclass(t, (int, np.integer))}
            if odd:
                first = next(token for token in prompt_token_ids if type(token) in odd)
                raise InvalidRequestError(f"token ids must be integers, not {short(first)}")
            if not integers:  # beyond 64 bits: numpy made an array of objects or floats
                low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"token id {short(bad)} is out of range; the vocabulary has {self.vocab_size} tokens"
            )
        return prompt.astype(np.int32)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Check parameters against the vocabulary and the tokenizer, and return them."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params is a {type(params).__name__}, but must be SamplingParams")
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", dict(params.logit_bias)),
        ):
            token = max(tokens, default=0)
            if token >= self.vocab_size:
                raise InvalidRequestError(f"{name} has {token}, but the vocabulary has {self.vocab_size} tokens")
        if params.stop and not self.has_tokenizer:
            raise InvalidRequestError(
                f"stop has {short(params.stop[0])}, but there is no tokenizer to make text with: use stop_token_ids"
            )
        if (count := len(set(params.bad_words))) > MAX_BAD_WORDS:  # before they are tokenised
            raise InvalidRequestError(f"bad_words has {count} texts, but the limit is {MAX_BAD_WORDS}")
        if params.bad_words and not self.has_tokenizer:
            raise InvalidRequestError(
                f"bad_words has {short(params.bad_words[0])}, but there is no tokenizer to make tokens with"
            )
        return params

    def beams(self, params: BeamSearchParams, num_eos: int) -> BeamSearchParams:
        """Check and return a search's parameters. Each beam needs ``beam_width + num_eos`` candidates."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params is a {type(params).__name__}, but must be BeamSearchParams")
        for most, why in (
            (MAX_LOGPROBS, f"a beam has {MAX_LOGPROBS} candidates"),
            (self.vocab_size, f"the vocabulary has {self.vocab_size} tokens"),
        ):
            if params.beam_width + num_eos > most:
                raise InvalidRequestError(
                    f"beam_width is {params.beam_width}, but the limit is {most - num_eos}: {why}, of which {num_eos} "
                    "may end it"
                )
        return params

    def bans(
        self, params: SamplingParams, bad_words: Mapping[str, Sequence[tuple[int, ...]]], stop_ids: Set[int]
    ) -> list[tuple[int, ...]]:
        """Check that bans and biases fit into a device slot and leave a token. Returns the distinct bad sequences.

        ``bad_words``: each word's token sequences. ``stop_ids``: all tokens that end an answer, the model's included.
        """
        for word, sequences in bad_words.items():
            if not sequences:
                hint = "; white space alone has no word in it, but logit_bias can push its tokens down"
                raise InvalidRequestError(
                    f"bad_words has {short(word)}, of which the tokenizer makes no token{hint * word.isspace()}"
                )
            if (token := max(map(max, sequences))) >= self.vocab_size:
                raise InvalidRequestError(
                    f"bad_words has {short(word)}, with token {token}, but the vocabulary has {self.vocab_size}"
                )
            if (longest := max(map(len, sequences))) > MAX_BAD_WORD_LEN:
                raise InvalidRequestError(
                    f"bad_words has {short(word)}, which is {longest} tokens, but the limit is {MAX_BAD_WORD_LEN}"
                )
        bad = list(dict.fromkeys(itertools.chain(*bad_words.values())))
        if len(bad) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words makes {len(bad)} token sequences, with and without a space in front, but the "
                f"limit is {MAX_BAD_WORDS}"
            )
        banned = stop_ids if params.min_tokens else frozenset()
        if (count := len(banned | dict(params.logit_bias).keys())) > MAX_BIASES:
            raise InvalidRequestError(
                f"logit_bias has {len(params.logit_bias)} tokens, {count} with those that min_tokens bans, but "
                f"the limit is {MAX_BIASES}"
            )
        if len(banned) + len(bad) >= min(self.vocab_size, len(params.allowed_token_ids or range(self.vocab_size))):
            self._leave_a_token(params, bad, stop_ids)
        return bad

    def _leave_a_token(self, params: SamplingParams, bad: Sequence[tuple[int, ...]], stop_ids: Set[int]) -> None:
        """Check that every answer so far has an allowed next token: logits that are all -inf would yield one anyhow.

        Only the empty answer and the reachable beginnings of bad words can leave none. With a grammar, ``HeldRow``
        checks the beginnings step by step.
        """
        ids = params.allowed_token_ids
        allowed = set(range(self.vocab_size) if ids is None else ids)

        def left(before: tuple[int, ...]) -> set[int]:
            last = {word[-1] for word in bad if before[max(len(before) - len(word) + 1, 0) :] == word[:-1]}
            return allowed - last - (stop_ids if len(before) < params.min_tokens else set())

        beginnings = [] if params.structured_outputs is not None else [word[:-1] for word in bad if len(word) > 1]
        for before in ((), *beginnings):
            if params.max_tokens is not None and len(before) >= params.max_tokens:
                continue
            if left(before) or any(token not in left(before[:i]) - stop_ids for i, token in enumerate(before)):
                continue
            what = f"the vocabulary has {self.vocab_size}" if ids is None else f"allowed_token_ids has {len(ids)}"
            behind = f" behind {list(before)}" if before else ""
            raise InvalidRequestError(f"{what} tokens, but min_tokens and bad_words forbid all of them{behind}")

    def max_len(self, num_prompt_tokens: int, params: SamplingParams | BeamSearchParams) -> int:
        """Total length in tokens at which the request ends."""
        limit = self.max_model_len
        if num_prompt_tokens >= limit:
            raise self._too_long(num_prompt_tokens)
        room = self.longest_len
        if params.max_tokens is None:
            max_len = min(limit, max(room, num_prompt_tokens + 1))
        else:
            max_len = min(num_prompt_tokens + params.max_tokens, limit)
        if max_len > room:
            raise PromptTooLongError(
                f"{num_prompt_tokens} prompt tokens and up to {max_len - num_prompt_tokens} new "
                f"ones need {self.blocks_for(max_len - 1)} KV blocks, but the pool has {self.num_usable_blocks}"
            )
        least = params.min_tokens if isinstance(params, SamplingParams) else 0
        if least > max_len - num_prompt_tokens:
            why = f"max_model_len is {limit}"
            if max_len < limit:
                why = f"the pool has {self.num_usable_blocks} KV blocks"
            raise InvalidRequestError(
                f"min_tokens is {least}, but behind {num_prompt_tokens} prompt tokens is room for "
                f"{max_len - num_prompt_tokens}: {why}"
            )
        return max_len

    def _too_long(self, num_prompt_tokens: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"{num_prompt_tokens} prompt tokens, but max_model_len is {self.max_model_len} and one token must have room"
        )

    def priority(self, priority: int) -> int:
        """A request's priority as a plain int; other than 0 it needs the policy ``"priority"``."""
        whole = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
        if not whole or abs(int(priority)) > MAX_PRIORITY:  # numpy's least int64 has itself for absolute value
            raise InvalidRequestError(
                f"priority is {short(priority)}, but must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        if priority and self.policy != "priority":
            raise InvalidRequestError(f"priority is {priority}, but scheduling_policy is {self.policy!r}")
        return int(priority)

    def cache_salt(self, salt: str | None) -> bytes:
        """The salt as bytes; None as ``b""``, which all requests without a salt share."""
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidRequestError(f"cache_salt is {short(salt)}, but must be a string, not empty")
        return (salt or "").encode("utf-8", "surrogatepass")

    def timeout(self, timeout_s: float | None) -> float | None:
        """The timeout in seconds as a float, or None."""
        if timeout_s is None:
            return None
        number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
        if not (number and timeout_s > 0):
            raise InvalidRequestError(f"timeout_s is {short(timeout_s)}, but must be a positive number of seconds")
        return float(min(timeout_s, _FOREVER_S))
