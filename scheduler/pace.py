"""How many prompt tokens fit into a step with decodes, given how long past steps took. Knows no sequence.

A step of decodes alone takes ``base`` ms. Each prompt token adds some time, and some for each key that it attends to:

    ms = base + per_token * tokens + per_pair * pairs        pairs = tokens x context, over all chunks

Tokens are counted as they are computed: padded to the step's bucket, and in attention to whole tiles of queries. The
base follows the steps of decodes alone. The rest is a least-squares fit to the last 20 or so of the others, weighted by
age; so it holds for the sizes and contexts that occur now, though no GPU is linear over all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

COLD_TOKENS = 256  # size of the first chunk, before anything is measured
LEAST_TOKENS = 32  # smallest chunk: a prompt advances even if no step can meet the target
_FORGET = 0.9  # weight of a step, each step later
_OUTLIER = 4.0  # times the target: what a step takes beyond that is a hiccup (a kernel is compiled, the host is busy)


class Pace:
    """``note`` learns from a landed step; ``tokens`` says how many prompt tokens the next one may have."""

    def __init__(self, target_ms: float, sizes: Sequence[int] = (), tile: int = 32) -> None:
        """Args:
        target_ms: how long a step with decodes may take.
        sizes: the numbers of tokens that steps are padded to; empty: they are not padded.
        tile: queries of a tile in attention.
        """
        self.target_ms = target_ms
        self._sizes = sorted(sizes)
        self._tile = tile
        self.base_ms: float | None = None
        self._num_notes = 0
        self._last_tokens = 0  # prompt tokens of the last step that had some
        self._tt = self._tp = self._pp = self._t_ms = self._p_ms = 0.0  # decayed sums of products, for the fit
        self._per_token = self._per_pair = 0.0

    def padded(self, num_tokens: int) -> int:
        """How many tokens a step of ``num_tokens`` computes."""
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else num_tokens

    def note(self, num_decodes: int, num_tokens: int, num_pairs: int, ms: float) -> None:
        """Learn from a landed step that took ``ms``; ``num_pairs``: of its prompt tokens and the keys they see."""
        if num_tokens == num_decodes:
            self.base_ms = ms if self.base_ms is None else self.base_ms + 0.1 * (ms - self.base_ms)
            return
        num_prefill = num_tokens - num_decodes
        tokens = float(self.padded(num_tokens) - num_decodes)
        pairs = num_pairs / num_prefill * self._in_tiles(num_prefill)
        if self.base_ms is not None and ms < self.base_ms:  # it was measured with more, or longer, decodes
            self.base_ms = ms
        extra = min(ms - (self.base_ms or 0.0), _OUTLIER * max(self.target_ms, self._extra(tokens, pairs)))
        self._num_notes += 1
        self._last_tokens = int(tokens)
        self._tt = _FORGET * self._tt + tokens * tokens
        self._tp = _FORGET * self._tp + tokens * pairs
        self._pp = _FORGET * self._pp + pairs * pairs
        self._t_ms = _FORGET * self._t_ms + tokens * extra
        self._p_ms = _FORGET * self._p_ms + pairs * extra
        self._fit()

    def tokens(self, num_decodes: int, context: int) -> int:
        """Most prompt tokens in a step with ``num_decodes`` decodes; the first prompt goes on at ``context``."""
        room = self.target_ms - (self.base_ms or 0.0)
        most = max(2 * self._last_tokens, LEAST_TOKENS) if self._num_notes else COLD_TOKENS  # no larger leap than that
        best = 0
        for num_tokens in self._choices(num_decodes, most, room, context):
            extra = self._extra(num_tokens, self._in_tiles(num_tokens) * context)
            if best and (num_tokens > most or extra > room):
                break
            best = num_tokens
        return best or LEAST_TOKENS

    def _choices(self, num_decodes: int, most: int, room: float, context: int) -> list[int]:
        """Numbers of prompt tokens to choose from: those that fill a padded size; else the most, in whole tiles."""
        if self._sizes:
            return [size - num_decodes for size in self._sizes if size - num_decodes >= LEAST_TOKENS]
        cost = self._per_token + self._per_pair * context
        if cost > 0:
            most = min(most, int(max(room, 0.0) / cost))
        if most >= self._tile:
            most -= most % self._tile
        return [LEAST_TOKENS, most] if most > LEAST_TOKENS else [LEAST_TOKENS]

    def _in_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tile) * self._tile

    def _extra(self, tokens: float, pairs: float) -> float:
        return self._per_token * tokens + self._per_pair * pairs

    def _fit(self) -> None:
        a, b = self._per_token, self._per_pair
        determinant = self._tt * self._pp - self._tp * self._tp
        if determinant > 1e-6 * self._tt * self._pp:
            a = (self._t_ms * self._pp - self._p_ms * self._tp) / determinant
            b = (self._p_ms * self._tt - self._t_ms * self._tp) / determinant
            if b < 0:
                a, b = self._t_ms / self._tt, 0.0
            elif a < 0:
                a, b = 0.0, self._p_ms / self._pp
        elif a + b > 0:  # all steps were alike: they determine the sum, but not its parts
            a, b = a / (a + b), b / (a + b)  # scaled up, so that their squares do not underflow
            scale = (a * self._t_ms + b * self._p_ms) / (a * a * self._tt + 2 * a * b * self._tp + b * b * self._pp)
            a, b = scale * a, scale * b
        else:
            a = self._t_ms / self._tt
        self._per_token, self._per_pair = a, b
