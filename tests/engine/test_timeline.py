"""A window of steps as it is recorded, on the CPU lane and on CUDA, and what is written of it."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torch import Tensor

from cbatch.engine import Engine
from cbatch.errors import CBatchError, ConfigError, EngineClosedError
from cbatch.sampling_params import SamplingParams
from cbatch.timeline import LANES, Span, Timeline, write_html, write_perfetto
from tests.counting import CountingModel, counted

Start = Callable[..., Engine]


class SlowModel(CountingModel):
    """Takes longer than any host work of a step, so that what runs beside what is certain."""

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: object) -> Tensor:
        time.sleep(0.02)
        return super().forward(input_ids, positions, sample_rows, attend)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def record(engine: Engine, num_steps: int, num_tokens: int | None = None) -> Timeline:
    """A window over two requests, which go on for some steps more."""
    timeline = engine.record_timeline(num_steps)
    handles = [engine.submit([i, i + 1], greedy(num_tokens or num_steps + 5)) for i in range(2)]
    for i, handle in enumerate(handles):
        assert handle.result(30).outputs[0].token_ids == counted(i + 1, num_tokens or num_steps + 5)
    return timeline


def by_step(timeline: Timeline) -> dict[str, list[Span]]:
    """The spans of each lane, in the order of the steps: all lanes have the same steps, one after the other."""
    lanes = {lane: sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.step) for lane in LANES}
    steps = [span.step for span in lanes["compute"]]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert all([span.step for span in spans] == steps for spans in lanes.values())
    return lanes


def check_order(lanes: dict[str, list[Span]], slack_us: float = 0.0) -> None:
    """A step is planned, copied in, computed, copied out, landed; a lane does one thing at a time."""
    for plan, wait, land, h2d, compute, d2h in zip(*lanes.values(), strict=True):
        assert plan.start_us <= h2d.start_us + slack_us
        assert h2d.end_us <= compute.start_us + slack_us
        assert compute.end_us <= d2h.start_us + slack_us
        assert d2h.end_us <= land.start_us + slack_us
        assert wait.end_us == land.start_us and plan.end_us <= wait.start_us
    for spans in (*lanes.values(), sorted(lanes["CPU plan"] + lanes["CPU wait"] + lanes["CPU land"])):
        in_time = sorted(spans, key=lambda span: span.start_us)
        assert all(span.start_us <= span.end_us for span in spans)
        assert all(a.end_us <= b.start_us + slack_us + 1e-3 for a, b in itertools.pairwise(in_time))


@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"schedule": "async"}, {"depth": 4}])
def test_window_has_every_lane_in_order(counting_engine: Start, options: dict[str, object]) -> None:
    timeline = record(counting_engine(**options), 9)
    assert timeline.wait(30)
    lanes = by_step(timeline)
    assert len(timeline.spans) == 9 * len(LANES)
    assert min(span.start_us for span in timeline.spans) == timeline.summary()["clock_uncertainty_us"] == 0
    assert all((span.num_tokens, span.num_rows) == (2, 2) for span in lanes["compute"][2:])
    check_order(lanes)


def test_async_plans_the_next_step_while_one_is_computed(counting_engine: Start) -> None:
    timeline = record(counting_engine(SlowModel()), 6)
    lanes = by_step(timeline)
    for compute, following in zip(lanes["compute"][1:], lanes["CPU plan"][2:], strict=False):
        assert following.start_us < compute.end_us
    assert 50 < timeline.summary()["activity_pct"] <= 100


def test_sync_plans_the_next_step_when_one_has_landed(counting_engine: Start) -> None:
    lanes = by_step(record(counting_engine(SlowModel(), schedule="sync"), 6))
    for landed, following in zip(lanes["CPU land"], lanes["CPU plan"][1:], strict=False):
        assert landed.end_us <= following.start_us


def test_recording_ends_by_itself_and_another_may_follow(counting_engine: Start) -> None:
    engine = counting_engine()
    assert engine._timeline is None  # the loop asks this and nothing else
    first = record(engine, 3)
    assert first.wait(0)
    assert engine._timeline is None
    second = record(engine, 4)
    assert [len(by_step(timeline)["compute"]) for timeline in (first, second)] == [3, 4]
    assert second.spans[0].step > first.spans[-1].step


def test_one_recording_at_a_time(counting_engine: Start) -> None:
    engine = counting_engine()
    timeline = engine.record_timeline(2)
    with pytest.raises(CBatchError, match="being recorded already"):
        engine.record_timeline(2)
    assert not timeline.wait(0)
    with pytest.raises(CBatchError, match="0 of 2 steps"):
        _ = timeline.spans


def test_a_window_has_a_whole_number_of_steps(counting_engine: Start) -> None:
    """``inf`` was recorded until memory ended, and ``True`` was one."""
    engine = counting_engine()
    for wrong in (0, -1, True, 2.5, float("nan"), float("inf"), "3", None, -(10**5000)):
        with pytest.raises(ConfigError, match=r"num_steps is .*, but must be an integer of at least 1"):
            engine.record_timeline(wrong)


def test_decode_window_begins_after_the_prompts(counting_engine: Start) -> None:
    """Prompts of 40 tokens take steps of 16; none of them is in the window."""
    engine = counting_engine()
    timeline = engine.record_timeline(5, decode_only=True)
    for handle in [engine.submit([1] * 40, greedy(20)) for _ in range(2)]:
        handle.result(30)
    assert timeline.wait(30)
    assert all((span.num_tokens, span.num_rows) == (2, 2) for span in timeline.spans)


def test_engine_that_closes_or_dies_ends_the_recording(counting_engine: Start) -> None:
    engine = counting_engine()
    timeline = record(engine, 100, num_tokens=8)
    assert not timeline.wait(0)
    engine.close()
    assert timeline.wait(0)
    assert 1 <= len(by_step(timeline)["compute"]) <= 8
    with pytest.raises(EngineClosedError):
        engine.record_timeline(2)

    model = CountingModel()
    model.fail_at = 5
    engine = counting_engine(model)
    timeline = engine.record_timeline(100)
    with pytest.raises(CBatchError):
        engine.submit([1], greedy(20)).result(30)
    assert timeline.wait(30)
    assert len(by_step(timeline)["compute"]) == 3  # of four that landed: the first set the clock


def test_page_needs_nothing_beside_it(counting_engine: Start, tmp_path: Path) -> None:
    timelines = [record(counting_engine(schedule=schedule), 4) for schedule in ("async", "sync")]
    timelines[0].device = "<b>a & b</b></script>"
    page = tmp_path / "page.html"
    write_html(page, timelines)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.stack: list[str] = []
            self.texts: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "br", "link"):
                self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.stack.pop() == tag

        def handle_data(self, data: str) -> None:
            if self.stack and self.stack[-1] == "script":
                self.texts.append(data)

    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.stack == []
    data = json.loads(tags.texts[0])
    assert [t["schedule"] for t in data["timelines"]] == ["async", "sync"]
    assert data["timelines"][0]["device"] == timelines[0].device
    for drawn, timeline in zip(data["timelines"], timelines, strict=True):
        assert len(drawn["spans"]) == len(timeline.spans) == 4 * len(LANES)
        assert drawn["summary"]["num_steps"] == 4


def test_trace_has_a_process_for_each_timeline_and_a_thread_for_each_lane(
    counting_engine: Start, tmp_path: Path
) -> None:
    timelines = [record(counting_engine(schedule=schedule), 4) for schedule in ("async", "sync")]
    write_perfetto(tmp_path / "both.json", timelines)
    timelines[0].write_perfetto(tmp_path / "one.json")
    timelines[0].write_html(tmp_path / "one.html")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["schedule=async, cpu", "schedule=sync, cpu"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1] == list(LANES)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 4 * len(LANES)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["name"].startswith("step ") for e in spans)
    assert len(json.loads((tmp_path / "one.json").read_text())["traceEvents"]) == len(events) // 2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"schedule": "async"}, {"depth": 4}])
def test_streams_are_brought_to_the_hosts_clock(counting_engine: Start, options: dict[str, object]) -> None:
    """What the device did lies between the plan and the landing of its step, by two clocks that know each other."""
    engine = counting_engine(CountingModel(device="cuda"), **options)
    record(engine, 5)  # so that kernels are compiled, and nothing below waits for that
    timeline = record(engine, 30)
    assert timeline.wait(30)
    lanes = by_step(timeline)
    # Beside 13 processes that share the device it was 690 us and the window said nothing of it.
    slack_us = 100.0 + timeline.summary()["clock_uncertainty_us"]
    check_order(lanes, slack_us)
    end = max(span.end_us for span in lanes["CPU land"])
    assert all(-slack_us <= span.start_us <= span.end_us <= end + slack_us for span in timeline.spans)
    assert 0 < timeline.summary()["activity_pct"] <= 100
