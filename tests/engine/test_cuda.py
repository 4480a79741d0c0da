"""The loop on three CUDA streams: what each request gets is known, while copies and kernels are delayed on purpose."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks.decode import profile, steps_from_now
from cbatch import engine as engine_module
from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.runner import Runner
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from cbatch.scheduler.swap import SwapSpace
from tests.counting import CountingModel, counted
from tests.engine.test_engine import churn
from tests.models.families import make_tiny
from tests.waiting import settle

pytestmark = pytest.mark.gpu
Start = Callable[..., Engine]
SPIN = 20_000_000  # cycles: about 10 ms
TO_DEVICE, TO_HOST = "HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)"


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """No step is launched inside the block, so that all that is submitted there starts in the same step."""
    launch, go = engine.launch, threading.Event()
    engine.launch = lambda: launch() if go.is_set() else None  # type: ignore[method-assign]
    yield
    go.set()


def run(engine: Engine, count: int = 40) -> None:
    handles = [engine.submit([i, i + 1] * (1 + i % 5), greedy(1 + i % 17)) for i in range(count)]
    for i, handle in enumerate(handles):
        assert handle.result(60).outputs[0].token_ids == counted(i + 1, 1 + i % 17)


@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"schedule": "async"}, {"depth": 4}])
def test_counting_on_the_gpu(counting_engine: Start, options: dict[str, Any]) -> None:
    engine = counting_engine(CountingModel(device="cuda"), **options)
    run(engine)
    stats = engine.stats()
    assert stats["activity_kind"] == "gpu" and 0 < stats["activity_pct"] <= 100


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("stream", ["h2d", "compute", "d2h"])
def test_delayed_streams_change_no_token(
    counting_engine: Start, stream: str, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy or a step that comes late must be waited for: never an old buffer, never a buffer written too early.

    In the debug mode, buffers are poisoned on both sides, and none may be planned into before its copy is over.
    """
    monkeypatch.setenv("CBATCH_DEBUG", debug)
    engine = counting_engine(CountingModel(device="cuda"), max_num_seqs=8)
    lane: Any = engine._lane
    launch, dice = lane.launch, random.Random(1)

    def late(*args: Any) -> None:
        if dice.random() < 0.3:
            with torch.cuda.stream(getattr(lane, stream)):
                torch.cuda._sleep(SPIN)
        launch(*args)

    lane.launch = late
    run(engine)


def test_nothing_synchronises_but_the_landing() -> None:
    """CUDA calls that wait on their own (a copy from pageable memory, ``.item()``) raise in this mode."""
    for eager in (True, False):
        check_that_nothing_synchronises("llama", enforce_eager=eager)


def test_nothing_synchronises_where_blocks_are_shared_dropped_and_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "is_cheaper", lambda *_: True)
    for eager in (True, False):
        options = {"enable_prefix_caching": True, "swap_space": 0.01, "block_size": 4, "num_blocks": 34}
        check_that_nothing_synchronises("gemma2", enforce_eager=eager, **options)


def check_that_nothing_synchronises(family: str, *, enforce_eager: bool, **options: Any) -> None:
    small = {"max_num_seqs": 8, "block_size": 16, "num_blocks": 64, "enforce_eager": enforce_eager, **options}
    with Engine.from_model(make_tiny(family, device="cuda"), **small) as engine:
        assert (engine.stats()["num_graphs"] > 0) is not enforce_eager
        first = mixture(engine)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            assert mixture(engine) == first
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profile_of_decode_has_one_wait_and_no_pageable_copy() -> None:
    """That mode sees neither a wait for an event, nor a copy to or from pageable memory that is called non-blocking and
    waits all the same. A profile has all of them; its own end waits for the device, once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        pass  # the first takes seconds to begin
    config = EngineConfig(max_num_seqs=4, block_size=64, num_blocks=4000)
    with Engine(CountingModel(device="cuda", max_model_len=60_000), config) as engine:
        assert engine.stats()["num_graphs"]
        handles = [engine.submit([i], greedy(50_000)) for i in range(4)]
        steps_from_now(engine, 100)
        found = profile(engine, 200)
        for handle in handles:
            handle.abort()
    copies = found["copies_per_step"]
    assert not [name for name in copies if "Pageable" in name]
    waits = {name: count for name, count in found["calls_per_step"].items() if "Synchronize" in name}
    assert waits.pop("cudaDeviceSynchronize", 0.0) * found["profiled_steps"] < 2.5
    assert list(waits) == ["cudaEventSynchronize"]
    for count in (waits["cudaEventSynchronize"], *(copies[f"Memcpy {way}"] for way in (TO_DEVICE, TO_HOST))):
        assert count == pytest.approx(1, abs=0.1)


def mixture(engine: Engine) -> list[list[int]]:
    """Greedy rows, log-probabilities of a prompt, and beams that are forked."""
    handles: list[Any] = [engine.submit([1, 2, 3], greedy(20)) for _ in range(8)]
    handles.append(engine.submit([1, 2, 3] * 9, greedy(4, prompt_logprobs=3)))
    handles.append(engine.submit_beam_search([1, 2, 3], BeamSearchParams(3, 8)))
    return [answer.token_ids for handle in handles for answer in handle.result(60).outputs]


def test_random_joins_leaves_and_aborts_for_two_thousand_steps_of_graphs(counting_engine: Start) -> None:
    options = {"max_num_seqs": 40, "num_blocks": 90, "max_num_batched_tokens": 64}
    engine = counting_engine(CountingModel(device="cuda", eos=(13,)), **options)
    churn(engine, 2000)
    settle(engine)
    assert engine.stats()["num_graphs"] > 0


SIZES = [*range(1, 66), 128, 200, 256]


def test_every_batch_size_through_padded_graphs_equals_solo() -> None:
    """Growing and shrinking: padded rows never touch live blocks, never overwrite the last row, are never sampled."""
    model = make_tiny("llama", device="cuda")
    dice = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 101, (1 + i % 23,), generator=dice).tolist() for i in range(256)]
    with Engine.from_model(
        model, schedule="sync", enforce_eager=True, max_num_seqs=1, block_size=16, num_blocks=8
    ) as engine:
        solo = [engine.submit(p, greedy(6)).result(60).outputs[0].token_ids for p in prompts]
    with Engine.from_model(model, max_num_seqs=256, block_size=16, num_blocks=1100) as engine:
        assert engine.stats()["num_graphs"] > 40
        for size in [*SIZES, *reversed(SIZES)]:
            handles = [engine.submit(p, greedy(6)) for p in prompts[:size]]
            assert [h.result(60).outputs[0].token_ids for h in handles] == solo[:size], size
    engine.scheduler.check()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3", "mistral"])
def test_graphs_equal_eager_on_both_schedules(family: str) -> None:
    """In float32, and in bf16 bit for bit between the schedules: the same graphs see the same buckets."""
    for dtype in (torch.float32, torch.bfloat16):
        model = make_tiny(family, device="cuda", dtype=dtype)
        answers = []
        for options in ({}, {"depth": 4}, {"schedule": "sync"}, {"enforce_eager": True}):
            with Engine.from_model(model, max_num_seqs=12, block_size=16, num_blocks=128, **options) as engine:
                with held(engine):  # else the schedules would admit the requests in different steps
                    handles = [engine.submit([5 + i, 7, 9] * (1 + i % 7), greedy(30)) for i in range(12)]
                answers.append([h.result(60).outputs[0].token_ids for h in handles])
        assert answers[0] == answers[1] == answers[2]
        assert dtype is torch.bfloat16 or answers[0] == answers[3]


def test_engines_are_built_and_run_beside_other_cuda_work() -> None:
    """Capture refuses only what its own thread does: the host program may allocate and compute meanwhile."""
    stop, failures = threading.Event(), []

    def other_work() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    x = torch.randn(200 + int(torch.randint(100, (1,))), 300, device="cuda")
                    (x @ x.T).sum().item()
        except RuntimeError as error:
            failures.append(error)

    worker = threading.Thread(target=other_work)
    worker.start()
    try:
        model = make_tiny("llama", device="cuda")
        engines = [Engine.from_model(model, max_num_seqs=6, block_size=16, num_blocks=64) for _ in range(2)]
        handles = [e.submit([5 + i, 7], greedy(20)) for i in range(12) for e in engines]
        answers = [h.result(60).outputs[0].token_ids for h in handles]
        assert answers[::2] == answers[1::2]
        assert all(e.stats()["num_graphs"] > 0 for e in engines)
        for engine in engines:
            engine.close()
    finally:
        stop.set()
        worker.join()
    assert not failures


def test_engines_are_built_in_several_threads_at_once() -> None:
    """One waited for the device while another captured on it, which CUDA forbids to both."""
    models = [make_tiny("llama", device="cuda") for _ in range(3)]
    engines, failures = list[Engine](), list[BaseException]()

    def build(model: torch.nn.Module) -> None:
        try:
            engines.append(Engine.from_model(model, max_num_seqs=6, block_size=16, num_blocks=64))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and all(engine.stats()["num_graphs"] for engine in engines)
    answers = [engine.submit([5, 6, 7], greedy(20)).result(60).outputs[0].token_ids for engine in engines]
    assert answers[0] == answers[1] == answers[2]
    for engine in engines:
        engine.close()


SMALL = {"max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 64}


def in_a_capture(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], number: int = 3) -> None:
    """Have ``act`` called in the middle of a step that is captured, the ``number``-th one from now on."""
    step, captures = Runner.step, iter(range(1, 10_000))

    def acting(self: Runner, *args: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and next(captures) == number:
            act()
        return step(self, *args, **options)

    monkeypatch.setattr(Runner, "step", acting)


def test_an_engine_closes_in_the_middle_of_anothers_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to empty its caches then: the thread that did it died, and its engine stayed among the open ones.
    Here the thread that captures even waits for the end of the other engine, as a finalizer may have it do."""
    first = Engine.from_model(make_tiny("llama", device="cuda"), num_blocks=64, swap_space=0.01, **SMALL)
    right = first.submit([5, 6, 7], greedy(20)).result(60).outputs[0].token_ids
    executor = weakref.ref(first._executor)
    assert first._graph_facts["num_graphs"] and executor() is not None
    in_a_capture(monkeypatch, first.close)
    with Engine.from_model(make_tiny("llama", device="cuda"), num_blocks=64, **SMALL) as second:
        assert not first._thread.is_alive() and first not in engine_module._open_engines
        assert executor() is None
        assert second.stats()["num_graphs"]
        assert second.submit([5, 6, 7], greedy(20)).result(60).outputs[0].token_ids == right


def test_memory_that_runs_out_in_a_capture_is_an_error_that_leaves_room_for_a_smaller_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its frames held pages and graphs while it was handled, which is where the next engine is built."""
    model = make_tiny("llama", device="cuda")
    with Engine.from_model(model, num_blocks=64, **SMALL) as engine:
        right = engine.submit([5, 6, 7], greedy(20)).result(60).outputs[0].token_ids
    before = torch.cuda.memory_allocated()

    def run_out() -> None:
        torch.zeros(8, device="cuda")  # of a graph in which there is nothing torch warns
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    with monkeypatch.context() as patched:
        in_a_capture(patched, run_out)
        try:
            Engine.from_model(model, num_blocks=60_000, **SMALL)  # pages of 700 MiB
        except ConfigError as error:
            assert "num_blocks=60000" in str(error) and "out of memory" in str(error)
            assert torch.cuda.memory_allocated() < before + (100 << 20) and gc.isenabled()
            assert not torch.cuda.is_current_stream_capturing()
            patched.undo()
            with Engine.from_model(model, num_blocks=64, **SMALL) as engine:
                assert engine.stats()["num_graphs"]
                assert engine.submit([5, 6, 7], greedy(20)).result(60).outputs[0].token_ids == right
        else:
            pytest.fail("no memory ran out")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
def test_a_model_on_another_gpu_than_the_current_one(options: dict[str, Any]) -> None:
    """Triton launches on the current device. The pool's size is not given, so the largest step is measured, too."""
    answers = []
    for device in ("cuda:0", "cuda:1"):
        model = make_tiny("llama", device=device)
        assert torch.cuda.current_device() == 0
        limits = {"max_num_seqs": 4, "block_size": 16, "gpu_memory_utilization": 0.1}
        with Engine.from_model(model, model_impl="decoder", **limits, **options) as engine:
            handles = [engine.submit([5, 6, i], greedy(20)) for i in range(6)]
            answers.append([handle.result(60).outputs[0].token_ids for handle in handles])
    assert answers[0] == answers[1]


def test_seeded_sampling_is_the_same_on_both_schedules() -> None:
    """And the caller's random state is left alone, though torch's captures have something to do with it."""
    model = make_tiny("llama", device="cuda")
    before = torch.cuda.get_rng_state()
    answers = []
    for options in ({"schedule": "sync"}, {"schedule": "async"}, {"depth": 3}):
        with Engine.from_model(model, max_num_seqs=5, block_size=16, num_blocks=64, **options) as engine:
            asked = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=15) for i in range(12)]
            answers.append([engine.submit([5, 6, 7], p).result(60).outputs[0].token_ids for p in asked])
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(a) for a in answers[0]}) > 6
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_graphs_survive_when_the_workspaces_of_cublas_are_given_back() -> None:
    """As another engine does when it starts. Graphs held addresses in memory that was then unmapped, or somebody's."""
    options = {"max_num_seqs": 4, "block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 64}
    prompts = [list(range(1, 50)), [5, 6, 7]]
    with Engine.from_model(make_tiny("llama", device="cuda"), **options) as engine:
        assert engine.stats()["num_graphs"]

        def answers() -> list[list[int]]:
            handles = [engine.submit(prompt, greedy(20)) for prompt in prompts]
            return [handle.result(60).outputs[0].token_ids for handle in handles]

        right = answers()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        with Engine.from_model(make_tiny("llama", device="cuda"), **options):
            assert answers() == right
        assert answers() == right
        assert all(bool(block.isnan().all()) for block in filled)


FAILING_DEVICE = """
import gc, sys
import torch
from cbatch.engine import Engine
from cbatch.errors import EngineDeadError
from cbatch.sampling_params import SamplingParams
from tests.models.families import make_tiny

options = {"max_num_seqs": 4, "block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 64}
engine = Engine.from_model(make_tiny("llama", device="cuda"), enforce_eager=sys.argv[1] == "eager", **options)
compute, steps = engine._executor.compute, iter(range(1000))

def failing(*arguments):
    compute(*arguments)
    if next(steps) == 5:
        torch._assert_async(torch.zeros((), dtype=torch.bool, device="cuda"))

engine._executor.compute = failing
params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
handles = [engine.submit([1, 2, i], params) for i in range(8)]
for handle in handles:
    try:
        handle.result(60)
        raise SystemExit("a result from a device that failed")
    except EngineDeadError as error:
        assert "assert" in str(error), error
engine.close()
del engine, compute, failing, handles, handle
gc.collect()
print("still here")
"""


@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_a_device_that_failed_ends_the_engine_and_not_the_process(mode: str) -> None:
    """What frees graphs and pinned memory throws there, and a destructor that throws aborts the process."""
    command = [sys.executable, "-c", FAILING_DEVICE, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stdout.endswith("still here\n"), done.stdout[-500:] + done.stderr[-3000:]
