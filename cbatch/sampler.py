"""Encodes sampling parameters as int32 words for the device; chooses the operations that begin and end a step there.

The noise is a stateless function of (seed, position, token), so a request draws the same tokens in any batch, on any
schedule and after any preemption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels import reference
from cbatch.kernels import slot_layout as layout
from cbatch.kernels.slot_layout import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIASES
from cbatch.sampling_params import MAX_LOGPROBS, SamplingParams

MIN_TOP_P = 1e-30  # keeps the largest logit only; much less would round to 0, which keeps none
MIN_PENALTY, MAX_PENALTY = 1e-30, 1e30  # of repetition; beyond, logits would overflow float32
MAX_TEMPERATURE = 1e6  # draws uniformly already; times the noise, much more would overflow
NUM_PARAMS = layout.NUM_WORDS  # int32 words of a slot that travel with a step
LOGPROB_WORDS = layout.num_record_words(MAX_LOGPROBS)  # int32 words that come back of a row whose logprobs are wanted
# Flags of a request, OR-ed over a step, which runs only what some row needs. FILTERED never comes without RANDOM.
RANDOM, FILTERED, PROCESSED, LOGPROBS = 1, 2, 4, 8
# HELD: the step samples only after all older tokens have landed, and the host has applied masks and processors. Never
# alone: RANDOM or PROCESSED comes with it, so that what the step's own graph has drawn greedily is drawn again.
HELD = 16


@dataclass(frozen=True, slots=True, eq=False)
class SlotUpload:
    """What ``param_values`` have no room for. ``lists``: the head of the slot's row of lists, as far as it is used."""

    lists: NDArray[np.int32]
    counted: bool  # whether its tokens are counted, for penalties


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A request's sampling state: ``param_values [NUM_PARAMS]``, its flags, and its slot's upload when PROCESSED."""

    param_values: NDArray[np.int32]
    flags: int
    upload: SlotUpload | None

    def with_seed(self, seed: int) -> Encoded:
        """The same for another answer to the prompt: what is uploaded may take milliseconds to make, and is shared."""
        param_values = self.param_values.copy()
        param_values[layout.SEED : layout.SEED + 2] = _seed_words(seed)
        return replace(self, param_values=param_values)


def encode(
    params: SamplingParams,
    seed: int,  # any 64-bit integer
    *,
    prompt_len: int,
    stop_ids: Collection[int],  # cannot come before min_tokens other tokens
    bad_word_ids: Sequence[Sequence[int]],  # none empty
) -> Encoded:
    """A request's sampling state, as its slot keeps it. The caller has checked all ids and the ``MAX_...`` limits."""
    words = np.zeros(NUM_PARAMS, np.int32)
    floats = words.view(np.float32)
    flags = 0
    if not params.greedy:
        temperature = min(params.temperature, MAX_TEMPERATURE)
        margin = temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[layout.TEMPERATURE], floats[layout.TOP_P] = temperature, max(params.top_p, MIN_TOP_P)
        words[layout.TOP_K] = min(params.top_k, 2**31 - 1)
        words[layout.SEED : layout.SEED + 2] = _seed_words(seed)
        floats[layout.MIN_P_MARGIN] = margin
        flags = RANDOM | (FILTERED if params.top_k or params.top_p < 1 or params.min_p > 0 else 0)
    if params.logprobs is not None:
        flags |= LOGPROBS

    if params.logits_processors:
        flags |= HELD | RANDOM
    if params.structured_outputs is not None:
        flags |= HELD

    repetition = min(max(params.repetition_penalty, MIN_PENALTY), MAX_PENALTY)
    penalties = repetition, params.presence_penalty, params.frequency_penalty
    counted = penalties != (1.0, 0.0, 0.0)
    # With a grammar, the mask of each step takes in min_tokens, allowed_token_ids and bad_words (``HeldRow.narrow``),
    # since there an end of sequence may have to come whatever they say.
    masked = params.structured_outputs is not None
    bad_word_ids = () if masked else bad_word_ids
    biases = dict.fromkeys(stop_ids, 0.0) if params.min_tokens and not masked else {}
    until = prompt_len + params.min_tokens  # the first position that a stop token may stand at
    untils = dict.fromkeys(biases, until)
    biases |= dict(params.logit_bias)
    allowed = None if masked else params.allowed_token_ids
    if not (counted or biases or bad_word_ids or allowed is not None or masked):
        return Encoded(words, flags, None)

    floats[layout.REPETITION : layout.FREQUENCY + 1] = penalties
    words[layout.FEATURES] = layout.COUNTED * counted | layout.ALLOWED * (masked or allowed is not None)
    words[layout.NUM_BIASES], words[layout.NUM_BAD_WORDS] = len(biases), len(bad_word_ids)
    mask = bit_mask(allowed) if allowed is not None else np.zeros(0, np.int32)
    ends = [layout.BIASES, layout.BAD_WORDS * bool(biases), layout.MASK * bool(bad_word_ids or mask.size)]
    lists = np.zeros(max(ends) + mask.size, np.int32)
    lists[: layout.BIASES] = -1
    if biases:
        columns = lists[layout.BIASES : layout.BAD_WORDS].reshape(3, MAX_BIASES)[:, : len(biases)]
        columns[0] = list(biases)
        columns[1] = np.array(list(biases.values()), np.float32).view(np.int32)
        columns[2] = [untils.get(token, 0) for token in biases]
    if bad_word_ids:
        rows = lists[layout.BAD_WORDS : layout.MASK].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
        rows[:] = -1
        for row, word in zip(rows, bad_word_ids, strict=False):
            row[-len(word) :] = word
    lists[max(ends) :] = mask
    return Encoded(words, flags | PROCESSED, SlotUpload(lists, counted))


def _seed_words(seed: int) -> NDArray[np.int32]:
    """Its 64 bits, the low ones first. A larger one wraps around."""
    return np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)


def bit_mask(ids: Collection[int]) -> NDArray[np.int32]:
    """Bit i % 32 of word i // 32 for each id, up to the largest one's word."""
    index = np.fromiter(ids, np.int64, len(ids))
    bits = np.zeros((index.max() // 32 + 1) * 32, np.bool_)
    bits[index] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def drawing(flags: int) -> int:
    """The way of sampling that a step with these flags needs: 0 (greedy), RANDOM, RANDOM | FILTERED, or PROCESSED."""
    return PROCESSED if flags & PROCESSED else flags & (RANDOM | FILTERED)


# A row of a step's logits, and what changes it in place before a token is drawn.
Edit = tuple[int, Callable[[Tensor], None]]


@contextmanager
def edited(
    logits: Tensor,  # [num_rows, vocab_size]
    edits: Sequence[Edit],
    flags: int,
) -> Iterator[None]:
    """Edits the logits inside the block. Puts them back afterwards if the flags have LOGPROBS, which reads them."""
    raw = [(row, logits[row].clone()) for row, _ in edits] if flags & LOGPROBS else []
    for row, edit in edits:
        edit(logits[row])
    yield
    for row, values in raw:
        logits[row].copy_(values)


@dataclass(frozen=True)
class StepOps:
    """What a step does besides the model. Signatures and meaning are those in ``reference``; none of them waits."""

    begin_step: Callable[..., Tensor]
    greedy: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    draw: Callable[..., None]
    process_logits: Callable[..., Tensor]
    logprobs: Callable[[Tensor, Tensor, Tensor], None]


def make_step_ops(device: torch.device) -> StepOps:
    """Triton on CUDA, plain torch elsewhere. Triton is imported only where it is used."""
    if device.type != "cuda":
        return StepOps(
            reference.begin_step, reference.greedy, reference.draw, reference.process_logits, reference.logprobs
        )
    from cbatch.kernels import logit_processing, logprobs, sampling

    return StepOps(
        sampling.begin_step, sampling.greedy, sampling.draw, logit_processing.process_logits, logprobs.logprobs
    )
