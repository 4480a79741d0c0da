"""Checks that a model gives the same logits in steps, with cache and padding, as in one plain forward.

A family may ignore its cache, attend in both directions, or make its masks otherwise: its tokens would be wrong without
an error.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from cbatch.errors import UnsupportedModelError
from cbatch.interleave.decoding import Batch, CacheKind, Decoding, num_embeddings
from cbatch.models.comparison import Rule
from cbatch.models.config_facts import max_positions

_PROMPT_LEN, _PADDING, _NUM_STEPS = 5, 2, 3  # the second row has the padding


class _Forced:
    """A search that returns given tokens and keeps the logits."""

    draws = False

    def __init__(self, ids: Tensor) -> None:  # [num_rows, _PROMPT_LEN + _NUM_STEPS + 1]
        self.num_rows, self.report, self.generator = len(ids), ids, torch.Generator()
        self.logits: list[Tensor] = []

    def reset(self, max_new_tokens: int) -> None:
        self.logits = []

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits)
        return self.report[:, _PROMPT_LEN - 1 + len(self.logits)], None

    def result(self, num_steps: int) -> Tensor:
        raise NotImplementedError


def probe(model: Any, cache: CacheKind) -> None:
    """Run a prompt and a few steps of two rows, one padded; then each row in one plain forward. Waits for the device.

    Raises UnsupportedModelError if one fails, or if they differ by more than rounding. Touches no random state.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):  # autocast rounds more than model.dtype
        _probe(model, cache)


def _probe(model: Any, cache: CacheKind) -> None:
    name, length = type(model).__name__, _PROMPT_LEN + _NUM_STEPS
    if length > max_positions(model.config):
        return  # too short to compare
    vocab_size = num_embeddings(model)
    experts = any("expert" in module for module, _ in model.named_modules())
    rule, reason = Rule(model.dtype, experts), None
    for attempt in range(rule.attempts):
        rng = random.Random(attempt)
        rows = [[rng.randrange(vocab_size) for _ in range(length + 1)] for _ in range(2)]
        ids = torch.tensor(rows, device=model.device)
        mask = torch.ones_like(ids[:, :_PROMPT_LEN])
        mask[1, :_PADDING] = 0
        search = _Forced(ids)
        decoding = Decoding(model, model, search, length, cache)
        try:
            alone = [
                model(input_ids=row[None]).logits[0, -1 - _NUM_STEPS :, :vocab_size]
                for row in (ids[0, :-1], ids[1, _PADDING:-1])
            ]
            decoding.load(Batch(ids[:, :_PROMPT_LEN], mask, True, _NUM_STEPS + 1))
            decoding.prefill()
            for _ in range(_NUM_STEPS):
                decoding.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{name} fails in steps with a {cache} cache: {error!r:.200}") from error
        reason = rule.difference(list(torch.stack(search.logits, 1)), alone)
        if reason is None:
            return
    raise UnsupportedModelError(f"{name} gives other logits in steps with a {cache} cache than at once: {reason}")
