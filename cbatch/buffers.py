"""Owns the memory a step travels in: a ring of pinned host slabs, their twins on the device, and the landing areas.

A buffer belongs to one step from its launch until its landing; only then is it written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.sampler import LOGPROB_WORDS, LOGPROBS
from cbatch.sampling_params import MAX_LOGPROBS
from cbatch.scheduler.plan import Bucket, HostBatch, StepPlan, StepShape, layout


class DeviceBatch:
    """The arrays of ``HostBatch`` as int32 tensors on the device, under the same names."""

    input_ids: Tensor
    positions: Tensor
    carry_slots: Tensor
    slot_mapping: Tensor
    row_slots: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    sample_rows: Tensor
    out_slots: Tensor
    table_index: Tensor
    table_value: Tensor
    param_slots: Tensor
    param_values: Tensor

    def __init__(self, slab: Tensor, shape: StepShape, bucket: Bucket) -> None:
        fields, _ = layout(shape, bucket)
        for name, (offset, dims) in fields.items():
            setattr(self, name, slab[offset : offset + int(np.prod(dims))].view(dims))


class Landing:
    """The area for a step's results, int32: ``sampled [max_num_seqs]``, and behind it the ``records`` of its logprobs.

    ``records [max_num_seqs, LOGPROB_WORDS]`` are laid out as ``kernels.slot_layout`` says. Few steps have any, so a
    copy takes ``head(num_records)``: the tokens, and only as many records as there are.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, *, pin_memory: bool = False) -> None:
        # Records begin at a multiple of 16 bytes: Triton would compile another kernel for unaligned ones.
        self._begin = -(-max_num_seqs // 4) * 4
        size = self._begin + max_num_seqs * LOGPROB_WORDS
        self._words = torch.zeros(size, dtype=torch.int32, device=device, pin_memory=pin_memory)
        self.sampled = self._words[:max_num_seqs]
        self.records = self._words[self._begin :].view(max_num_seqs, LOGPROB_WORDS)

    def head(self, num_records: int) -> Tensor:
        return self._words[: self._begin + num_records * LOGPROB_WORDS]

    def fill(self, value: int) -> None:
        self._words.fill_(value)


class Masks:
    """Of the rows with a grammar in a step: ``slots [max_num_seqs]``, and ``masks [max_num_seqs, words]``; int32.

    On both sides. A copy takes ``head(rows)``. What no step writes costs address space on the CPU, and a few MiB of
    pinned memory otherwise. ``first_logits [max_num_seqs]``, float32 and on the host, land: of each row with functions
    of the user's, what they made of token 0.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs, self._num_words = max_num_seqs, -(-vocab_size // 32)
        size, pin = max_num_seqs * (1 + self._num_words), device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pin)
        self._device = torch.empty(size, dtype=torch.int32, device=device)
        self.slots, self.masks = (part.numpy() for part in self._parts(self._host, max_num_seqs))
        self.first_logits = torch.zeros(max_num_seqs, device="cpu", pin_memory=pin)

    def head(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """What is copied for ``num_rows`` rows, on the host and on the device."""
        size = self._max_num_seqs + num_rows * self._num_words
        return self._host[:size], self._device[:size]

    def on_device(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Slots and masks of the first ``num_rows`` rows."""
        return self._parts(self._device, num_rows)

    def _parts(self, words: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        masks = words[self._max_num_seqs :].view(self._max_num_seqs, self._num_words)
        return words[:num_rows], masks[:num_rows]


class IOBuffer:
    """One host slab with its device twin, and room for what comes back, on both sides."""

    def __init__(
        self,
        shape: StepShape,
        limit: Bucket,
        choose: Callable[[int, int], Bucket],
        device: torch.device,
        max_spare_words: int,
        vocab_size: int,
    ) -> None:
        """``choose(num_tokens, num_rows)`` gives the bucket of a step; ``limit`` is the largest bucket.

        Behind the arrays of any step there is room for ``max_spare_words``.
        """
        self._shape = shape
        self._choose = choose
        max_num_seqs = limit.num_rows
        words = layout(shape, limit)[1] + max_spare_words
        pin = device.type == "cuda"
        self.host_slab = torch.zeros(words, dtype=torch.int32, device="cpu", pin_memory=pin)
        self.device_slab = torch.zeros(words, dtype=torch.int32, device=device)
        self.device_landing = Landing(max_num_seqs, device)
        self.host_landing = Landing(max_num_seqs, torch.device("cpu"), pin_memory=pin)
        self.masks = Masks(max_num_seqs, vocab_size, device)
        self._slab = self.host_slab.numpy()
        self.sampled = self.host_landing.sampled.numpy()  # what ``Engine.land`` reads, once the step has landed
        self._records = self.host_landing.records.numpy()
        self._views: dict[Bucket, _Views] = {}
        self._step: _Views  # of the step that has the buffer now
        self.num_spare_words = 0  # behind the arrays of this step
        self.lands_logprobs = False
        self.lane_state: Any = None  # the lane's events for this buffer

    def host_batch(self, num_tokens: int, num_rows: int) -> HostBatch:
        """The views to write a step of this size into, in the smallest bucket that holds it."""
        bucket = self._choose(num_tokens, num_rows)
        if bucket not in self._views:  # allocates views, once for each bucket
            host = HostBatch(self._slab, self._shape, bucket)
            words = slice(0, host.num_words)
            device = DeviceBatch(self.device_slab, self._shape, bucket)
            self._views[bucket] = _Views(
                host,
                device,
                self.host_slab[words],
                self.device_slab[words],
                *((self.host_landing.head(rows), self.device_landing.head(rows)) for rows in (0, bucket.num_rows)),
            )
        self._step = self._views[bucket]
        return self._step.host

    def set_plan(self, plan: StepPlan) -> None:
        """Note what this step copies besides its arrays and tokens. Once it is planned, before it is launched."""
        self.num_spare_words = plan.sizes.num_spare_words
        self.lands_logprobs = bool(plan.flags & LOGPROBS)

    def logprobs(self, num_samples: int) -> Logprobs:
        """The log-probabilities of a landed step whose plan has LOGPROBS; copies."""
        return read_records(self._records[:num_samples])

    # The views that this step uses. Made once for each bucket: every slice of a tensor gives up the interpreter lock,
    # and beside 64 threads that want it, a launch spends most of its time on getting it back.

    @property
    def batch(self) -> DeviceBatch:
        return self._step.device

    @property
    def device_words(self) -> Tensor:
        """The arrays of the step, without the spare words."""
        return self._step.device_words

    @property
    def h2d(self) -> tuple[Tensor, Tensor]:
        """What the step's copy in is from, on the host, and to. Slices, but only if it has spare words, as few have."""
        if not self.num_spare_words:
            return self._step.host_words, self._step.device_words
        end = self._step.host.num_words + self.num_spare_words
        return self.host_slab[:end], self.device_slab[:end]

    @property
    def spare_words(self) -> Tensor:
        """What stands behind the arrays of the step, on the device. Slices."""
        begin = self._step.host.num_words
        return self.device_slab[begin : begin + self.num_spare_words]

    @property
    def d2h(self) -> tuple[Tensor, Tensor]:
        """What the step's copy out is to, on the host, and from: its tokens, and logprobs if it lands some."""
        return self._step.with_logprobs if self.lands_logprobs else self._step.tokens_only


@dataclass(frozen=True, slots=True)
class _Views:
    host: HostBatch
    device: DeviceBatch
    host_words: Tensor
    device_words: Tensor
    tokens_only: tuple[Tensor, Tensor]
    with_logprobs: tuple[Tensor, Tensor]


class Logprobs(NamedTuple):
    """Log-probabilities of rows: of the sampled token, then of the most likely ones."""

    ids: NDArray[np.int32]  # [num_rows, 1 + MAX_LOGPROBS], by rank, of equals the lower id first; -1: there are no more
    values: NDArray[np.float32]  # likewise; -inf
    ranks: NDArray[np.int32]  # [num_rows], the sampled token's, from 1

    def of(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Logprobs:
        return Logprobs(self.ids[rows], self.values[rows], self.ranks[rows])


def read_records(records: NDArray[np.int32]) -> Logprobs:
    """Decode ``records [num_rows, LOGPROB_WORDS]``; copies."""
    columns = MAX_LOGPROBS + 1
    values = records[:, columns + 1 : 2 * columns + 1].copy().view(np.float32)
    return Logprobs(records[:, :columns].copy(), values, records[:, columns].copy())


def eager_bucket(limit: Bucket) -> Callable[[int, int], Bucket]:
    """The buckets of steps that run eagerly: a few hundred, so that their views are made once."""

    def choose(num_tokens: int, num_rows: int) -> Bucket:
        return Bucket(min(round_up(num_tokens), limit.num_tokens), min(round_up(num_rows), limit.num_rows))

    return choose


def round_up(count: int) -> int:
    """Round up to a multiple of 1 up to 8, of 8 up to 32, of 16 up to 256, then of an eighth of the power of two below.

    There is no 40: a product takes tiles of 32 or 64 rows, and one of 64 is slower if few of them are used. A step of
    33 requests took 1.054 times one of 32 with 40 rows, and takes 1.035 with 48 (8B shape, H200).
    """
    if count <= 8:
        return count
    step = 8 if count <= 32 else 16 if count <= 256 else 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step
