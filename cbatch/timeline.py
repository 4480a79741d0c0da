"""A window of steps as it happened: what the CPU planned, waited for and landed, and what the device did meanwhile.

Knows lanes, steps and times; knows no request, no model and no stream. The engine fills it in, anyone may read it once
it has ended: as spans, as a page, or as a trace for Perfetto (https://ui.perfetto.dev).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cbatch.errors import CBatchError, ConfigError, short
from cbatch.marks import Interval, Marks

LANES = ("CPU plan", "CPU wait", "CPU land", "H2D", "compute", "D2H")
_PAGE = Path(__file__).resolve().parent / "data" / "timeline.html"


class Span(NamedTuple):
    """One piece of work of one step; times in µs from the window's first."""

    lane: str
    step: int
    start_us: float
    end_us: float
    num_tokens: int
    num_rows: int


@dataclass(slots=True)
class StepTimes:
    """One recorded step, while it is in flight."""

    step: int
    num_tokens: int
    num_rows: int
    start: float
    marks: Marks
    plan: Interval = (0.0, 0.0)
    wait: Interval = (0.0, 0.0)
    land: Interval = (0.0, 0.0)

    def note(self, plan_us: float, wait_start: float, land_start: float, land_end: float) -> None:
        """The host's part of it, when it has landed."""
        self.plan = (self.start, self.start + plan_us * 1e-6)
        self.wait, self.land = (wait_start, land_start), (land_start, land_end)


class Timeline:
    """``Engine.record_timeline`` makes one; ``wait`` for it, then read ``spans`` or write it to a file.

    Where a step waited for the host before it sampled, its compute is one span, through the wait.
    """

    def __init__(self, num_steps: int, schedule: str, depth: int, model: str, *, decode_only: bool = False) -> None:
        if isinstance(num_steps, bool) or not hasattr(num_steps, "__index__") or num_steps < 1:
            raise ConfigError(f"num_steps is {short(num_steps)}, but must be an integer of at least 1")
        self.num_steps = int(num_steps)  # asked for; fewer are recorded if the engine ends first
        self.schedule, self.depth, self.model = schedule, depth, model
        self.device = "cpu"  # how it is called where the timeline is drawn
        self._decode_only = decode_only
        self._make_marks: Callable[[], Marks] | None = None
        self._num_open = 0
        self._steps: list[StepTimes] = []
        self._ended = threading.Event()

    # ---- the engine's side, on its own thread

    def open(
        self, step: int, num_tokens: int, num_rows: int, start: float, marks_maker: Callable[[], Callable[[], Marks]]
    ) -> StepTimes | None:
        """A step planned since ``start`` will be launched: where its times go, or None if the window is without it.

        The step before the window sets the device's clock, so that the wait for that is in no span.
        """
        if self._make_marks is None:
            if not self._decode_only or num_tokens == num_rows:
                self._make_marks = marks_maker()
            return None
        if self._num_open == self.num_steps:
            return None
        self._num_open += 1
        return StepTimes(step, num_tokens, num_rows, start, self._make_marks())

    def add(self, times: StepTimes) -> bool:
        """It has landed. True if the window goes on."""
        self._steps.append(times)
        if len(self._steps) < self.num_steps:
            return True
        self.end()
        return False

    def end(self) -> None:
        """No step will be added: the window is full, or the engine ends."""
        self._ended.set()

    # ---- the reader's side

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the window (or of the engine); False if it did not come within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    @cached_property
    def spans(self) -> list[Span]:
        """What happened, ordered by start.

        Raises CBatchError before the window's end.
        """
        if not self._ended.is_set():
            raise CBatchError(f"the timeline is being recorded: {len(self._steps)} of {self.num_steps} steps so far")
        if not self._steps:
            return []
        origin = min(times.plan[0] for times in self._steps)
        spans = []
        for times in self._steps:
            intervals = (times.plan, times.wait, times.land, *times.marks.intervals())
            for lane, (start, end) in zip(LANES, intervals, strict=True):
                start_us, end_us = (start - origin) * 1e6, (end - origin) * 1e6
                spans.append(Span(lane, times.step, start_us, end_us, times.num_tokens, times.num_rows))
        return sorted(spans, key=lambda span: span.start_us)

    def summary(self) -> dict[str, float]:
        """Of this window alone: the share of it that the device computed, and the times of a step.

        The device's lanes may lie up to ``clock_uncertainty_us`` off the host's, all by the same: where other processes
        use the device, its clock is not read at once.
        """
        lanes = {lane: [span for span in self.spans if span.lane == lane] for lane in LANES}
        compute = lanes["compute"]
        if not compute:
            return {}
        whole = compute[:-1] or compute  # from begin to begin, so that there are as many gaps as steps
        busy = sum(span.end_us - span.start_us for span in whole)
        total = (compute[-1].start_us if len(compute) > 1 else compute[-1].end_us) - compute[0].start_us
        return {
            "num_steps": len(compute),
            "activity_pct": 100.0 * busy / total,
            "period_us_mean": total / len(whole),
            "compute_us_mean": busy / len(whole),
            "plan_us_p50": median(span.end_us - span.start_us for span in lanes["CPU plan"]),
            "land_us_p50": median(span.end_us - span.start_us for span in lanes["CPU land"]),
            "clock_uncertainty_us": self._steps[0].marks.uncertainty_s * 1e6,
        }

    def write_html(self, path: str | PathLike[str]) -> None:
        """One page that needs nothing beside it; see ``write_html`` for several timelines on one."""
        write_html(path, [self])

    def write_perfetto(self, path: str | PathLike[str]) -> None:
        """Chrome's trace event JSON; see ``write_perfetto`` for several timelines in one."""
        write_perfetto(path, [self])


def write_html(path: str | PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Draws timelines one above the other, on one scale."""
    data = [
        {
            "schedule": timeline.schedule,
            "depth": timeline.depth,
            "device": timeline.device,
            "model": timeline.model,
            "summary": timeline.summary(),
            "spans": [
                [LANES.index(s.lane), s.step, round(s.start_us, 1), round(s.end_us, 1), s.num_tokens, s.num_rows]
                for s in timeline.spans
            ],
        }
        for timeline in timelines
    ]
    embedded = json.dumps({"lanes": LANES, "timelines": data}, separators=(",", ":")).replace("<", "\\u003c")
    Path(path).write_text(_PAGE.read_text(encoding="utf-8").replace("{{data}}", embedded), encoding="utf-8")


def write_perfetto(path: str | PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Each timeline is a process, each lane a thread, each step an event that has the same name in all lanes."""
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines, start=1):
        name = f"schedule={timeline.schedule}, {timeline.device}"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, lane in enumerate(LANES, start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        events += [
            {
                "ph": "X",
                "name": f"step {span.step}",
                "cat": span.lane,
                "pid": pid,
                "tid": LANES.index(span.lane) + 1,
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": {"tokens": span.num_tokens, "rows": span.num_rows},
            }
            for span in timeline.spans
        ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
