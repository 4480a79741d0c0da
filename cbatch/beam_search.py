"""The logic of a beam search: which beams go on with which token, which are finished, and when it is over.

Scores and rules are those of transformers' ``generate(num_beams=...)`` (5.x, ``GenerationMixin._beam_search``), in
float32 as there. Knows no sequence, block or device: records of log-probabilities in, choices out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.sampling_params import BeamSearchParams


class Hypothesis(NamedTuple):
    """A finished beam."""

    token_ids: list[int]  # of the answer, with the end-of-sequence token where it has one
    logprob: float  # of all of them together
    score: float  # logprob / len(token_ids) ** length_penalty
    finish_reason: str  # "stop": by an end-of-sequence token; "length"


class BeamSearch:
    """The beams of one prompt, of which there is one, with no token, in the beginning.

    A row needs ``num_candidates`` most likely tokens: of the best ``beam_width`` that do not end it, and of the best
    ``beam_width`` at all, none is further down, since at most each end-of-sequence token comes before it.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._params, self._max_tokens = params, max_tokens
        self._eos = np.array([] if params.ignore_eos else eos_token_ids, np.int32)
        self.num_candidates = params.beam_width + self._eos.size
        self.beams: list[list[int]] = [[]]  # tokens of those that run, the most likely first
        self.finished: list[Hypothesis] = []  # at most ``beam_width``, the best score first
        self._logprobs = np.zeros(1, np.float32)  # of the running beams

    def advance(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> list[tuple[int, int]]:
        """Take one step, by the most likely next tokens of each running beam, ``[num_beams, num_candidates]`` each.

        In order; -1 and -inf where the vocabulary has no more. Returns for each beam that runs from now on which
        one it continues, and with what token. None runs when the search is over.
        """
        width, num_tokens = self._params.beam_width, len(self.beams[0]) + 1
        totals = (logprobs + self._logprobs[:, None]).ravel()
        order = np.argsort(-totals, kind="stable")
        order = order[totals[order] > -np.inf]
        last = num_tokens == self._max_tokens
        ends = np.isin(token_ids.ravel(), self._eos) | last

        def tokens_of(candidate: int) -> list[int]:
            return [*self.beams[candidate // token_ids.shape[1]], int(token_ids.flat[candidate])]

        # A beam that ends is only considered among the best ones; those behind it are there to go on.
        best = order[:width]
        for candidate in best[ends[best]].tolist():
            tokens, total = tokens_of(candidate), totals[candidate]
            score = _score(total, num_tokens, self._params.length_penalty)
            reason = "stop" if tokens[-1] in self._eos else "length"
            self.finished.append(Hypothesis(tokens, float(total), float(score), reason))
        self.finished = sorted(self.finished, key=lambda found: -found.score)[:width]

        running = order[~ends[order]][:width]
        chosen = [(candidate // token_ids.shape[1], int(token_ids.flat[candidate])) for candidate in running.tolist()]
        self.beams = [tokens_of(candidate) for candidate in running.tolist()]
        self._logprobs = totals[running]
        if not chosen or self._cannot_improve(num_tokens):
            self.beams, chosen = [], []
        return chosen

    def _cannot_improve(self, num_tokens: int) -> bool:
        """Whether no running beam is expected to displace a finished one."""
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if len(self.finished) < self._params.beam_width:
            return False
        if early is True:
            return True
        length = self._max_tokens if early == "never" and penalty > 0 else num_tokens
        return not _score(self._logprobs[0], length, penalty) > np.float32(self.finished[-1].score)


def _score(logprob: np.float32, length: int, penalty: float) -> np.float32:
    """``logprob / length ** penalty`` in float32, which may be -inf or -0 for a penalty far from 0."""
    with np.errstate(all="ignore"):
        return np.float32(logprob / np.float32(np.float64(length) ** penalty))
