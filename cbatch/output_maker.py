"""What came of a request, made into the outputs that its consumer gets, in the consumer's thread.

Owns, for one request, each answer so far (text, tokens, log-probabilities, how it ended), and what of it an output of
the kind that was asked for holds: everything, or what is new. Log-probabilities as a step hands them out become those
of ``cbatch.outputs`` here, with the texts of their tokens. Takes chunks; knows nothing of handles, threads or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.detokenizer import Detokenizer, make_detokenizer
from cbatch.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from cbatch.sampling_params import RequestOutputKind, SamplingParams
from cbatch.tokenizer import texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenLogprobs = tuple[list[int], list[float], int]
"""Of one token: ids, the sampled one first and then the most likely; their log-probabilities; the sampled one's rank"""


def make_logprobs(
    found: Iterable[TokenLogprobs], tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[int, Logprob]]:
    """What a consumer gets of each token's; with the texts of the tokens, where there is a tokenizer."""
    texts = {} if tokenizer is None else texts_of(tokenizer)

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
    ) -> RequestOutput:
        """The output after these chunks, each of the answer with this index."""
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
