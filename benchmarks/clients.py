"""Requests that come at their time, and are read as a server reads them: when did each token come? Knows no figures.

All streams are read in one event loop, which the engine wakes once a step, so that reading costs it little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cbatch.engine import Engine
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams


@dataclass
class Stream:
    """One request; times in seconds of ``time.perf_counter``."""

    sent: float
    handle: RequestHandle
    times: list[float] = field(default_factory=list)  # when tokens came; several at once count as one
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token behind the first; None where there is none."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    def gaps_s(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """The inter-token latencies that ended between two times."""
        return [b - a for a, b in pairwise(self.times) if begin <= b <= end]

    async def read(self) -> Stream:
        """Until its end, which an abort is too."""
        finished = False
        while not finished:
            chunk = await self.handle.anext_chunk()
            if chunk.token_ids:
                self.times.append(time.perf_counter())
                self.num_tokens += len(chunk.token_ids)
            finished = chunk.finished
        return self


def send(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Stream:
    sent = time.perf_counter()
    return Stream(sent, engine.submit(prompt, params))


async def at_their_times(
    engine: Engine, arrivals_s: Iterable[float], prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Stream]:
    """Send each request so many seconds after the start, and read all to their ends."""
    start = time.perf_counter()

    async def one(at: float, prompt: Sequence[int], own: SamplingParams) -> Stream:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        return await send(engine, prompt, own).read()

    return await asyncio.gather(*map(one, arrivals_s, prompts, params))


def milliseconds(name: str, seconds: Iterable[float | None]) -> dict[str, Any]:
    """Median and 99th percentile; None where there is no value."""
    values = [value * 1e3 for value in seconds if value is not None]
    p50, p99 = np.percentile(values, (50, 99)).tolist() if values else (None, None)
    return {f"{name}_ms_p50": p50, f"{name}_ms_p99": p99}
