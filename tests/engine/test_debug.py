"""The loop's own checks: they hold in ordinary runs, and each sees the fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import EngineDeadError
from cbatch.sampling_params import SamplingParams
from tests.counting import CountingModel, counted

pytestmark = pytest.mark.usefixtures("checked")

Start = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"schedule": "sync"}, {}, {"depth": 4}])
def test_ordinary_runs_keep_every_rule(counting_engine: Start, device: str, options: dict[str, Any]) -> None:
    engine = counting_engine(CountingModel(device=device, eos=(50,)), num_blocks=17, **options)
    handles = [engine.submit([i % 40] * (1 + i % 9), GREEDY) for i in range(40)]
    for i, handle in enumerate(handles):
        expected = counted(i % 40, 30)
        assert handle.result(30).outputs[0].token_ids == expected[: expected.index(50) + 1 if 50 in expected else 30]


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_read_before_they_land_are_noticed(counting_engine: Start, device: str) -> None:
    """The fault that a missing wait makes: the landing area still holds what was there before."""
    engine = counting_engine(CountingModel(device=device))
    lane: Any = engine._lane
    lane.wait = lambda io: (0.0, 0.0)
    if device == "cpu":
        engine.model.gate.clear()  # type: ignore[attr-defined]
    else:
        launch = lane.launch
        lane.launch = lambda *args: (_spin(lane), launch(*args))[1]
    with pytest.raises(EngineDeadError, match="before they had landed"):
        engine.submit([1], GREEDY).result(30)
    if device == "cpu":
        engine.model.gate.set()  # type: ignore[attr-defined]


def _spin(lane: Any) -> None:
    import torch

    with torch.cuda.stream(lane.compute):
        torch.cuda._sleep(50_000_000)


def test_buffer_written_while_its_step_is_in_flight_is_noticed(counting_engine: Start) -> None:
    """One buffer for two steps in flight: the second plan would overwrite what the first still has to read."""
    engine = counting_engine()
    engine._buffers[1] = engine._buffers[0]
    with pytest.raises(EngineDeadError, match="while its step is in flight"):
        engine.submit([1], GREEDY).result(30)


def test_buffer_written_before_its_copy_to_the_device_is_over_is_noticed(counting_engine: Start) -> None:
    """The step would compute the next one's inputs. Its tokens have landed, but that says so only of its own copy."""
    engine = counting_engine()
    lane: Any = engine._lane
    copied_in, calls = lane.copied_in, iter(range(1000))
    lane.copied_in = lambda io: next(calls) < 3 and copied_in(io)
    with pytest.raises(EngineDeadError, match="before its last copy to the device is over"):
        engine.submit([1], GREEDY).result(30)


def test_log_probabilities_read_before_they_land_are_noticed(counting_engine: Start) -> None:
    """A copy out that has room for the tokens alone: the records are those of some step before."""
    engine = counting_engine()
    for io in engine._buffers:
        set_plan = io.set_plan
        io.set_plan = lambda plan, io=io, set_plan=set_plan: (set_plan(plan), setattr(io, "lands_logprobs", False))
    assert engine.submit([1], GREEDY).result(30).outputs[0].token_ids == counted(1, 30)
    with pytest.raises(EngineDeadError, match="log-probabilities were read before they landed"):
        engine.submit([1], SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)).result(30)


def test_lost_block_is_noticed() -> None:
    with Engine(CountingModel(), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)) as engine:
        engine.scheduler.blocks.allocate(1)
        with pytest.raises(EngineDeadError, match="a block is lost"):
            engine.submit([1], GREEDY).result(30)
