"""Runs beam searches. The beams of a search are sequences that share blocks, and take each step together.

A beam pauses after each token that it samples. When all beams of a search have landed, the search chooses the next
ones: the first that continues a beam takes over its slot, others are forked from it, and beams without continuation are
aborted. Other requests go on as usual meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cbatch.beam_search import BeamSearch, Hypothesis
from cbatch.buffers import Logprobs
from cbatch.detokenizer import Detokenizer
from cbatch.errors import CBatchError
from cbatch.outputs import CompletionOutput
from cbatch.request import RequestHandle, Wakers, WholeHandle
from cbatch.sampler import encode
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from cbatch.scheduler.plan import Landed
from cbatch.scheduler.scheduler import Scheduler
from cbatch.scheduler.sequence import Sequence, Status
from cbatch.tokenizer import decode

# The sampled token is ignored: the search chooses by the log-probabilities that land with it.
_GREEDY = SamplingParams(temperature=0.0, logprobs=0)
# Steps without a beam of a search, until its landed beams make room for those that wait. Not tuned: ten beams in 8
# slots beside a request of 1,900 tokens took 5.7 s without it on a CPU, and 1.6 with it.
_PATIENCE = 8
_STATE = encode(_GREEDY, 0, prompt_len=1, stop_ids=(), bad_word_ids=())


class BeamHandle(WholeHandle):
    """A beam search: wait for its ``result``, or abort it. All its answers come at its end."""

    sequence: Sequence  # kept after the end, unlike other requests': the search still uses it

    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        params: BeamSearchParams,
        tokenizer: Any,
        on_end: Callable[[RequestHandle, bool], None],
        search: BeamSearch,
    ) -> None:
        super().__init__(request_id, prompt.tolist(), _GREEDY, tokenizer, on_end)
        self.beam_params = params
        self.prompt = prompt
        self.search = search
        self._found: list[Hypothesis] | None = None

    def finish(self, found: list[Hypothesis], now: float, wakers: Wakers) -> None:
        """The end, for the delivery thread; dropped if the request was aborted meanwhile."""
        with self._lock:
            if self.finished:
                return
            if found:
                self._found = found
                wakers.num_taken += sum(len(one.token_ids) for one in found)
                self.metrics.first_token_time = now
                self._end(found[0].finish_reason, None, None, now, aborted=False)
            else:
                error = CBatchError(
                    f"request {self.request_id}: no beam goes on, since the model's logits are not finite"
                )
                self._end(None, None, error, now, aborted=False)
            self._wake(wakers)

    def _answers(self) -> list[CompletionOutput]:
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._found is None:  # it was aborted, or its time was over
                return [CompletionOutput(0, "", [], self._finish_reason)]
            found = self._found
        return [self._readable_answer(index, one) for index, one in enumerate(found)]

    def _readable_answer(self, index: int, found: Hypothesis) -> CompletionOutput:
        text = ""
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, self.prompt_token_ids, self.params)
            text = detokenizer.push(found.token_ids, found.finish_reason)
            if found.finish_reason == "stop" and self.beam_params.include_stop_str_in_output:
                text += decode(self._tokenizer, found.token_ids[-1:])
        answer = CompletionOutput(index, text, found.token_ids.copy(), found.finish_reason)
        answer.cumulative_logprob, answer.score = found.logprob, found.score
        return answer

    async def anext_chunks(self) -> NoReturn:
        self._refuse("anext_chunks")

    def _refuse(self, what: str) -> NoReturn:
        raise CBatchError(f"request {self.request_id}: a beam search has no {what}: its result comes at its end")


class Beams:
    """The running searches. For the engine's thread only; the scheduler knows nothing of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: dict[BeamHandle, _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def start(self, handle: BeamHandle) -> None:
        self._groups[handle] = _Group(handle, self._scheduler)

    def abort(self, handle: BeamHandle) -> None:
        if group := self._groups.pop(handle, None):
            group.end()

    def land(
        self, landed: Landed, logprobs: Logprobs | None
    ) -> tuple[Landed, Logprobs | None, list[tuple[BeamHandle, list[Hypothesis]]]]:
        """Take the rows of beams out of what has landed, and advance the searches all of whose beams have landed.

        Returns the other rows with their log-probabilities, and the searches that are over with what they found.
        """
        owners = [self._groups.get(sequence.payload) for sequence in landed.sequences.tolist()]
        others = np.array([owner is None for owner in owners], np.bool_)
        if others.all():
            return landed, logprobs, []
        assert logprobs is not None
        for row, owner in enumerate(owners):
            if owner is not None:
                owner.take(landed.sequences[row], logprobs.ids[row, 1:], logprobs.values[row, 1:])
        over = []
        for group in dict.fromkeys(owner for owner in owners if owner is not None):
            if group.is_complete and not group.advance():
                over.append((group.handle, group.handle.search.finished))
                self.abort(group.handle)
        landed = replace(landed, sequences=landed.sequences[others], tokens=landed.tokens[others])
        return landed, logprobs.of(others), over

    def note_step(self) -> None:
        """Call before each plan. Landed beams may hold the blocks that other beams of their search wait for, while
        other requests or searches leave none free for long; then the landed ones make room.
        """
        for group in self._groups.values():
            group.num_steps_without += 1
        for group in self._groups.values():
            if group.num_steps_without > _PATIENCE and group.waits_for_room and group.make_room():
                break

    def make_room(self) -> bool:
        """Release the slots and blocks of one search's landed beams, since nothing else can run; False if none has any.

        Their log-probabilities are kept, so only those that the search goes on with are computed again.
        """
        return any(group.make_room() for group in self._groups.values())


class _Group:
    """The beams of one search, in the search's order."""

    def __init__(self, handle: BeamHandle, scheduler: Scheduler) -> None:
        self.handle, self._scheduler = handle, scheduler
        self._beams = [handle.sequence]
        self._records: list[tuple[NDArray[np.int32], NDArray[np.float32]] | None] = [None]
        self._epochs = [0]  # of the beams' stays in their slots when they landed
        self.num_steps_without = 0  # planned since a beam has landed
        # Later beams rank right behind the first one, before all requests that came later; no number is used twice.
        most_steps = handle.sequence.max_len - len(handle.prompt)
        scheduler.add(handle.sequence, num_followers=handle.beam_params.beam_width * most_steps)
        self._arrivals = itertools.count(handle.sequence.arrival + 1)

    @property
    def is_complete(self) -> bool:
        return None not in self._records

    @property
    def waits_for_room(self) -> bool:
        """Whether all its beams have landed or are in the queue."""
        return all(
            record is not None or beam.status is Status.WAITING
            for beam, record in zip(self._beams, self._records, strict=True)
        )

    def take(self, beam: Sequence, ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        self.num_steps_without = 0
        index = self._beams.index(beam)
        if self._records[index] is None:  # else it was preempted since, and computed once more
            count = self.handle.search.num_candidates
            self._records[index] = ids[:count], values[:count]
            self._epochs[index] = beam.epoch

    def advance(self) -> bool:
        """One step of the search; False when it is over."""
        handle, scheduler = self.handle, self._scheduler
        ids, values = zip(*(record for record in self._records if record is not None), strict=True)
        chosen = handle.search.advance(np.stack(ids), np.stack(values))
        if not chosen:
            return False
        heirs: dict[int, int] = {}  # beam -> the first that continues it
        for child, (parent, _) in enumerate(chosen):
            heirs.setdefault(parent, child)
        for index, beam in enumerate(self._beams):  # before the forks, which need slots and blocks
            if index not in heirs or not self._pauses(index):
                scheduler.abort(beam)
        new: list[Sequence] = []
        for child, (parent, token) in enumerate(chosen):
            if heirs[parent] == child and self._pauses(parent):
                scheduler.unpause(self._beams[parent], token)
                new.append(self._beams[parent])
            else:
                new.append(self._branch(parent, handle.search.beams[child]))
        self._beams, self._records, self._epochs = new, [None] * len(new), [0] * len(new)
        return True

    def end(self) -> None:
        for beam in self._beams:
            self._scheduler.abort(beam)

    def make_room(self) -> bool:
        landed = [beam for beam, record in zip(self._beams, self._records, strict=True) if record is not None]
        kept = [beam for beam in landed if beam.status is not Status.FINISHED]  # one may have been preempted since
        for beam in kept:
            self._scheduler.abort(beam)
        return bool(kept)

    def _pauses(self, index: int) -> bool:
        """Whether a beam is still in the slot in which it landed."""
        beam = self._beams[index]
        return beam.slot >= 0 and beam.epoch == self._epochs[index]

    def _branch(self, parent: int, tokens: list[int]) -> Sequence:
        root = self.handle.sequence
        known = np.concatenate([self.handle.prompt, np.array(tokens, np.int32)])
        child = beam_sequence(self.handle, known, root.max_len, root.priority, root.cache_salt)
        child.arrival = next(self._arrivals)
        if not (self._pauses(parent) and self._scheduler.fork(self._beams[parent], child)):
            self._scheduler.add(child)
        return child


def beam_sequence(
    handle: BeamHandle, known: NDArray[np.int32], max_len: int, priority: int, cache_salt: bytes
) -> Sequence:
    """A new beam with these ``known`` tokens, the prompt's included."""
    return Sequence(
        known,
        max_len,
        param_values=_STATE.param_values,
        flags=_STATE.flags,
        priority=priority,
        cache_salt=cache_salt,
        pauses=True,
        payload=handle,
    )
