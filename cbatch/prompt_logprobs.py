"""Log-probabilities of prompts: their rows of a step, and what has landed of each request's.

A prompt token's logits give the log-probability of the next token, which the host knows. A step computes few of them
(``Sequence.wants_prompt_logits``), in one product with the logits that it samples from. No graph has rows for them, so
such a step runs without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.buffers import read_records
from cbatch.output_maker import TokenLogprobs, make_logprobs
from cbatch.outputs import Logprob
from cbatch.sampler import LOGPROB_WORDS
from cbatch.scheduler.plan import StepPlan
from cbatch.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROMPT_LOGITS = 512  # tokens of a step: 125 MiB of logits for a vocabulary of 128,256 in 16 bits


class PromptLogprobs:
    """One prompt's log-probabilities. The engine's thread counts what lands; the delivery thread adds it."""

    def __init__(self, prompt_len: int, k: int, vocab_size: int) -> None:
        """``k``: the number of most likely tokens beside the prompt's own."""
        self.num_wanted = prompt_len - 1  # the first token has none
        self.num_landed = 0  # positions; for the engine's thread only
        self._num_columns = min(1 + k, 1 + vocab_size)
        self._num_added = 0
        self._parts: list[NDArray[np.int32]] = []
        self._made: list[dict[int, Logprob] | None] | None = None

    def add(self, records: NDArray[np.int32]) -> None:
        """The records of the next positions."""
        self._parts.append(records)
        self._num_added += len(records)

    def make(self, tokenizer: PreTrainedTokenizerBase | None) -> list[dict[int, Logprob] | None] | None:
        """A dict for each token of the prompt, None for the first one; None until all are there.

        Takes some 10 µs a token the first time; later calls return the same list.
        """
        parts = self._parts  # read before _made: another thread may set that and then empty the list
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
    """A step's prompt tokens whose log-probabilities are wanted, prompt after prompt."""

    index: NDArray[np.int32]  # [2, num_rows]: the row of the step, and the id of the next token
    records: Tensor  # [num_rows, LOGPROB_WORDS] int32 on the host, pinned for CUDA: where they land
    parts: list[tuple[PromptLogprobs, Sequence, int, int]]  # owner, its sequence, first position, count

    def land(self) -> list[tuple[PromptLogprobs, NDArray[np.int32]]]:
        """Each prompt's records of a landed step. Positions computed again after a preemption count once."""
        landed, begin, records = [], 0, self.records.numpy()
        for owner, sequence, start, count in self.parts:
            known = owner.num_landed - start
            if known < count:
                landed.append((owner, records[begin + known : begin + count].copy()))
                owner.num_landed = start + count
                if owner.num_landed == owner.num_wanted:  # after a preemption it needs no logits again
                    sequence.wants_prompt_logits = sequence.skip_reading_prefix_cache = False
            begin += count
        return landed


def prompt_rows(plan: StepPlan, device: torch.device) -> PromptRows | None:
    """The prompt rows of a planned step, or None. Allocates the memory that they land in."""
    if not any(sequence.wants_prompt_logits for sequence, _ in plan.chunks):
        return None
    begin = plan.sizes.num_decodes
    tokens, targets, parts = [], [], []
    for sequence, count in plan.chunks:
        if sequence.wants_prompt_logits:
            owner: PromptLogprobs = sequence.payload.prompt_logprobs  # type: ignore[attr-defined]
            position = int(plan.host.positions[begin])
            start = max(position, owner.num_landed)  # after a preemption, skip positions that have landed
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
