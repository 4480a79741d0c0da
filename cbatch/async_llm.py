"""The API for servers: asynchronous streams of outputs; leaving a stream aborts it. Knows no device or batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from cbatch.engine import Engine
from cbatch.intake import Draft
from cbatch.output_maker import OutputMaker
from cbatch.outputs import RequestOutput
from cbatch.prompts import PromptLike, check_conversation, encode_chat
from cbatch.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from cbatch.tokenizer import is_busy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONG_TEXT = 5_000  # characters, some 5 ms of tokenising; longer texts go to a thread, so as not to block the loop
_MANY_ANSWERS = 10  # at some 0.1 ms each with stop strings; more go to a thread


@dataclass(slots=True, eq=False)
class _Drafting:
    """A request whose draft is being made."""

    request_id: str | None
    is_aborted: bool = False


class AsyncLLM:
    """A model that serves many streams at once. Arguments and errors as for ``LLM``.

    Building it loads the model and blocks; do it before the loop has other work. Requests may come from many tasks,
    and from loops of other threads too.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **engine_options: Any) -> None:
        self.engine = Engine.from_model(model, tokenizer, **engine_options)
        self._drafting: set[_Drafting] = set()  # requests that have not reached the engine yet
        weakref.finalize(self, Engine.close_soon, self.engine)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams one answer, or ``n``.

        ``sampling_params.output_kind`` chooses what each output holds: everything so far, or what is new (of ``n``
        answers, those with new tokens); or one output comes at the end. A slow consumer gets several tokens in one
        output and delays no other. Leaving early (``break``, cancellation, ``aclose``) aborts the request.

        Args:
            prompt: a text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. A dict may
                have a ``"cache_salt"``: cached prefixes are shared with prompts of the same salt only.
            sampling_params: None: the model's generation_config.
            request_id: a name for ``abort``, which no running request has. None: the engine chooses one.
            priority: with ``scheduling_policy="priority"``, the smaller goes first.
            timeout_s: if the request still runs after this time, its last output says ``"timeout"``.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served. The call refuses a prompt of no known form,
                the first step of the iteration everything else.
            EngineOverloadedError: ``max_queue_size`` requests wait already; raised by the first step of the iteration.
            CBatchError: a logits processor or the tokenizer failed, or the parameters left no token to go on with.
            EngineDeadError, EngineClosedError: the engine ended before the answer was complete.
        """
        taken = PromptLike(prompt)
        tokenizer, limit = self.engine.tokenizer, self.engine.config.max_model_len
        length = len(taken.text or "")
        options = {"priority": priority, "cache_salt": taken.cache_salt, "timeout_s": timeout_s}
        return self._stream(
            lambda: (taken.text, taken.encode(tokenizer, limit)), length, sampling_params, request_id, options
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for one conversation, a list of ``{"role": ..., "content": ...}``. Arguments: see ``LLM.chat``.

        The call refuses what is no conversation; the first step of the iteration raises what the template refuses.
        """
        check_conversation(messages)
        encode = partial(
            encode_chat,
            self.engine.tokenizer,
            messages,
            self.engine.config.max_model_len,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        length = sum(len(str(message)) for message in messages)
        options = {"priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s}
        return self._stream(encode, length, sampling_params, request_id, options)

    async def beam_search(
        self,
        prompt: Any,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Searches for the most likely answers; see ``LLM.beam_search``. Cancelling the task aborts it."""
        taken = PromptLike(prompt)
        with self._draft_of(request_id) as drafting:
            token_ids = await asyncio.to_thread(taken.encode, self.engine.tokenizer, self.engine.config.max_model_len)
        options = {"priority": priority, "cache_salt": taken.cache_salt, "timeout_s": timeout_s}
        handle = self.engine.submit_beam_search(token_ids, params, request_id, **options)
        try:
            if drafting.is_aborted:
                handle.abort()
            output = await handle.aresult()
        finally:
            handle.abort()  # nothing happens if it has ended
        output.prompt = taken.text
        return output

    async def abort(self, request_id: str) -> None:
        """Ends a running stream; its last output says ``"abort"``. Nothing happens if there is no such stream."""
        if not self.engine.abort(request_id):
            for drafting in list(self._drafting):
                drafting.is_aborted |= drafting.request_id == request_id

    @property
    def is_healthy(self) -> bool:
        """Whether the engine takes requests: it was not closed and its loop has not failed."""
        return self.engine.is_healthy

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of prompts and answers, or None."""
        tokenizer: PreTrainedTokenizerBase | None = self.engine.tokenizer
        return tokenizer

    def stats(self) -> dict[str, Any]:
        """See ``Engine.stats``."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, as when weights have changed; see ``Engine.reset_prefix_cache``."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Ends the engine: running streams raise ``EngineClosedError``, and its memory is freed. Waits."""
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @contextmanager
    def _draft_of(self, request_id: str | None) -> Iterator[_Drafting]:
        """Within the block, ``abort`` of this id sets ``is_aborted``."""
        drafting = _Drafting(request_id)
        self._drafting.add(drafting)
        try:
            yield drafting
        finally:
            self._drafting.remove(drafting)

    async def _stream(
        self,
        encode: Callable[[], tuple[str | None, list[int]]],
        num_chars: int,
        params: SamplingParams | None,
        request_id: str | None,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The generator behind ``generate`` and ``chat``; closing it runs its ``finally`` at once."""

        def draft() -> tuple[str | None, list[int], Draft]:
            text, token_ids = encode()
            return text, token_ids, self.engine.draft(token_ids, params, request_id, **options)

        slow = num_chars > _LONG_TEXT or is_busy(self.engine.tokenizer) or _takes_a_while(params)
        with self._draft_of(request_id) as drafting:
            text, token_ids, drafted = await asyncio.to_thread(draft) if slow else draft()
        handle = self.engine.enter(drafted, request_id)  # no await before the `try`: a cancellation must abort it
        try:
            if drafting.is_aborted:
                handle.abort()
            if handle.params.output_kind is RequestOutputKind.FINAL_ONLY:
                output = await handle.aresult()
                output.prompt = text
                yield output
                return
            maker = OutputMaker(handle.request_id, text, token_ids, handle.params, self.engine.tokenizer)
            of_prompt, finished = None, False
            while not finished:
                chunks = await handle.anext_chunks()
                if of_prompt is None and handle.params.prompt_logprobs is not None:  # some 10 µs a token
                    of_prompt = await asyncio.to_thread(handle.readable_prompt_logprobs)
                output = maker.add(chunks, handle.metrics, of_prompt)
                finished = output.finished  # read before the consumer can change it
                yield output
        finally:
            handle.abort()  # nothing happens if it has ended


def _takes_a_while(params: SamplingParams | None) -> bool:
    """Whether drafting takes milliseconds, which would block the loop."""
    if not isinstance(params, SamplingParams):
        return False
    if params.structured_outputs or params.bad_words or params.allowed_token_ids or params.n > _MANY_ANSWERS:
        return True
    # Some 1.5 µs a character, and 0.1 µs an id.
    return sum(map(len, params.stop or ())) + len(params.stop_token_ids) > _LONG_TEXT
