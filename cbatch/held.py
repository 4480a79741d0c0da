"""Rows that the host has a say in: a grammar, or functions of the user's, decide by the tokens so far.

    CPU   | plan 2 | land 1, masks 2 | plan 3 | land 2, masks 3 |
    GPU   | step 1, sampled | forward 2          | sample 2 | forward 3 ...

The forward pass of step N+1 needs no mask and is launched before N has landed, as always. Its sampling is held back
until then. What is kept here of an answer grows by landed tokens that count, in their order, and by nothing else: so
preemption, a stop that is seen late and any depth change nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.buffers import Masks
from cbatch.errors import CBatchError, described
from cbatch.grammar import Grammars, first_lines
from cbatch.request import RequestHandle, running_processor
from cbatch.sampler import HELD, Edit, bit_mask
from cbatch.sampling_checks import num_arguments
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.plan import Landed, StepPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class HeldRow:
    """One answer of this kind: its tokens so far, and what decides about the next."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        matcher: LLMatcher | None,
        *,
        eos_token_ids: Sequence[int],
        stop_ids: Sequence[int],  # end the answer, and cannot come before min_tokens others have
        bad_word_ids: Sequence[Sequence[int]],
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.matcher = matcher
        self.is_forced = params.structured_outputs is not None and params.structured_outputs.grammar is None
        self.processors = [(processor, num_arguments(processor)) for processor in params.logits_processors or ()]
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ends = bit_mask(eos_token_ids) if eos_token_ids else np.zeros(0, np.int32)
        self._min_tokens = params.min_tokens
        self._bad_word_ids = bad_word_ids
        self._allowed = None if params.allowed_token_ids is None else bit_mask(params.allowed_token_ids)
        self._stops = bit_mask(stop_ids) if stop_ids and params.min_tokens else None
        self._has_ended = False  # with an end of sequence that is ignored: only more of them can follow
        self.mask_has_0 = False  # whether the last mask allows token 0
        self.has_failed = False  # what comes of it from then on counts no more

    def accept(self, token: int, first_logit: float) -> None:
        """One more token, and what the functions made of token 0's logit. Raises ValueError if it may not stand here.

        Of logits that are all -inf the device makes token 0; any other is one that may.
        """
        if token == 0 and self.processors:
            is_grammar = self.matcher is not None
            is_allowed = self.mask_has_0 if is_grammar else not self._is_forbidden(0)
            if first_logit == -math.inf or not is_allowed:
                others = "the grammar allows" if is_grammar else "the other parameters allow"
                raise ValueError(f"logits_processors left no token that {others} here")
        self.token_ids.append(token)
        if self.matcher is None or self._has_ended:
            return
        if token in self._eos_token_ids:
            self._has_ended = True
        elif not self.matcher.consume_token(token):
            why = first_lines(self.matcher.get_error())
            raise ValueError(f"structured_outputs: the grammar does not go on behind token {token}: {why}")

    def _is_forbidden(self, token: int) -> bool:
        return (
            (self._allowed is not None and not _has(self._allowed, token))
            or (self._stops is not None and len(self.token_ids) < self._min_tokens and _has(self._stops, token))
            or any(token == word[-1] and self._ends_with(word[:-1]) for word in self._bad_word_ids)
        )

    def _ends_with(self, beginning: Sequence[int]) -> bool:
        return not beginning or tuple(self.token_ids[-len(beginning) :]) == tuple(beginning)

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Leave in a grammar's mask ``[words]`` what the other parameters allow. Raises ValueError if that is nothing.

        An end of sequence stays where it is all that the grammar allows, whatever the others say.
        """
        assert self.matcher is not None
        if self._has_ended:
            mask[:] = 0
            mask[: self._ends.size] = self._ends
        elif self.matcher.is_error():
            raise ValueError(first_lines(self.matcher.get_error()))
        if mask.any() and _is_within(mask, self._ends):
            return
        if self._allowed is not None:
            mask[: self._allowed.size] &= self._allowed
            mask[self._allowed.size :] = 0
        for word in self._bad_word_ids:
            if self._ends_with(word[:-1]):
                mask[word[-1] // 32] &= ~_BITS[word[-1] % 32]
        early = len(self.token_ids) < self._min_tokens
        if early and self._stops is not None and not _is_within(mask, self._stops):
            mask[: self._stops.size] &= ~self._stops
        if not mask.any():
            raise ValueError("no token that the grammar allows here is left by allowed_token_ids and bad_words")


def _has(bits: NDArray[np.int32], token: int) -> bool:
    return token // 32 < bits.size and bool(bits[token // 32] & _BITS[token % 32])


def _is_within(mask: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
    """Whether a mask has no other bits than these, which may be fewer words."""
    return not (mask[bits.size :].any() or (mask[: bits.size] & ~bits).any())


class Held:
    """Takes landed tokens in, and prepares the second half of a step.

    Runs on the engine's thread; on the CPU the user's functions run on the lane's, before their step has landed.
    """

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._failed: list[tuple[RequestHandle, CBatchError]] = []

    def accept(self, landed: Landed, area: Masks) -> list[tuple[RequestHandle, CBatchError]]:
        """The tokens of a step some row of which is held. Returns the requests that have failed in it, and why.

        They are to hear of it behind the tokens of the steps before: a stop string may be found in these, which was
        the end.
        """
        rows = range(landed.tokens.size) if landed.rows is None else landed.rows.tolist()
        first_logits = area.first_logits.numpy()
        for row, sequence, token in zip(rows, landed.sequences.tolist(), landed.tokens.tolist(), strict=True):
            if sequence.flags & HELD and _goes_on(sequence.payload):
                try:
                    sequence.payload.held.accept(token, float(first_logits[row]))
                except ValueError as error:
                    self._fail(sequence.payload, str(error))
        failed, self._failed = self._failed, []
        return failed

    def prepare(self, plan: StepPlan, area: Masks) -> tuple[int, list[Edit]]:
        """Write the masks of a step before which everything has landed; how many, and the changes of its logits.

        A row of a sequence that has ended meanwhile, or whose request failed, gets nothing: its token will be dropped.
        """
        rows: list[tuple[RequestHandle, int]] = []
        edits: list[Edit] = []
        columns = plan.sequences.tolist(), plan.epochs.tolist(), plan.slots.tolist()
        for row, (sequence, epoch, slot) in enumerate(zip(*columns, strict=True)):
            if not sequence.flags & HELD or sequence.epoch != epoch or not _goes_on(sequence.payload):
                continue
            handle: RequestHandle = sequence.payload
            if handle.held.matcher is not None:
                rows.append((handle, slot))
            if handle.held.processors:
                edits.append((row, partial(self._process, handle, area.first_logits[row])))
        return (self._write_masks(rows, area) if rows else 0), edits

    def _write_masks(self, rows: list[tuple[RequestHandle, int]], area: Masks) -> int:
        """The masks of the rows that have one, without gaps."""
        masks, num_words = area.masks, self._grammars.num_words
        if num_words != self._num_words:  # the tokenizer has more tokens than the model
            masks = np.empty((len(rows), num_words), np.int32)
        self._grammars.fill([(handle.held.matcher, i) for i, (handle, _) in enumerate(rows)], masks)
        count = 0
        for i, (handle, slot) in enumerate(rows):
            mask = masks[i, : self._num_words]
            try:
                if handle.held.is_forced:
                    self._grammars.spell_out(handle.held.matcher, masks[i])
                handle.held.narrow(mask)
                handle.held.mask_has_0 = _has(mask, 0)
            except ValueError as error:
                self._fail(handle, f"structured_outputs: {error}")
                continue
            area.slots[count] = slot
            if masks is not area.masks or count < i:
                area.masks[count] = mask
            count += 1
        return count

    def _process(self, handle: RequestHandle, first_logit: Tensor, row: Tensor) -> None:
        """Put a row of logits through the request's functions; what goes wrong there ends this request alone.

        ``first_logit`` is where the first of what they made of it lands with the step.
        """
        held: HeldRow = handle.held
        # To be changed as they please: ``row`` is whole until they are done.
        logits: Any = row.to(torch.float32, copy=True)
        number, running_processor.on_end = 0, handle._on_end
        try:
            for number, (processor, count) in enumerate(held.processors):  # noqa: B007 - the error below names it
                arguments = (list(held.prompt_token_ids), list(held.token_ids))[3 - count :]
                logits = _checked(processor(*arguments, logits), row)
            row.copy_(logits)  # refuses a sparse one, and what else only looks like floats
            first_logit.copy_(row[0].float(), non_blocking=True)
        except BaseException as cause:  # it is the user's, and a panic in an extension is no Exception
            self._fail(handle, f"logits_processors[{number}] failed: {described(cause)}", cause)
        finally:
            running_processor.on_end = None

    def _fail(self, handle: RequestHandle, message: str, cause: BaseException | None = None) -> None:
        error = CBatchError(f"request {handle.request_id}: {message}")
        error.__cause__ = cause
        handle.held.has_failed = True
        self._failed.append((handle, error))


def _goes_on(handle: RequestHandle) -> bool:
    return not (handle.held.has_failed or handle.finished)


def _checked(logits: Any, row: Tensor) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"it returned a {type(logits).__name__}, not a tensor")
    if logits.shape != row.shape or not logits.is_floating_point() or logits.device != row.device:
        raise ValueError(
            f"it returned {logits.dtype} {list(logits.shape)} on {logits.device}, not floats {list(row.shape)} on "
            f"{row.device}"
        )
    return logits
