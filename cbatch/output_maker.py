"""Turns a request's chunks into outputs, in the consumer's thread.

Owns each answer so far (text, tokens, log-probabilities, finish reason); an output has all of it or what is new, by
its kind. Turns a step's log-probabilities into ``cbatch.outputs.Logprob``s, with the texts of their tokens. Knows no
handle, thread or engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.detokenizer import Detokenizer
from cbatch.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from cbatch.sampling_params import RequestOutputKind, SamplingParams
from cbatch.tokenizer import decode, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenLogprobs = tuple[list[int], list[float], int]
"""For one token: the sampled id, then the most likely ids; their log-probabilities; the sampled token's rank."""


def make_logprobs(
    found: Iterable[TokenLogprobs], tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[int, Logprob]]:
    """A dict for each token, as in ``CompletionOutput.logprobs``; with texts, if there is a tokenizer."""
    texts = {} if tokenizer is None else texts_of(tokenizer)

    def text(token: int) -> str | None:
        if tokenizer is None:
            return None
        if token not in texts:
            texts[token] = decode(tokenizer, [token])
        return texts[token]

    return [
        # If the sampled token is among the most likely, both entries have the same figures.
        {
            token: Logprob(logprob, rank, text(token))
            for token, logprob, rank in zip(ids, logprobs, (own_rank, *range(1, len(ids))), strict=True)
        }
        for ids, logprobs, own_rank in found
    ]


def cumulative_logprob(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> float:
    """The sum of the tokens' log-probabilities."""
    return sum(found[token].logprob for token, found in zip(token_ids, logprobs, strict=True))


class OutputMaker:
    """Turns the chunks of one request into ``RequestOutput``s of its ``output_kind``."""

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
            self._detokenizers = [Detokenizer(tokenizer, prompt_token_ids, params) for _ in range(params.n)]
        logprobs = None if params.logprobs is None else 0.0
        self._answers = [
            CompletionOutput(i, "", [], None, None, logprobs, None if logprobs is None else []) for i in range(params.n)
        ]

    def add(
        self,
        chunks: Iterable[tuple[int, Chunk]],
        metrics: RequestMetrics,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
    ) -> RequestOutput:
        """The output after these chunks, each with the index of its answer."""
        new = [self._new(index, chunk) for index, chunk in chunks]
        finished = all(answer.finished for answer in self._answers)
        if self._kind is not RequestOutputKind.DELTA:
            new = [_copy(answer) for answer in self._answers]
        elif self._prompt_logprobs_shown:
            prompt_logprobs = None
        self._prompt_logprobs_shown = self._prompt_logprobs_shown or prompt_logprobs is not None
        return RequestOutput(
            self._request_id, self._prompt, self._prompt_token_ids, new, finished, metrics, prompt_logprobs
        )

    def _new(self, index: int, chunk: Chunk) -> CompletionOutput:
        """A chunk as an output; the whole answer is extended by it."""
        whole, text, detokenizer = self._answers[index], chunk.text, self._detokenizers[index]
        if text is None:
            text = detokenizer.push(chunk.token_ids, chunk.finish_reason) if detokenizer else ""
        whole.finish_reason, whole.stop_reason = chunk.finish_reason, chunk.stop_reason
        accumulates = self._kind is not RequestOutputKind.DELTA
        if accumulates:
            whole.text += text
            whole.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            assert whole.cumulative_logprob is not None and whole.logprobs is not None
            whole.cumulative_logprob += cumulative_logprob(chunk.token_ids, chunk.logprobs)
            if accumulates:
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
