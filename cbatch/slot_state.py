"""Owns what a slot keeps on the device besides its params: token counts for penalties, biases, bad words, masks.

A step updates counts and recent tokens itself, so that the next one knows a token that the host has not seen. The host
writes a slot only when it gets a new owner, and the mask of one with a grammar before each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.slot_layout import IN_PROMPT, MASK, MAX_BAD_WORD_LEN, OUTPUT, RECENT, num_list_words
from cbatch.sampler import SlotUpload


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A slot's new owner whose logits are processed, and all its tokens that the host knows."""

    slot: int
    upload: SlotUpload
    history: NDArray[np.int32]  # prompt and outputs; not written to any more
    prompt_len: int


def slot_state_bytes(max_num_seqs: int, vocab_size: int) -> int:
    return (max_num_seqs + 1) * (vocab_size + num_list_words(vocab_size)) * 4


class SlotState:
    """``counts [max_num_seqs + 1, vocab_size]`` and ``lists``, as ``kernels.slot_layout`` says (int32).

    Allocates everything at once, since graphs hold the addresses. On the CPU untouched rows cost no memory. Changes on
    the compute stream only.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self._device = device
        self.counts = _zeros(rows, vocab_size, device)
        self.lists = _zeros(rows, num_list_words(vocab_size), device)
        self.num_bytes = slot_state_bytes(max_num_seqs, vocab_size)
        # As tensors on the device: a number would be copied there from pageable memory, which waits.
        self._zero, self._in_prompt, self._output = torch.tensor(
            [0, IN_PROMPT, OUTPUT], dtype=torch.int32, device=device
        )

    def apply(self, admissions: Sequence[Admission]) -> None:
        """Rebuild the slots of new owners from all their tokens: one copy, and a few launches. Waits for nothing.

        On the current stream, before the step that admits them. After a preemption too, outputs count as outputs, and
        not as a part of the prompt that is computed again.
        """
        counted = [a for a in admissions if a.upload.counted]
        prompts = [a.history[: a.prompt_len] for a in counted]
        outputs = [a.history[a.prompt_len :] for a in counted]
        slots = np.array([a.slot for a in counted], np.int32)
        lists = np.zeros((len(admissions), self.lists.shape[1]), np.int32)
        for row, a in zip(lists, admissions, strict=True):
            row[: a.upload.lists.size] = a.upload.lists
            recent = np.arange(max(a.prompt_len, a.history.size - MAX_BAD_WORD_LEN), a.history.size)
            row[RECENT + recent % MAX_BAD_WORD_LEN] = a.history[recent]
        parts = self._copy_over(
            [
                lists.ravel(),
                np.array([a.slot for a in admissions], np.int32),
                slots,
                np.repeat(slots, [p.size for p in prompts]),
                np.concatenate([*prompts, slots[:0]]),
                np.repeat(slots, [o.size for o in outputs]),
                np.concatenate([*outputs, slots[:0]]),
            ]
        )
        rows, owners, counted_slots, prompt_slots, prompt_ids, output_slots, output_ids = parts
        self.lists.index_put_((owners,), rows.view(lists.shape))
        if counted:
            self.counts.index_put_((counted_slots,), self._zero)
            self.counts.index_put_((prompt_slots, prompt_ids), self._in_prompt)
        if output_ids.numel():  # index_put_ would sort them, and may wait to check their range
            index = output_slots.long() * self.counts.shape[1] + output_ids
            self.counts.view(-1).scatter_add_(0, index, self._output.expand(index.shape))

    def set_masks(
        self,
        slots: Tensor,  # [num_rows] int32
        masks: Tensor,  # [num_rows, ceil(vocab_size / 32)] int32, bit i % 32 of word i // 32 for token i
    ) -> None:
        """Which tokens may come next in these slots. One launch on the current stream; waits for nothing."""
        self.lists[:, MASK : MASK + masks.shape[1]].index_put_((slots,), masks)

    def _copy_over(self, arrays: list[NDArray[np.int32]]) -> tuple[Tensor, ...]:
        """The arrays on the device, in one copy. torch does not reuse the pinned memory before the copy is over."""
        sizes = [array.size for array in arrays]
        pin = self._device.type == "cuda"
        staged = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=pin)
        np.concatenate(arrays, out=staged.numpy())
        return staged.to(self._device, non_blocking=True).split(sizes)


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, columns), np.int32))  # the system gives zero pages on first use
    return torch.zeros(rows, columns, dtype=torch.int32, device=device)
