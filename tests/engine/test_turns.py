"""Whose turn it is with the GPUs, where fakes can answer: building, freeing, and a build that fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch import engine as engine_module
from cbatch import executor as executor_module
from cbatch import turns
from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.executor import Executor
from cbatch.graphs import CaptureError
from cbatch.sampling_params import SamplingParams
from tests.counting import CountingModel, counted

DEVICE = torch.device("cuda", 1)
OPTIONS = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 33, "max_num_batched_tokens": 16}


class Part:
    """Something to be freed."""


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which caches were emptied."""
    calls: list[str] = []
    monkeypatch.setattr(turns.torch.cuda, "empty_cache", lambda: calls.append("device"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: calls.append("host"), raising=False)
    return calls


def test_engines_are_built_one_after_the_other_whatever_their_device() -> None:
    """CUDA lets nobody wait for a device on which a graph is captured: the one who did and the capture both failed. And
    torch empties the caches of no device while one is captured on, so two engines on two GPUs failed as well."""
    inside, entered = threading.Semaphore(1), list[int]()

    def build(number: int, device: torch.device) -> None:
        half: Any = SimpleNamespace(model=SimpleNamespace(device=device), startup_s={})
        with Engine._building(half, "graphs"):
            assert inside.acquire(blocking=False)
            time.sleep(0.02)
            entered.append(number)
            inside.release()

    devices = [DEVICE, DEVICE, torch.device("cuda", 0)]
    threads = [threading.Thread(target=build, args=item) for item in enumerate(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(entered) == [0, 1, 2]


def test_what_is_freed_while_an_engine_is_built_goes_when_it_is_done(emptied: list[str]) -> None:
    """Torch refused to empty its caches there, which ended the thread of the engine that closed: it stayed among the
    open ones, and its memory in the cache. Freed in between, it also made the largest step look too small."""
    part = Part()
    alive = weakref.ref(part)
    with turns.alone(DEVICE):
        turns.free([part])  # by another thread, or a finalizer in this one: it waits for nobody
        del part
        assert alive() is not None and not emptied
    assert alive() is None and emptied == ["device", "host"]
    turns.free([Part()])
    assert emptied == ["device", "host"] * 2
    with turns.alone(DEVICE):
        pass
    assert emptied == ["device", "host"] * 2


def test_who_comes_next_finds_the_memory_of_those_who_have_gone(emptied: list[str]) -> None:
    turns._left.append([Part()])  # by somebody whose turn it was not, after the last one's look
    with turns.alone(DEVICE):
        assert emptied == ["device", "host"]


def test_a_turn_that_fails_is_over(emptied: list[str]) -> None:
    with pytest.raises(ValueError, match="half way"), turns.alone(DEVICE):
        turns.free([])
        raise ValueError("half way")
    assert emptied == ["device", "host"]
    with turns.alone(DEVICE):
        pass


def test_memory_that_torch_will_not_give_back_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the program captures a graph of its own: the engine has closed all the same."""

    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(turns.torch.cuda, "empty_cache", refuse)
    things = [Part()]
    turns.free(things)
    assert not things


def test_a_finalizer_may_close_an_engine_in_a_thread_that_builds_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` waits for the engine's thread, so that may not wait for the thread that builds."""
    monkeypatch.setattr(turns.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    engine = Engine(CountingModel(), EngineConfig(**OPTIONS))
    monkeypatch.setattr(engine, "_free", lambda: turns.free([engine.__dict__.pop("_executor")]))

    class Owner:
        def __del__(self) -> None:
            engine.close()

    def build() -> None:
        with turns.alone(DEVICE):
            owner: Any = Owner()
            owner.itself = owner
            del owner
            gc.collect()

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and not engine.is_healthy and "_executor" not in vars(engine)


class Full(Executor):
    """Runs out of memory when most of it is there."""

    error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    pages: weakref.ref[Any]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Full.pages = weakref.ref(self._runner.kv_cache)
        self.lane.close()
        raise Full.error


@pytest.mark.parametrize("said", ["", "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_an_engine_that_finds_no_memory_says_so_and_leaves_room_for_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """The error's frames held pages and graphs, so that the next try, made where the error is handled, failed too."""
    if said:
        monkeypatch.setattr(Full, "error", RuntimeError(said))
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "Executor", Full)
        try:
            Engine(CountingModel(), EngineConfig(**OPTIONS))
        except ConfigError as error:
            assert "num_blocks=33, max_num_seqs=4 and max_num_batched_tokens=16" in str(error)
            assert Full.pages() is None
            patched.undo()
            with Engine(CountingModel(), EngineConfig(**{**OPTIONS, "num_blocks": 9})) as engine:
                assert engine.submit([1, 2], SamplingParams(temperature=0.0)).result(10).outputs[
                    0
                ].token_ids == counted(2, 16)
        else:
            pytest.fail("built without memory")


def test_weights_of_an_engine_that_was_not_built_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that was given by name nobody else has the weights: twice they may not fit."""
    loaded: list[weakref.ref[Any]] = []

    def load(*_: Any) -> tuple[Any, None]:
        model = CountingModel()
        loaded.append(weakref.ref(model))
        return model, None

    monkeypatch.setattr(engine_module, "resolve_model", load)
    monkeypatch.setattr(engine_module, "Executor", Full)
    try:
        Engine.from_model("a name", **OPTIONS)
    except ConfigError:
        assert loaded[0]() is None
    else:
        pytest.fail("built without memory")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), CaptureError("no graph of that")])
def test_streams_of_an_engine_that_was_not_built_are_given_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Torch has 32. Without graphs it is built, and has its streams."""
    closed: list[bool] = []
    lane = SimpleNamespace(compute=None, close=lambda: closed.append(True))

    def capture(*_: Any) -> None:
        raise error

    monkeypatch.setattr(executor_module, "CudaLane", lambda *_: lane)
    monkeypatch.setattr(executor_module, "GraphSet", capture)
    monkeypatch.setattr(executor_module, "IOBuffer", lambda *_: None)
    monkeypatch.setattr(executor_module, "KVCache", lambda *_: None)
    monkeypatch.setattr(executor_module, "Runner", lambda *_, **__: SimpleNamespace(run=None, finish=None))
    model: Any = SimpleNamespace(
        device=DEVICE,
        capturable=True,
        name="a model",
        vocab_size=9,
        dtype=torch.float32,
        kv_specs=CountingModel().kv_specs,
    )
    groups = engine_module.group_layers(model.kv_specs)
    backend: Any = SimpleNamespace(capturable=True)
    config = EngineConfig(**OPTIONS).resolve(64, torch.device("cpu"))
    if isinstance(error, CaptureError):
        assert Executor(model, config, groups, backend, 8, 0).lane is lane
    else:
        with pytest.raises(torch.OutOfMemoryError):
            Executor(model, config, groups, backend, 8, 0)
    assert closed == ([] if isinstance(error, CaptureError) else [True])
