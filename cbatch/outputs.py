"""What a request gives back. Plain data that pickles; knows nothing of engines or models."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.monotonic``; None: not yet."""

    arrival_time: float | None = None  # submitted
    first_scheduled_time: float | None = None  # first step that holds some of it was launched
    first_token_time: float | None = None  # first token handed out
    finished_time: float | None = None
    num_preemptions: int = 0  # times its KV blocks were taken away and computed again


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    ``token_ids`` and ``text`` hold everything so far, or what is new where ``RequestOutputKind.DELTA`` was asked for.
    The end-of-sequence token, or the stop token, that ended it is in ``token_ids`` and not in ``text``.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"abort"``, or None while it runs. ``stop_reason`` is the entry of
    ``stop_token_ids`` or the stop string that ended it, None for the model's own end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is all of it."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with what it has given so far. ``prompt`` is None when the prompt came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
