"""Chooses each row's next token from logits, on the device: greedy, sampling, beams. Waits only where it says so.

So that a step can be captured, a search updates its tensors in place, and writes one row of ``report`` per step. The
first number of a row is 1 if any sequence goes on, else 0.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cbatch.interleave.options import Choice

_NEVER = -1.0e9  # added to a score that must not win, as transformers does


class Search(Protocol):
    num_rows: int  # of the model's input
    report: Tensor  # [num_steps, width] int64
    draws: bool  # whether it draws from ``generator``
    generator: torch.Generator

    def reset(self, max_new_tokens: int) -> None:
        """Start a new batch."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """``logits [num_rows, vocab_size]`` float32 -> tokens [num_rows], and for beams the cache row that each
        continues, [num_rows]."""

    def result(self, num_steps: int) -> Tensor:
        """New tokens [batch_size, at most num_steps]. Waits for the device if there are beams."""


def warp(choice: Choice, scores: Tensor) -> Tensor:
    """Scores after temperature, top-k and top-p, by transformers' warpers in its order. Unchanged without sampling."""
    keep = 1 if choice.num_beams == 1 else 1 + max(1, len(choice.eos_token_ids))
    warpers: list[Any] = []
    if choice.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(choice.temperature))
    if choice.top_k:
        warpers.append(TopKLogitsWarper(choice.top_k, min_tokens_to_keep=keep))
    if choice.top_p < 1.0:
        warpers.append(TopPLogitsWarper(choice.top_p, min_tokens_to_keep=keep))
    for warper in warpers:
        scores = warper(None, scores)
    return scores


def draw(scores: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` tokens a row, [rows, count], without replacement, by the softmax of the scores.

    Probabilities are divided by exponential noise: the largest quotient is a draw, the next a draw from the rest.
    The distribution is that of ``torch.multinomial``, which checks its input on the host and cannot be captured.
    """
    weights = scores.softmax(-1)
    race = weights / torch.empty_like(weights).exponential_(generator=generator)
    return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count).indices


class _State:
    """The common state of both searches: step number, report, stop tokens."""

    def __init__(self, choice: Choice, batch_size: int, width: int, num_steps: int, device: torch.device) -> None:
        self.choice, self.batch_size, self.device = choice, batch_size, device
        self.num_rows = batch_size * choice.num_beams
        self.draws = choice.do_sample
        self.generator = torch.Generator(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._eos = torch.tensor(choice.eos_token_ids, dtype=torch.int64, device=self.device)
        self.report = torch.full((num_steps, width), -1, dtype=torch.int64, device=self.device)

    def _ends(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self._eos).any(-1)

    def _write(self, row: Tensor) -> None:
        self.report.index_copy_(0, self._step, row[None])
        self._step.add_(1)


class Tokens(_State):
    """Greedy or sampled, each row separately. A row of the report: whether any sequence goes on, then the tokens."""

    def __init__(self, choice: Choice, batch_size: int, num_steps: int, device: torch.device) -> None:
        super().__init__(choice, batch_size, 1 + batch_size, num_steps, device)
        self._alive = torch.ones(batch_size, dtype=torch.bool, device=self.device)

    def reset(self, max_new_tokens: int) -> None:
        self._step.zero_()
        self._alive.fill_(True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.choice.do_sample:
            tokens = draw(warp(self.choice, logits), 1, self.generator)[:, 0]
        else:
            tokens = logits.argmax(-1)
        if self.choice.pad_token_id is not None:
            tokens = tokens.masked_fill(~self._alive, self.choice.pad_token_id)  # ``where`` would copy the id over
            self._alive.logical_and_(~self._ends(tokens))
        self._write(torch.cat((self._alive.any()[None].long(), tokens)))
        return tokens, None

    def result(self, num_steps: int) -> Tensor:
        return self.report[:num_steps, 1:].T


class Beams(_State):
    """Transformers' beam search, without waiting. A row of the report: whether the search goes on.

    ``running`` has the live beams, ``best`` the ended ones, by score. A step launched before the end was known does not
    change the first of ``best``: after the end, new candidates score 1e9 less.
    """

    def __init__(self, choice: Choice, batch_size: int, num_steps: int, device: torch.device) -> None:
        super().__init__(choice, batch_size, 1, num_steps, device)
        beams = choice.num_beams
        # Enough candidates for `beams` to go on even if every stop token is among them.
        self._num_candidates = max(2, 1 + len(choice.eos_token_ids)) * beams
        self._fill = (choice.pad_token_id or choice.eos_token_ids[0]) if choice.eos_token_ids else -1
        self._running = torch.empty(batch_size, beams, num_steps, dtype=torch.int64, device=device)
        # Not torch's default dtype, which the caller may set: in bfloat16, close scores would become equal.
        self._running_scores = torch.empty(batch_size, beams, dtype=torch.float32, device=device)
        self._best = torch.empty_like(self._running)
        self._best_scores = torch.empty_like(self._running_scores)
        self._best_lens = torch.empty(batch_size, beams, dtype=torch.int64, device=device)
        self._ended = torch.empty(batch_size, beams, dtype=torch.bool, device=device)
        self._improvable = torch.empty(batch_size, 1, dtype=torch.bool, device=device)
        self._limit = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(num_steps, device=device)
        self._is_top = torch.arange(self._num_candidates, device=device) < beams
        self._first_rows = torch.arange(batch_size, device=device)[:, None] * beams

    def reset(self, max_new_tokens: int) -> None:
        self._step.zero_()
        self._limit.fill_(max_new_tokens)
        self._running.fill_(self._fill)
        self._best.fill_(self._fill)
        self._running_scores.fill_(_NEVER)
        self._running_scores[:, 0] = 0  # all beams start equal, so only one may have children
        self._best_scores.fill_(_NEVER)
        self._best_lens.zero_()
        self._ended.fill_(False)
        self._improvable.fill_(True)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        choice, beams = self.choice, self.choice.num_beams
        batch_size, vocab_size = self.batch_size, logits.shape[-1]
        scores = warp(choice, logits.log_softmax(-1)).view(batch_size, beams, vocab_size)
        scores = (scores + self._running_scores[:, :, None]).view(batch_size, beams * vocab_size)
        if choice.do_sample:
            picked = draw(scores, self._num_candidates, self.generator)
            picked_scores = scores.gather(1, picked)
        else:
            picked_scores, picked = scores.topk(self._num_candidates)
        parents, tokens = picked // vocab_size, picked % vocab_size
        candidates = torch.where(self._columns == self._step, tokens[..., None], _take(self._running, parents))
        length = self._step + 1
        stops = self._ends(tokens) | (length >= self._limit)

        going = picked_scores + stops * _NEVER
        chosen = going.topk(beams).indices
        self._running.copy_(_take(candidates, chosen))
        self._running_scores.copy_(going.gather(1, chosen))
        next_tokens, next_parents = tokens.gather(1, chosen), parents.gather(1, chosen)

        # Candidates that stop among the best `beams` compete with the beams ended before.
        stops_well = stops & self._is_top
        final = picked_scores / length.double().pow(choice.length_penalty).float()
        if choice.early_stopping is True:
            final = final + self._ended.all(-1, keepdim=True) * _NEVER
        final = final + ~self._improvable * _NEVER + ~stops_well * _NEVER
        all_scores = torch.cat((self._best_scores, final), 1)
        ranks = all_scores.topk(beams).indices
        lens = torch.cat((self._best_lens, length.expand_as(tokens)), 1)
        self._best.copy_(_take(torch.cat((self._best, candidates), 1), ranks))
        self._best_scores.copy_(all_scores.gather(1, ranks))
        self._best_lens.copy_(lens.gather(1, ranks))
        self._ended.copy_(torch.cat((self._ended, stops_well), 1).gather(1, ranks))

        far = self._limit if choice.early_stopping == "never" and choice.length_penalty > 0 else length
        hoped = self._running_scores[:, :1] / far.double().pow(choice.length_penalty).float()
        worst = self._best_scores.amin(1, keepdim=True).expand_as(self._ended).masked_fill(~self._ended, _NEVER)
        self._improvable.logical_and_((hoped > worst).any(-1, keepdim=True))
        goes_on = self._improvable.any() & ~stops.all()
        if choice.early_stopping is True:
            goes_on = goes_on & ~self._ended.all()
        self._write(goes_on[None].long())
        return next_tokens.view(-1), (next_parents + self._first_rows).view(-1)

    def result(self, num_steps: int) -> Tensor:
        return self._best[:, 0, : int(self._best_lens[:, 0].max())]


def _take(beams: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``beams [batch, n, length]`` by ``indices [batch, m]``."""
    return beams.gather(1, indices[..., None].expand(-1, -1, beams.shape[-1]))
