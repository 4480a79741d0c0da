"""Rows that wait for the host, on three CUDA streams: with delays, without synchronising, in the pool of graphs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.sampling_params import SamplingParams, StructuredOutputsParams
from tests.api.tiny import byte_level
from tests.counting import CountingModel, counted
from tests.engine.test_cuda import held

pytestmark = pytest.mark.gpu
SPIN = 20_000_000  # cycles: about 10 ms


def turned(token_ids: list[int], logits: Tensor) -> Tensor:
    """Least likely first, and another order with every token."""
    return -logits.roll(len(token_ids))


def asked(kind: str) -> SamplingParams:
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    if kind == "grammar":
        pytest.importorskip("llguidance", reason="the extra grammar is not installed")
        letters = StructuredOutputsParams(regex="([a-f]{3}[0-9]{1,4})*")
        return SamplingParams(**{**common, "temperature": 1.0, "seed": 3}, structured_outputs=letters)
    return SamplingParams(**common, logits_processors=[turned])


def answers(model: Any, kind: str, act: Callable[[Engine], None] = lambda engine: None, **options: Any) -> list[Any]:
    """Of six requests, half of them of the kind, in one batch."""
    params = [asked(kind), SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)] * 3
    small = {"max_num_seqs": 8, "block_size": 16, "num_blocks": 64, **options}
    with Engine.from_model(model, byte_level(), **small) as engine:
        act(engine)
        with held(engine):  # else the schedules would admit them in different steps, and bf16 would round otherwise
            handles = [engine.submit([5, 6 + i], one) for i, one in enumerate(params)]
        return [handle.result(60).outputs[0].token_ids for handle in handles]


def tiny(dtype: torch.dtype = torch.float32) -> nn.Module:
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=1,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config)
    return model.to("cuda", dtype).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["grammar", "processor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schedules_and_graphs_agree(kind: str, dtype: torch.dtype) -> None:
    """A function writes into logits that lie in the memory pool of the graphs, at an address noted at capture."""
    model = tiny(dtype)
    wanted = answers(model, kind, schedule="sync")
    for options in ({}, {"depth": 4}):
        assert answers(model, kind, **options) == wanted
    if dtype is torch.float32:
        assert answers(model, kind, enforce_eager=True) == wanted
    if kind == "grammar":
        allowed = set(map(ord, "abcdef0123456789"))
        assert all(set(map(ord, byte_level().decode(one).replace("<|end|>", ""))) <= allowed for one in wanted[::2])


@pytest.mark.parametrize("kind", ["grammar", "processor"])
@pytest.mark.parametrize("stream", ["h2d", "compute", "d2h"])
def test_delayed_streams_change_no_token(kind: str, stream: str) -> None:
    """Masks that come late, or a forward pass that does, must be waited for."""
    model, dice = tiny(), random.Random(1)

    def delay(engine: Engine) -> None:
        lane: Any = engine._lane
        for name in ("launch", "launch_rest"):
            start = getattr(lane, name)

            def late(*args: Any, start: Callable[..., None] = start) -> None:
                if dice.random() < 0.3:
                    with torch.cuda.stream(getattr(lane, stream)):
                        torch.cuda._sleep(SPIN)
                start(*args)

            setattr(lane, name, late)

    assert answers(model, kind, delay) == answers(model, kind, schedule="sync")


@pytest.mark.parametrize("kind", ["grammar", "processor"])
@pytest.mark.parametrize("eager", [True, False])
def test_nothing_synchronises_but_the_landing(kind: str, eager: bool) -> None:
    params = [asked(kind), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)]
    options = {"max_num_seqs": 8, "block_size": 16, "num_blocks": 64, "enforce_eager": eager}
    with Engine.from_model(tiny(), byte_level(), **options) as engine:
        first = [engine.submit([5, 6], one).result(60).outputs[0].token_ids for one in params]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            handles = [engine.submit([5, 6], one) for one in params]
            assert [handle.result(60).outputs[0].token_ids for handle in handles] == first
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["grammar", "processor"])
def test_a_held_step_that_no_graph_has_rows_for(kind: str) -> None:
    """Log-probabilities of a prompt: launched kernel by kernel between replays of graphs, in both its parts."""
    model, found = tiny(), []
    for options in ({}, {"enforce_eager": True}, {"schedule": "sync"}):
        with Engine.from_model(model, byte_level(), max_num_seqs=8, block_size=16, num_blocks=64, **options) as engine:
            first = engine.submit([5, 6], asked(kind))
            later = [engine.submit([5, 7] * 9, replace(asked(kind), prompt_logprobs=2, logprobs=2)) for _ in range(3)]
            results = [handle.result(60) for handle in (first, *later)]
        found.append([result.outputs[0].token_ids for result in results])
        assert all(len(result.prompt_logprobs or ()) == 18 for result in results[1:])
    assert found[0] == found[1] == found[2]


def test_every_bucket_finds_its_own_logits() -> None:
    """All sizes up and down: the pool gives one bucket's logits the place of another's scratch."""

    def plus_three(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.roll(2)

    config = EngineConfig(max_num_seqs=40, block_size=16, num_blocks=300)
    params = SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[plus_three], logprobs=1)
    with Engine(CountingModel(device="cuda"), config) as engine:
        for size in (*range(1, 41), *range(39, 0, -3)):
            handles = [engine.submit([i], params if i % 2 else SamplingParams(temperature=0.0)) for i in range(size)]
            for i, handle in enumerate(handles):
                found = handle.result(60).outputs[0]
                if not i % 2:
                    assert found.token_ids == counted(i, 16)
                    continue
                assert found.token_ids == [(i + 3 * k) % 100 for k in range(1, 5)]
                assert found.logprobs is not None  # by the model's own logits: its choice is the token after the last
                assert [next(id for id, one in each.items() if one.rank == 1) for each in found.logprobs] == [
                    (i + 3 * k + 1) % 100 for k in range(4)
                ]
