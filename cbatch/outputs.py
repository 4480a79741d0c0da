"""What a request gives back. Plain data that pickles; knows nothing of engines or models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.monotonic``; None: not yet."""

    arrival_time: float | None = None  # submitted
    first_scheduled_time: float | None = None  # first step that holds some of it was launched
    first_token_time: float | None = None  # first token handed out
    finished_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache and not computed
    num_preemptions: int = 0  # times its KV blocks were taken away, to be computed again or copied back


class Logprob(NamedTuple):
    """How likely the model found a token, before any sampling parameter changed that."""

    logprob: float  # natural logarithm of its probability
    rank: int  # 1: the most likely
    decoded_token: str | None  # its text alone; None without a tokenizer or with ``detokenize=False``


class Chunk(NamedTuple):
    """The tokens that came since the last chunk, and how it ended if it did: its ``finish_reason``.

    ``text`` is what is to be shown since then, for a request with stop strings; None for others: a ``Detokenizer``
    makes it of the tokens. ``logprobs`` are those of the tokens, where they were asked for.
    """

    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    ``token_ids``, ``text`` and ``logprobs`` hold everything so far, or what is new where ``RequestOutputKind.DELTA``
    was asked for. The end-of-sequence token, or the stop token, that ended it is in ``token_ids``, and not in ``text``
    unless ``include_stop_str_in_output`` was asked for.

    ``logprobs`` has a dict for each token, of the sampled one first and then the most likely ones;
    ``cumulative_logprob`` is the sum over all sampled tokens so far. Both are None where no ``logprobs`` were wanted.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"abort"``, ``"timeout"`` (``timeout_s`` was over), or None while it
    runs; an error is raised instead.
    ``stop_reason`` is the entry of ``stop_token_ids`` or the stop string that ended it, None for the model's own
    end-of-sequence token. Of a stop token whose text is in ``text`` and completes a stop string, it is the string.

    ``score`` is a beam's, by which the answers of a beam search are ordered; these have a ``cumulative_logprob``, too.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether this is all of it."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with what it has given so far. ``prompt`` is None when the prompt came as token ids.

    ``outputs`` are its ``n`` answers by index; with ``RequestOutputKind.DELTA`` those that have something new.

    ``prompt_logprobs``, where they were asked for, has None for the prompt's first token and a dict for each other one:
    of the token itself first, then of the most likely ones. It is None until all of them are known, which they are
    before the first answer has a token; with ``DELTA`` one output has them. They are computed with the first of ``n``
    answers, and stay None where that one is aborted before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
