"""Checks submissions and turns them into handles and sequences. Keeps no request.

Called from any thread, never under the engine's lock. A draft is made before the request has an id; ``open`` gives it
one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.beam_search import BeamSearch
from cbatch.beams import BeamHandle, beam_sequence
from cbatch.detokenizer import TextUntilStop
from cbatch.errors import CBatchError, InvalidRequestError, named, short
from cbatch.grammar import Grammars
from cbatch.held import HeldRow
from cbatch.limits import Limits
from cbatch.models.base import Model
from cbatch.prompt_logprobs import PromptLogprobs
from cbatch.prompts import bad_word_ids
from cbatch.request import ParallelHandle, RequestHandle
from cbatch.sampler import HELD, Encoded, encode
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from cbatch.scheduler.sequence import Sequence

Ended = Callable[[RequestHandle, bool], None]  # called once for each answer, with whether it was aborted


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """The fields that all drafts have."""

    prompt: NDArray[np.int32]
    max_len: int  # tokens, the prompt's included
    priority: int
    cache_salt: bytes
    timeout_s: float | None

    def arrive(self, handle: RequestHandle) -> None:
        handle.metrics.arrival_time = now = time.monotonic()
        handle.deadline = None if self.timeout_s is None else now + self.timeout_s


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A request for ``n`` answers."""

    intake: Intake
    common: Common
    params: SamplingParams
    prompt_ids: list[int]  # shared by all answers
    stop_ids: frozenset[int]  # shared, too
    encoded: list[Encoded]
    held: list[HeldRow | None]
    texts: list[TextUntilStop | None]

    @property
    def num_answers(self) -> int:
        return self.params.n

    def open(self, request_id: str, ended: Ended) -> RequestHandle:
        """The request's handle; each of its ``children`` has its sequence."""
        children = [self._answer(i, request_id, ended) for i in range(self.params.n)]
        return children[0] if self.params.n == 1 else ParallelHandle(request_id, tuple(children))

    def _answer(self, i: int, request_id: str, ended: Ended) -> RequestHandle:
        params, common, prompt_ids, state = self.params, self.common, self.prompt_ids, self.encoded[i]
        name = request_id if params.n == 1 else f"{request_id}-{i}"
        of_prompt = None
        if params.prompt_logprobs is not None and i == 0:
            of_prompt = PromptLogprobs(len(prompt_ids), params.prompt_logprobs, self.intake.vocab_size)
        handle = RequestHandle(
            name, prompt_ids, params, self.intake.tokenizer, ended, self.texts[i], request_id, i, of_prompt
        )
        handle.upload = state.upload
        handle.held = self.held[i]
        handle.sequence = Sequence(
            common.prompt,
            common.max_len,
            stop_token_ids=self.stop_ids,
            param_values=state.param_values,
            flags=state.flags,
            skip_reading_prefix_cache=of_prompt is not None,  # cached tokens have no logits
            wants_prompt_logits=of_prompt is not None and of_prompt.num_wanted > 0,
            payload=handle,
            priority=common.priority,
            cache_salt=common.cache_salt,
        )
        common.arrive(handle)
        return handle


@dataclass(frozen=True, slots=True, eq=False)
class BeamDraft:
    """A search for the most likely answers."""

    intake: Intake
    common: Common
    params: BeamSearchParams
    search: BeamSearch
    num_answers = 1  # toward max_queue_size

    def open(self, request_id: str, ended: Ended) -> BeamHandle:
        common = self.common
        handle = BeamHandle(request_id, common.prompt, self.params, self.intake.tokenizer, ended, self.search)
        handle.sequence = beam_sequence(handle, common.prompt, common.max_len, common.priority, common.cache_salt)
        common.arrive(handle)
        return handle


class Intake:
    """Checks submissions against the limits, and drafts them. Raises as ``Engine.submit``."""

    def __init__(self, model: Model, tokenizer: Any, limits: Limits, grammars: Grammars, seed: int | None) -> None:
        """``seed``: of the generator that seeds requests without a seed."""
        self.tokenizer = tokenizer
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.eos_token_ids
        self._generation_config = model.generation_config
        self._limits, self._grammars = limits, grammars
        self._lock = threading.Lock()  # for _seeds
        self._seeds = np.random.default_rng(seed)

    @cached_property
    def default_sampling_params(self) -> SamplingParams:
        """For requests without ``SamplingParams``: from the model's ``generation_config``."""
        if self._generation_config is None:
            return SamplingParams()
        return SamplingParams.from_generation_config(self._generation_config)

    def request(
        self, prompt_token_ids: Iterable[int], params: SamplingParams | None, request_id: str | None, **options: Any
    ) -> Draft:
        """``options`` are those of ``Engine.submit``."""
        with _naming(request_id):
            prompt = self._limits.prompt(prompt_token_ids)
            prompt_ids: list[int] = prompt.tolist()
            params = self.default_sampling_params if params is None else self._limits.params(params)
            common = self._common(prompt, params, **options)
            bad_words = bad_word_ids(self.tokenizer, params.bad_words) if params.bad_words else {}
            stop_ids = frozenset((*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids))
            banned = self._limits.bans(params, bad_words, stop_ids)
            asked = params.structured_outputs
            matcher = None if asked is None else self._grammars.matcher(asked)
            answers = range(params.n)
            texts = [TextUntilStop(self.tokenizer, prompt_ids, params) if params.stop else None for _ in answers]
        seed = params.seed
        if seed is None:
            with self._lock:
                seed = int(self._seeds.integers(2**64, dtype=np.uint64))
        first = encode(params, seed, prompt_len=len(prompt), stop_ids=stop_ids, bad_word_ids=banned)
        encoded = [first.with_seed(seed + i) for i in answers]
        held: HeldRow | None = None
        if first.flags & HELD:
            held = HeldRow(
                prompt_ids,
                params,
                matcher,
                eos_token_ids=self.eos_token_ids,
                stop_ids=stop_ids,
                bad_word_ids=banned,
            )
        rows = [held and held.copy() for _ in encoded]
        return Draft(self, common, params, prompt_ids, stop_ids, encoded, rows, texts)

    def beam_search(
        self, prompt_token_ids: Iterable[int], params: BeamSearchParams, request_id: str | None, **options: Any
    ) -> BeamDraft:
        """``options`` are those of ``Engine.submit_beam_search``."""
        with _naming(request_id):
            prompt = self._limits.prompt(prompt_token_ids)
            eos = () if getattr(params, "ignore_eos", False) else self.eos_token_ids
            params = self._limits.beams(params, len(eos))
            common = self._common(prompt, params, **options)
        return BeamDraft(self, common, params, BeamSearch(params, common.max_len - len(prompt), eos))

    def _common(
        self,
        prompt: NDArray[np.int32],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Common:
        limits = self._limits
        return Common(
            prompt,
            limits.max_len(len(prompt), params),
            limits.priority(priority),
            limits.cache_salt(cache_salt),
            limits.timeout(timeout_s),
        )


@contextmanager
def _naming(request_id: str | None) -> Iterator[None]:
    """Errors of the block say which request, which may have no id yet."""
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidRequestError(f"request_id is {short(request_id)}, but must be a string")
    try:
        yield
    except CBatchError as error:
        error.args = (f"{named(request_id)}: {error}",)
        raise
