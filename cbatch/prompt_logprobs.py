"""Log-probabilities of prompts: which tokens of a step they are made of, and what has landed of a request's.

The logits of a prompt's token say how likely the next one was, which the host knows. A step makes them of few tokens
(``Sequence.wants_prompt_logits``), in one product with those that it samples from; no graph has rows for them, so such
a step is launched kernel by kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.buffers import read_records
from cbatch.output_maker import TokenLogprobs, make_logprobs
from cbatch.outputs import Logprob
from cbatch.sampler import LOGPROB_WORDS
from cbatch.scheduler.plan import StepPlan

MAX_PROMPT_LOGITS = 512  # tokens of a step: 125 MiB of logits for a vocabulary of 128,256 in 16 bits


class PromptLogprobs:
    """Those of one request's prompt. The engine's thread counts what lands, the delivery thread adds it."""

    def __init__(self, prompt_len: int, k: int, vocab_size: int) -> None:
        """``k``: so many most likely tokens beside the prompt's own."""
        self.num_wanted = prompt_len - 1  # of the first token there is nothing to say
        self.num_landed = 0  # the engine's thread alone: positions of which nothing more is wanted
        self._num_columns = min(1 + k, 1 + vocab_size)
        self._num_added = 0
        self._parts: list[NDArray[np.int32]] = []
        self._made: list[dict[int, Logprob] | None] | None = None

    def add(self, records: NDArray[np.int32]) -> None:
        """The records of the next positions."""
        self._parts.append(records)
        self._num_added += len(records)

    def make(self, tokenizer: Any) -> list[dict[int, Logprob] | None] | None:
        """A dict for each token of the prompt, None for the first one; None until all are there.

        Takes some 10 µs a token the first time, and is the same list from then on.
        """
        parts = self._parts  # before the look whether another thread is done, which empties the list last
        if self._made is None and self._num_added == self.num_wanted:
            found: list[TokenLogprobs] = []
            for part in parts:
                ids, values, ranks = read_records(part)
                columns = slice(0, self._num_columns)
                found += zip(ids[:, columns].tolist(), values[:, columns].tolist(), ranks.tolist(), strict=True)
            self._made = [None, *make_logprobs(found, tokenizer)]
            self._parts = []
        return self._made


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Tokens of a step all of whose logits are wanted: those of several prompts, one after the other."""

    index: NDArray[np.int32]  # [2, num_rows]: the token of the step, and the token id behind it
    records: Tensor  # [num_rows, LOGPROB_WORDS] int32 on the host, pinned for CUDA: where they land
    parts: list[tuple[PromptLogprobs, Any, int, int]]  # whose, its sequence, from which position on, how many

    def land(self) -> list[tuple[PromptLogprobs, NDArray[np.int32]]]:
        """What each prompt gets of a landed step. A part that was computed again after a preemption counts once."""
        landed, begin, records = [], 0, self.records.numpy()
        for owner, sequence, start, count in self.parts:
            known = owner.num_landed - start
            if known < count:
                landed.append((owner, records[begin + known : begin + count].copy()))
                owner.num_landed = start + count
                if owner.num_landed == owner.num_wanted:  # should it be preempted, it is like any other
                    sequence.wants_prompt_logits = sequence.skip_reading_prefix_cache = False
            begin += count
        return landed


def prompt_rows(plan: StepPlan, device: torch.device) -> PromptRows | None:
    """The rows of a planned step; None if it has none. Allocates the memory that they land in."""
    if not any(sequence.wants_prompt_logits for sequence, _ in plan.chunks):
        return None
    begin = plan.sizes.num_decodes
    tokens, targets, parts = [], [], []
    for sequence, count in plan.chunks:
        if sequence.wants_prompt_logits:
            owner: PromptLogprobs = sequence.payload.prompt_logprobs  # type: ignore[attr-defined]
            position = int(plan.host.positions[begin])
            start = max(position, owner.num_landed)  # it was preempted, and computes them again
            end = min(position + count, owner.num_wanted)
            if start < end:
                tokens.append(np.arange(start, end) + (begin - position))
                targets.append(sequence.token_ids[start + 1 : end + 1])
                parts.append((owner, sequence, start, end - start))
        begin += count
    if not parts:
        return None
    index = np.stack([np.concatenate(tokens), np.concatenate(targets)]).astype(np.int32)
    shape = (index.shape[1], LOGPROB_WORDS)
    return PromptRows(index, torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda"), parts)
