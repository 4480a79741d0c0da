"""A running request as its consumer sees it. Threads and event loops may wait on it, read it or abort it.

The engine's delivery thread pushes the tokens and looks for stop strings. A slow consumer does not delay the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from cbatch.detokenizer import Detokenizer, TextUntilStop
from cbatch.errors import CBatchError
from cbatch.output_maker import TokenLogprobs, cumulative_logprob, make_logprobs
from cbatch.outputs import Chunk, CompletionOutput, Logprob, RequestMetrics, RequestOutput
from cbatch.prompt_logprobs import PromptLogprobs
from cbatch.sampler import SlotUpload
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cbatch.held import HeldRow

# While a thread runs a logits processor, ``on_end`` is that of its engine's handles, which identifies the engine.
running_processor = threading.local()

_PATIENCE_S = 0.1  # how long an abort waits for another thread that is ending the request


class RequestHandle:
    """One request: iterate over its tokens (``for``, ``async for``), or take chunks, or wait for the ``result``.

    Tokens and chunks have one reader at a time; ``result`` may be called from any thread, any number of times.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        on_end: Callable[[RequestHandle, bool], None],
        text: TextUntilStop | None = None,
        parent_id: str | None = None,
        index: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """With ``parent_id``, this is answer ``index`` of the request with that id, whose ``n`` is above 1."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.parent_id = request_id if parent_id is None else parent_id
        self.index = index
        self.prompt_logprobs = prompt_logprobs  # of ``n`` answers, only the first has them
        # For the engine:
        self.num_unfinished = 1  # children
        self.sequence: Sequence | None = None
        self.deadline: float | None = None  # in ``time.monotonic``
        self.upload: SlotUpload | None = None
        self.held: HeldRow | None = None
        self._metrics = RequestMetrics()
        self._tokenizer = tokenizer
        self._on_end = on_end  # called once, before a consumer sees the end, with whether it is an abort
        self._text = text  # only with stop strings: the delivery thread needs it. Else the consumer decodes
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # one per token, if the request wants them
        self._num_read = 0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: CBatchError | None = None
        self._ending = threading.Lock()  # the first to end the request acquires it and keeps it; nothing waits for it
        self._end_read = False
        self._lock = threading.RLock()  # reentrant: the garbage collector may abort a request inside any statement here
        # Readers wait for new tokens or the end, result waiters for the end alone. Each thread waits on its own lock,
        # which is released to wake it.
        self._readers: list[threading.Lock] = []
        self._result_waiters: list[threading.Lock] = []
        self._async_waiters: list[Waiter] = []
        self._async_result_waiters: list[Waiter] = []

    # ---- the consumer's side

    @property
    def children(self) -> tuple[RequestHandle, ...]:
        """A handle for each of the ``n`` answers; itself if ``n`` is 1. Each is read and aborted separately."""
        return (self,)

    @property
    def metrics(self) -> RequestMetrics:
        return self._metrics

    @property
    def finished(self) -> bool:
        """Whether the last token is here, or the request was aborted or failed."""
        return self._finish_reason is not None or self._error is not None

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"abort"``, ``"timeout"``, ``"error"`` (reading raises it), or None: it runs."""
        return "error" if self._error is not None else self._finish_reason

    def next_chunk(self, timeout: float | None = None) -> Chunk:
        """Wait for new tokens or the end, and take them.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds; the request goes on.
            EngineDeadError, EngineClosedError: the engine ended before the request did.
            EOFError: the chunk with the end was already taken.
        """
        if not self._wait(self._ready, self._readers, timeout):
            raise TimeoutError(f"request {self.request_id}: no token within {timeout} s")
        return self._take()

    async def anext_chunk(self) -> Chunk:
        """``next_chunk`` for an event loop: suspends the task, never blocks the loop."""
        await until_ready([self])
        return self._take()

    async def anext_chunks(self) -> list[tuple[int, Chunk]]:
        """``anext_chunk`` over all answers: waits until one has news, and returns index and chunk of each that has."""
        return [(self.index, await self.anext_chunk())]

    def __iter__(self) -> Iterator[int]:
        while not self._end_read or self._error is not None:
            yield from self.next_chunk().token_ids

    async def __aiter__(self) -> AsyncIterator[int]:
        while not self._end_read or self._error is not None:
            for token in (await self.anext_chunk()).token_ids:
                yield token

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return everything, with text if the engine has a tokenizer. Takes no chunk.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds; the request goes on.
            EngineDeadError, EngineClosedError: the engine ended before the request did.
        """
        if not self._wait_for_end(timeout):
            raise TimeoutError(f"request {self.request_id}: not finished within {timeout} s")
        answers = self._answers()
        prompt_logprobs = self.readable_prompt_logprobs()
        return RequestOutput(
            self.request_id, None, list(self.prompt_token_ids), answers, True, self.metrics, prompt_logprobs
        )

    async def aresult(self) -> RequestOutput:
        """``result`` for an event loop: woken at the end of each answer, not at its tokens; at once if one fails.

        Another thread makes it: log-probabilities of a long answer take some 0.1 s.
        """
        ends: list[asyncio.Future[None]] = []
        try:
            for child in self.children:
                ends.append(asyncio.ensure_future(child._until_end()))
                if len(ends) % 64 == 0:  # which take some 1 ms; 16,384 at once held up the loop for 0.6 s
                    await asyncio.sleep(0)
            await asyncio.gather(*ends)
        finally:
            for end in ends:
                end.cancel()
        return await asyncio.to_thread(self.result)

    async def _until_end(self) -> None:
        """Raises the error that it ended with, if any."""
        await _until(lambda: self.finished, [(self, self._async_result_waiters)])
        if self._error is not None:
            raise self._error.with_traceback(None)

    def readable_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As in ``RequestOutput``; None until all have landed, or if none are wanted."""
        first = self.children[0]
        if first.prompt_logprobs is None:
            return None
        return first.prompt_logprobs.make(first._tokenizer if first.params.detokenize else None)

    def abort(self) -> None:
        """End it now, from any thread; the last chunk says ``"abort"``. Nothing happens if it has ended."""
        self._end_now("abort", None, aborted=True)

    def expire(self) -> None:
        """``abort`` after ``timeout_s``: the last chunk says ``"timeout"``."""
        self._end_now("timeout", None, aborted=True)

    def _wait_for_end(self, timeout: float | None) -> bool:
        return self._wait(lambda: self.finished, self._result_waiters, timeout)

    def _answers(self) -> list[CompletionOutput]:
        return [child._answer() for child in self.children]

    def _answer(self) -> CompletionOutput:
        """The whole answer, after its end. Raises the error that it ended with, if any."""
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            token_ids = list(self._token_ids)
            text = "" if self._text is None else self._shown(self._text).text
        output = CompletionOutput(self.index, text, token_ids, self._finish_reason, self._stop_reason)
        if self._text is None and self._tokenizer is not None and self.params.detokenize:
            detokenizer = Detokenizer(self._tokenizer, self.prompt_token_ids, self.params)
            output.text = detokenizer.push(token_ids, self._finish_reason)
        if self.params.logprobs is not None:
            output.logprobs = self._readable(self._logprobs)
            output.cumulative_logprob = cumulative_logprob(token_ids, output.logprobs)
        return output

    def _readable(self, found: list[TokenLogprobs]) -> list[dict[int, Logprob]]:
        return make_logprobs(found, self._tokenizer if self.params.detokenize else None)

    def _wait(self, ready: Callable[[], bool], waiters: list[threading.Lock], timeout: float | None) -> bool:
        """Block until ``ready``; False if that takes longer than ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if ready():
                    return True
                self._check_waiter()
                waiter = threading.Lock()
                waiter.acquire()
                waiters.append(waiter)
            left = -1.0 if deadline is None else min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if not waiter.acquire(timeout=left):
                with self._lock:
                    if waiter in waiters:
                        waiters.remove(waiter)
                    return ready()

    def _check_waiter(self) -> None:
        """Raise CBatchError in a logits processor of its own engine: what that waits for would never come."""
        if getattr(running_processor, "on_end", None) == self._on_end:
            raise CBatchError(
                f"request {self.request_id}: a logits processor waits for it, while its engine waits for the processor"
            )

    def _ready(self) -> bool:
        return self._num_read < len(self._token_ids) or self.finished

    def _shown(self, text: TextUntilStop) -> TextUntilStop:
        """The text. An abort comes without a token, so what was held back is flushed here."""
        if self._finish_reason in ("abort", "timeout"):
            text.push((), self._finish_reason)
        return text

    def _take(self) -> Chunk:
        with self._lock:
            text = None if self._text is None else self._shown(self._text).take()
            tokens = self._token_ids[self._num_read :]
            logprobs = self._logprobs[self._num_read :]
            self._num_read = len(self._token_ids)
            if self._error is not None and not tokens:
                self._end_read = True
                raise self._error.with_traceback(None)
            if self._end_read:
                raise EOFError(f"request {self.request_id}: has ended, and its last chunk was taken")
            self._end_read = self._finish_reason is not None
            chunk = Chunk(tokens, self._finish_reason, self._stop_reason, text)
        return chunk if self.params.logprobs is None else chunk._replace(logprobs=self._readable(logprobs))

    # ---- the engine's side

    def push(
        self,
        token: int,
        now: float,
        finish_reason: str | None,
        stop_reason: int | str | None,
        wakers: Wakers,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Append a token, and end the request if ``finish_reason`` is given. Ignored after the end."""
        with self._lock:
            if self.finished:
                return
            self._token_ids.append(token)
            wakers.num_taken += 1  # under the lock: who has read a token finds it counted
            if logprobs is not None:
                self._logprobs.append(logprobs)
            urgent = self.metrics.first_token_time is None
            if urgent:
                self.metrics.first_token_time = now
            if self._text is not None:
                self._look_for_stop(self._text, token, now, finish_reason)
            if finish_reason is not None and not self.finished:
                self._end(finish_reason, stop_reason, None, now, aborted=False)
            self._wake(wakers, urgent)

    def _look_for_stop(self, text: TextUntilStop, token: int, now: float, finish_reason: str | None) -> None:
        """End the request if this token completes a stop string, or if the tokenizer fails on it.

        Unless the scheduler has ended the sequence itself, it gets an abort.
        """
        running, found, error = finish_reason is None, None, None
        try:
            found = text.push((token,), finish_reason)
        except CBatchError as failure:
            error = CBatchError(f"request {self.request_id}: {failure}")
            error.__cause__ = failure.__cause__
        if self.finished:  # the garbage collector aborted it during the push
            return
        if error is not None:
            self._end(None, None, error, now, aborted=running)
        elif found is not None:
            self._end("stop", found, None, now, aborted=running)

    def fail(self, error: CBatchError, *, aborted: bool = False) -> None:
        """End it with an error that the consumer's next read raises; ``aborted``: tell the scheduler too."""
        self._end_now(None, error, aborted=aborted)

    def forget(self, error: CBatchError) -> None:
        """In a forked child, where no thread pushes tokens or releases the inherited lock: reading raises ``error``."""
        self._lock = threading.RLock()
        if not self.finished:
            self._error = error

    def _end_now(self, finish_reason: str | None, error: CBatchError | None, *, aborted: bool) -> None:
        wakers = Wakers()
        if self._ending.acquire(blocking=False):
            try:
                with self._lock:
                    self._end(finish_reason, None, error, time.monotonic(), aborted=aborted, claimed=True)
                    self._wake(wakers)
            except BaseException:  # Ctrl-C
                if not self.finished:
                    self._ending.release()
                raise
            wakers.wake()
        elif self._lock.acquire(timeout=_PATIENCE_S):
            # The thread that was ending it is done. It may instead wait for the engine's lock, which this thread may
            # hold, since the garbage collector runs finalizers under any lock; hence the timeout.
            self._lock.release()

    def _end(
        self,
        finish_reason: str | None,
        stop_reason: int | str | None,
        error: CBatchError | None,
        now: float,
        *,
        aborted: bool,
        claimed: bool = False,
    ) -> None:
        """End it, unless another thread does. The caller holds ``_lock``; if ``claimed``, ``_ending`` too."""
        if not (claimed or self._ending.acquire(blocking=False)):
            return
        try:
            self._on_end(self, aborted)
        finally:  # Ctrl-C may interrupt on_end
            self.metrics.finished_time = now
            self._stop_reason, self._error, self._finish_reason = stop_reason, error, finish_reason

    def _wake(self, wakers: Wakers, urgent: bool = False) -> None:
        if self._readers:
            (wakers.urgent if urgent or self.finished else wakers.threads).extend(self._readers)
            self._readers.clear()
        if self._result_waiters and self.finished:
            wakers.urgent.extend(self._result_waiters)
            self._result_waiters.clear()
        if self._async_waiters:
            wakers.add(self._async_waiters)
            self._async_waiters.clear()
        if self._async_result_waiters and self.finished:
            wakers.add(self._async_result_waiters)
            self._async_result_waiters.clear()


class WholeHandle(RequestHandle):
    """A request without a token stream of its own: reading one raises, by ``_refuse``."""

    def next_chunk(self, timeout: float | None = None) -> NoReturn:
        self._refuse("next_chunk")

    async def anext_chunk(self) -> NoReturn:
        self._refuse("anext_chunk")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration over its tokens")

    def __aiter__(self) -> NoReturn:
        self._refuse("iteration over its tokens")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError


class ParallelHandle(WholeHandle):
    """A request with ``n`` above 1: its ``result`` and ``abort`` cover all answers; the children have the tokens."""

    def __init__(self, request_id: str, children: tuple[RequestHandle, ...]) -> None:
        first = children[0]
        super().__init__(request_id, first.prompt_token_ids, first.params, None, first._on_end)
        self.num_unfinished = len(children)
        self._children = children

    @property
    def children(self) -> tuple[RequestHandle, ...]:
        return self._children

    @property
    def metrics(self) -> RequestMetrics:
        """The earliest times of its answers, the latest end, and the sums of their counts."""
        each = [child.metrics for child in self._children]

        def first(times: list[float | None]) -> float | None:
            return min((time for time in times if time is not None), default=None)

        return RequestMetrics(
            arrival_time=first([one.arrival_time for one in each]),
            first_scheduled_time=first([one.first_scheduled_time for one in each]),
            first_token_time=first([one.first_token_time for one in each]),
            finished_time=max(one.finished_time or 0.0 for one in each) if self.finished else None,
            num_cached_tokens=sum(one.num_cached_tokens for one in each),
            num_preemptions=sum(one.num_preemptions for one in each),
        )

    @property
    def finished(self) -> bool:
        return all(child.finished for child in self._children)

    @property
    def finish_reason(self) -> NoReturn:
        self._refuse("finish_reason")

    async def anext_chunks(self) -> list[tuple[int, Chunk]]:
        running = [child for child in self._children if not child._end_read]
        if not running:
            raise EOFError(f"request {self.request_id}: all answers have ended, and their last chunks were taken")
        await until_ready(running)
        return [(child.index, child._take()) for child in running if child._ready()]

    def abort(self) -> None:
        """End all answers that still run."""
        for child in self._children:
            child.abort()

    def _wait_for_end(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            child._wait_for_end(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            for child in self._children
        )

    def _refuse(self, what: str) -> NoReturn:
        n = len(self._children)
        raise CBatchError(
            f"request {self.request_id}: {what} is of one answer, but n={n}: each of handle.children has its own"
        )


async def until_ready(handles: list[RequestHandle]) -> None:
    """Suspend the task until one of the handles has tokens or an end to take."""
    queues = [(handle, handle._async_waiters) for handle in handles]
    await _until(lambda: any(handle._ready() for handle in handles), queues)


async def _until(condition: Callable[[], bool], queues: list[tuple[RequestHandle, list[Waiter]]]) -> None:
    """Suspend the task until ``condition``, tested again whenever a handle wakes its list of waiters."""
    while not condition():
        queues[0][0]._check_waiter()  # all are of one engine
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        entries = [(loop, waiter, handle) for handle, _ in queues]
        try:
            for entry, (handle, waiters) in zip(entries, queues, strict=True):
                with handle._lock:
                    waiters.append(entry)
            if not condition():  # a change from here on wakes the waiter
                await waiter
        finally:
            for entry, (handle, waiters) in zip(entries, queues, strict=True):
                with handle._lock:
                    if entry in waiters:
                        waiters.remove(entry)


class Wakers:
    """Collects a step's waiters, then wakes each event loop once, after all tokens have been pushed.

    Waking a thread costs about 40 µs under the interpreter lock, which the engine's loop needs several times a step.
    So at most 4,000 threads a second are woken, in turn, and find several tokens: a single reader wakes for every
    token, each of 64 every 16 ms. First tokens and ends wake at once.
    """

    RATE, BURST = 4000.0, 16.0

    def __init__(self) -> None:
        self.num_taken = 0  # tokens that requests took
        self.urgent: list[threading.Lock] = []
        self.threads: deque[threading.Lock] = deque()
        self._allowance, self._last = self.BURST, 0.0
        self._waiters: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}

    def add(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            self._waiters.setdefault(waiter[0], []).append(waiter)

    def wake(self) -> None:
        """Wake as many as the rate allows. If ``threads`` is not empty afterwards, call again soon."""
        for thread in self.urgent:
            thread.release()
        self.urgent.clear()
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._last) * self.RATE, self.BURST)
        self._last = now
        while self.threads and self._allowance >= 1:
            self._allowance -= 1
            self.threads.popleft().release()
        self._wake_loops()

    def flush(self) -> None:
        """Wake everyone at once."""
        self.urgent.extend(self.threads)
        self.threads.clear()
        self.wake()

    def _wake_loops(self) -> None:
        for loop, waiters in self._waiters.items():
            try:
                loop.call_soon_threadsafe(_resolve, waiters)
            except RuntimeError:  # the loop is closed: its requests have lost their readers
                for _, _, handle in waiters:
                    handle.abort()
        self._waiters.clear()


Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]", RequestHandle]


def _resolve(waiters: list[Waiter]) -> None:
    for _, future, _ in waiters:
        if not future.done():
            future.set_result(None)
