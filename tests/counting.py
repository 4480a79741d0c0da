"""A model of twenty lines that makes engine tests exact: the next token is the last one plus one."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from cbatch.scheduler.kv_spec import KVSpec


class CountingModel:
    """Counts modulo ``vocab_size``. Where steps run eagerly they can be held back, recorded, or made to fail."""

    kv_specs = (KVSpec(1, 1, 1),)
    dtype = torch.float32
    name = "counting"
    capturable = True
    default_device = "cpu"  # tests that run on several devices set it
    generation_config = None

    def __init__(
        self, vocab_size: int = 100, max_model_len: int = 128, eos: tuple[int, ...] = (), device: str | None = None
    ) -> None:
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, eos
        self.device = torch.device(device or self.default_device)
        self.num_forwards = 0
        self.fail_at: int | None = None
        self.gate = threading.Event()  # cleared: the next step stands still
        self.gate.set()
        self.seen: list[list[int]] = []  # input ids of every step, when recorded
        self.record = False

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: object) -> Tensor:
        self.gate.wait()
        self.num_forwards += 1
        if self.num_forwards == self.fail_at:
            raise RuntimeError("injected failure")
        if self.record:
            self.seen.append(input_ids.tolist())
        following = (input_ids[sample_rows] + 1) % self.vocab_size
        return (following[:, None] == torch.arange(self.vocab_size, device=following.device)).float()


def counted(start: int, count: int, vocab_size: int = 100) -> list[int]:
    """What ``CountingModel`` answers to a prompt that ends in ``start``."""
    return [(start + 1 + i) % vocab_size for i in range(count)]
