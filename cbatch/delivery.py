"""Owns the thread that delivers results, so that the engine's loop never waits for a consumer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbatch.beam_search import Hypothesis
from cbatch.beams import BeamHandle
from cbatch.buffers import Logprobs
from cbatch.errors import CBatchError
from cbatch.prompt_logprobs import PromptLogprobs
from cbatch.request import RequestHandle, Wakers
from cbatch.scheduler.plan import Landed
from cbatch.streams import THREAD_PREFIX


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """A landed step's results for consumers."""

    landed: Landed
    logprobs: Logprobs | None  # of the landed tokens
    prompts: Iterable[tuple[PromptLogprobs, NDArray[np.int32]]]  # with the records of a part of the prompt
    beams: Iterable[tuple[BeamHandle, list[Hypothesis]]]  # finished searches, with their answers
    failed: Iterable[tuple[RequestHandle, CBatchError]]  # requests whose tokens in ``landed`` do not count


class Delivery:
    """``put`` returns at once; its thread delivers results in order."""

    def __init__(self, vocab_size: int, failed: Callable[[BaseException], None]) -> None:
        """``failed`` is called if an exception ends the thread, which would leave all consumers waiting."""
        self._vocab_size, self._failed = vocab_size, failed
        self.num_dropped = 0  # tokens that landed behind a request's end: a stop string, an abort, an error
        self._wakers = Wakers()
        self._outbox: queue.SimpleQueue[tuple[Results, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hand_out, name=f"{THREAD_PREFIX}delivery", daemon=True)

    @property
    def num_given(self) -> int:
        """Tokens that requests took."""
        return self._wakers.num_taken

    def start(self) -> None:
        self._thread.start()

    def put(self, results: Results) -> None:
        self._outbox.put((results, time.monotonic()))

    def close(self) -> None:
        """Wait until everything has been delivered."""
        self._outbox.put(None)
        if self._thread.ident is not None:  # its start may have failed
            self._thread.join()

    def _hand_out(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._push(*batch)
                del batch
        except BaseException as error:
            self._failed(error)
        finally:
            self._wakers.flush()

    def _next_batch(self) -> tuple[Results, float] | None:
        """Wait for the next results, and meanwhile wake consumers at ``Wakers``' rate."""
        while True:
            try:
                return self._outbox.get(timeout=0.004 if self._wakers.threads else None)
            except queue.Empty:
                self._wakers.wake()

    def _push(self, results: Results, now: float) -> None:
        wakers = self._wakers
        for owner, records in results.prompts:  # first: they must be there when the first token is read
            owner.add(records)
        for search, found in results.beams:
            search.finish(found, now, wakers)
        for failed, error in results.failed:
            failed.fail(error, aborted=True)
        landed = results.landed
        ends = {id(finish.sequence): finish for finish in landed.finished}
        before = wakers.num_taken
        for row, (sequence, token) in enumerate(zip(landed.sequences.tolist(), landed.tokens.tolist(), strict=True)):
            handle: RequestHandle = sequence.payload
            if not token and (allowed := handle.params.allowed_token_ids) is not None and 0 not in allowed:
                why = "the model's logits of all allowed_token_ids are -inf"  # of which the device draws token 0
                handle.fail(CBatchError(f"request {handle.request_id}: {why}"), aborted=True)
                continue
            own = None
            if results.logprobs is not None and (wanted := handle.params.logprobs) is not None:
                ids, values, ranks = results.logprobs
                count = min(1 + wanted, 1 + self._vocab_size)
                own = ids[row, :count].tolist(), values[row, :count].tolist(), int(ranks[row])
            if finish := ends.get(id(sequence)):
                # vLLM's rule: stop_reason is the entry of stop_token_ids, and None for the model's end of sequence.
                reason = finish.stop_token_id if finish.stop_token_id in handle.params.stop_token_ids else None
                handle.push(token, now, finish.reason, reason, wakers, own)
            else:
                handle.push(token, now, None, None, wakers, own)
        self.num_dropped += landed.tokens.size - (wakers.num_taken - before)
        wakers.wake()
