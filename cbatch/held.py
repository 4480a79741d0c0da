"""Rows whose next token depends on the host: a grammar or the user's logits processors, given the tokens so far.

    CPU   | plan 2 | land 1, masks 2 | plan 3 | land 2, masks 3 |
    GPU   | step 1, sampled | forward 2          | sample 2 | forward 3 ...

The forward pass of step N+1 needs no mask and is launched before N has landed, as always. Its sampling waits for that.
The state here advances only by landed tokens that count, in order: preemption, late stops and depth do not affect it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.buffers import Masks
from cbatch.errors import CBatchError, described
from cbatch.grammar import Grammars, first_lines
from cbatch.request import RequestHandle, running_processor
from cbatch.sampler import Edit, bit_mask
from cbatch.sampling_checks import num_arguments
from cbatch.sampling_params import SamplingParams
from cbatch.scheduler.plan import Landed, StepPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class HeldRow:
    """The state of one answer: its tokens so far, its grammar and its logits processors."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        start: LLMatcher | None,  # the grammar's initial state
        *,
        eos_token_ids: Sequence[int],
        stop_ids: Collection[int],  # end the answer; forbidden before min_tokens other tokens
        bad_word_ids: Sequence[Sequence[int]],
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.start = start
        self.matcher: LLMatcher | None = None  # advances; copied from ``start`` for the first token, as many may wait
        self.processors = [(processor, num_arguments(processor)) for processor in params.logits_processors or ()]
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ends = bit_mask(eos_token_ids) if eos_token_ids else np.zeros(0, np.int32)
        self._min_tokens = params.min_tokens
        self._bad_word_ids = bad_word_ids
        self._allowed = None if params.allowed_token_ids is None else bit_mask(params.allowed_token_ids)
        self._stops = bit_mask(stop_ids) if stop_ids and params.min_tokens else None
        self._has_ended = False  # the grammar has; under ignore_eos only more ends of sequence can follow
        self.mask_has_0 = False  # whether the last mask allows token 0
        self.has_failed = False  # later tokens do not count

    def copy(self) -> HeldRow:
        """The same for another answer to the prompt. They share what does not change."""
        other = copy.copy(self)
        other.token_ids = []
        return other

    def accept(self, token: int, first_logit: float) -> None:
        """Append a token. ``first_logit``: token 0's after the processors. Raises ValueError if it is not allowed here.

        From logits that are all -inf the device draws token 0; any other token is allowed.
        """
        if token == 0:
            is_grammar = self.matcher is not None
            is_allowed = self.mask_has_0 if is_grammar else not self._is_forbidden(0)
            if not is_allowed or (self.processors and first_logit == -math.inf):
                who = "logits_processors" if self.processors else "the model"
                others = "the grammar allows" if is_grammar else "the other parameters allow"
                raise ValueError(f"{who} left no token that {others} here")
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
        """Clear the bits of a grammar's mask ``[words]`` that other parameters forbid. ValueError if none is left.

        If the grammar allows only ends of sequence, they stay, even if other parameters forbid them.
        """
        if self._has_ended:
            mask[:] = 0
            mask[: self._ends.size] = self._ends
        elif self.matcher is not None and self.matcher.is_error():
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
    """Whether ``bits``, perhaps of fewer words, has every bit of the mask."""
    return not (mask[bits.size :].any() or (mask[: bits.size] & ~bits).any())


class Held:
    """Accepts landed tokens, and prepares the sampling of held steps.

    Runs on the engine's thread; on the CPU, logits processors run on the lane's, before their step has landed.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._failed: list[tuple[RequestHandle, CBatchError]] = []

    def accept(self, landed: Landed, area: Masks) -> list[tuple[RequestHandle, CBatchError]]:
        """Accept the tokens of a step with held rows. Returns the requests that failed, and their errors.

        The caller delivers the errors after all earlier tokens: a stop string in those ends the request first.
        """
        rows = range(landed.tokens.size) if landed.rows is None else landed.rows.tolist()
        first_logits = area.first_logits.numpy()
        for row, sequence, token in zip(rows, landed.sequences.tolist(), landed.tokens.tolist(), strict=True):
            if (held := _running(sequence.payload)) is not None:
                try:
                    held.accept(token, float(first_logits[row]))
                except ValueError as error:
                    self._fail(sequence.payload, held, str(error))
        failed, self._failed = self._failed, []
        return failed

    def prepare(self, plan: StepPlan, area: Masks) -> tuple[int, list[Edit]]:
        """Write a step's masks, after all earlier steps have landed. Returns how many, and the edits of its logits.

        Rows of ended sequences and of failed requests get none: their tokens are dropped.
        """
        rows: list[tuple[RequestHandle, HeldRow, LLMatcher, int]] = []
        edits: list[Edit] = []
        columns = plan.sequences.tolist(), plan.epochs.tolist(), plan.slots.tolist()
        for row, (sequence, epoch, slot) in enumerate(zip(*columns, strict=True)):
            handle: RequestHandle = sequence.payload
            if sequence.epoch != epoch or (held := _running(handle)) is None:
                continue
            if held.start is not None:
                if held.matcher is None:
                    held.matcher = held.start.deep_copy()
                rows.append((handle, held, held.matcher, slot))
            if held.processors:
                edits.append((row, partial(self._process, handle, held, area.first_logits[row])))
        return (self._write_masks(rows, area) if rows else 0), edits

    def _write_masks(self, rows: list[tuple[RequestHandle, HeldRow, LLMatcher, int]], area: Masks) -> int:
        """Write the masks without gaps; a row that fails has none."""
        masks, num_words = area.masks, area.masks.shape[1]
        if num_words != self._grammars.num_words:  # the tokenizer has more tokens than the model
            masks = np.empty((len(rows), self._grammars.num_words), np.int32)
        self._grammars.fill([(matcher, i) for i, (_, _, matcher, _) in enumerate(rows)], masks)
        count = 0
        for i, (handle, held, _, slot) in enumerate(rows):
            mask = masks[i, :num_words]
            try:
                held.narrow(mask)
                held.mask_has_0 = _has(mask, 0)
            except ValueError as error:
                self._fail(handle, held, f"structured_outputs: {error}")
                continue
            area.slots[count] = slot
            if masks is not area.masks or count < i:
                area.masks[count] = mask
            count += 1
        return count

    def _process(self, handle: RequestHandle, held: HeldRow, first_logit: Tensor, row: Tensor) -> None:
        """Apply the request's logits processors to a row of logits; an error there ends this request alone.

        Token 0's new logit goes to ``first_logit``, which lands with the step.
        """
        # A copy, since processors may change it in place and then fail.
        logits = row.to(torch.float32, copy=True)
        number, running_processor.on_end = 0, handle._on_end
        try:
            for number, (processor, count) in enumerate(held.processors):  # noqa: B007 - the error below names it
                arguments = (list(held.prompt_token_ids), list(held.token_ids))[3 - count :]
                logits = _checked(processor(*arguments, logits), row)
            row.copy_(logits)  # raises for a sparse tensor and others that pass the check
            first_logit.copy_(row[0].float(), non_blocking=True)
        except BaseException as cause:  # the user's code; a panic in an extension is no Exception
            self._fail(handle, held, f"logits_processors[{number}] failed: {described(cause)}", cause)
        finally:
            running_processor.on_end = None

    def _fail(self, handle: RequestHandle, held: HeldRow, message: str, cause: BaseException | None = None) -> None:
        error = CBatchError(f"request {handle.request_id}: {message}")
        error.__cause__ = cause
        held.has_failed = True
        self._failed.append((handle, error))


def _running(handle: RequestHandle) -> HeldRow | None:
    """The state of a held request that has neither ended nor failed; None for any other."""
    held = handle.held
    return None if held is None or held.has_failed or handle.finished else held


def _checked(logits: object, row: Tensor) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"it returned a {type(logits).__name__}, not a tensor")
    if logits.shape != row.shape or not logits.is_floating_point() or logits.device != row.device:
        raise ValueError(
            f"it returned {logits.dtype} {list(logits.shape)} on {logits.device}, not floats {list(row.shape)} on "
            f"{row.device}"
        )
    return logits
