"""The known mistakes with two streams, each provoked: reads before writes, memory freed too early, hidden waits.

A delay is a kernel that spins, or a large copy, queued ahead of what must be waited for.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import UnsupportedModelError
from cbatch.interleave import InterleavedGenerator
from cbatch.interleave.decoding import Decoding
from cbatch.interleave.lanes import CudaLanes
from cbatch.models.transformers_model import TransformersModel
from tests.interleave.conftest import Make, expected, prompts
from tests.models.families import make_tiny

pytestmark = pytest.mark.gpu
SPIN = 4_000_000  # cycles: about 2 ms
WAYS: list[dict[str, Any]] = [
    {"cache": "static"},
    {"cache": "dynamic"},
    {"compile": "cudagraphs"},
    {"cache": "static", "num_streams": 1},
    {"cache": "dynamic", "num_streams": 3},
]


def lanes_of(made: InterleavedGenerator) -> CudaLanes:
    assert isinstance(made._lanes, CudaLanes)
    return made._lanes


def around(made: InterleavedGenerator, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Queue something on a step's own stream, in front of it and behind it."""
    lanes = lanes_of(made)
    launch = lanes.launch

    def with_both(index: int, compute: Callable[[], None]) -> None:
        def all_three() -> None:
            before()
            compute()
            after()

        launch(index, all_three)

    lanes.launch = with_both  # type: ignore[method-assign]


class SlowCopy(torch.cuda.Event):
    """In place of ``computed``: what comes behind it on the stream, which is the copy to the host, comes late."""

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        torch.cuda._sleep(SPIN)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_delays_in_any_place_change_no_token(tiny: Make, options: dict[str, Any]) -> None:
    """Token i+1 is queued while token i is still spinning: it must wait for it, and the host for the copy."""
    model = tiny("llama", "cuda")
    ids, mask = prompts("cuda")
    right = expected(model, ids, mask, 24).tolist()
    beams = expected(model, ids, mask, 12, num_beams=3).tolist()
    dice = random.Random(1)
    large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)

    def late() -> None:
        if (roll := dice.random()) < 0.3:
            torch.cuda._sleep(SPIN)
        elif roll < 0.5:
            pinned.copy_(large, non_blocking=True)  # in front of the row

    made = InterleavedGenerator(model, **options)
    around(made, late, late)
    for lane in lanes_of(made)._lanes:
        lane.computed = SlowCopy()
    assert made.generate(ids, mask, 24).tolist() == right
    assert made.generate(ids, mask, 12, num_beams=3).tolist() == beams


def test_without_the_wait_for_the_step_before_the_delay_shows(tiny: Make) -> None:
    """That the test above can fail: two streams without their event read the token that has not been written.

    The streams are given back later, and others take them: they must wait again by then, and be done with our memory.
    """
    model = tiny("llama", "cuda")
    ids, mask = prompts("cuda")
    made = InterleavedGenerator(model, cache="static")
    calls = itertools.count()
    # On one of the two streams: delayed alike, both would be as far as each other.
    around(made, lambda: torch.cuda._sleep(20 * SPIN) if next(calls) % 2 == 0 else None, lambda: None)
    for lane in lanes_of(made)._lanes:
        lane.stream.wait_event = lambda event: None  # type: ignore[method-assign]
    try:
        tokens = made.generate(ids, mask, 12).tolist()
    except AssertionError:  # both streams wrote one row of the report, and nobody the next
        return
    finally:
        for lane in lanes_of(made)._lanes:
            del lane.stream.wait_event
        torch.cuda.synchronize()
    assert tokens != expected(model, ids, mask, 12).tolist()


def test_without_the_wait_for_the_copy_the_row_is_not_there(tiny: Make) -> None:
    class Never(torch.cuda.Event):
        def synchronize(self) -> None:
            pass

    made = InterleavedGenerator(tiny("llama", "cuda"))
    around(made, lambda: torch.cuda._sleep(20 * SPIN), lambda: None)
    for lane in lanes_of(made)._lanes:
        lane.landed = Never()
    with pytest.raises(AssertionError, match="before it had landed"):
        made.generate(*prompts("cuda"), 12)


@pytest.mark.parametrize("num_streams", [2, 3])
def test_memory_that_a_step_frees_is_not_written_under_the_next_one(tiny: Make, num_streams: int) -> None:
    """A dynamic cache is a new tensor at each token: the old one, allocated on one stream, is read on the other and
    freed by the host at once. Every later step grabs what is free on its stream and fills it with NaN."""
    model = tiny("gpt2", "cuda")
    ids, mask = prompts("cuda")
    right = expected(model, ids, mask, 40).tolist()
    made = InterleavedGenerator(model, cache="dynamic", num_streams=num_streams)
    heads = model.config.n_head
    sizes = [(3, heads, length, model.config.n_embd // heads) for length in range(9, 50)]

    def grab() -> None:
        for size in sizes:
            torch.full(size, float("nan"), device="cuda")

    around(made, lambda: (grab(), torch.cuda._sleep(SPIN // 4)), grab)
    assert made.generate(ids, mask, 40).tolist() == right


def test_memory_of_a_step_that_failed_half_way_is_not_written_under_it(tiny: Make) -> None:
    """The second step reads, late, what the first allocated on the other stream, and raises. It has recorded no event
    to wait for; whoever gets that stream next from torch must still not write there before the read."""
    lanes = CudaLanes(2, torch.device("cuda", torch.cuda.current_device()))
    for lane in lanes._lanes:  # kernels load, and both streams get memory of their own
        with torch.cuda.stream(lane.stream):
            torch.full((1 << 20,), 5.0, device="cuda").sum()
    torch.cuda.synchronize()
    kept: dict[str, Tensor] = {}

    def first() -> None:
        kept["keys"] = torch.ones(1 << 20, device="cuda")

    def second() -> None:
        torch.cuda._sleep(10 * SPIN)
        kept["total"] = kept["keys"].sum()
        raise RuntimeError("half way")

    lanes.open(torch.zeros(2, 1, dtype=torch.int64, device="cuda"), 2)
    lanes.launch(0, first)
    with pytest.raises(RuntimeError, match="half way"):
        lanes.launch(1, second)
    lanes.close()
    address = kept.pop("keys").data_ptr()
    with torch.cuda.stream(lanes._lanes[0].stream):
        assert torch.full((1 << 20,), 5.0, device="cuda").data_ptr() == address
    torch.cuda.synchronize()
    assert kept["total"].item() == 1 << 20


def test_a_prompt_may_be_dropped_and_its_memory_reused_at_once(tiny: Make) -> None:
    """The caller's stream waits for the lanes at the end, so that what it frees and takes anew is free indeed."""
    model = tiny("llama", "cuda")
    ids, mask = prompts("cuda")
    right = expected(model, ids, mask, 20).tolist()
    made = InterleavedGenerator(model)
    around(made, lambda: torch.cuda._sleep(SPIN // 2), lambda: None)
    for _ in range(3):
        tokens = made.generate(ids.clone(), mask.clone(), 20)
        for size in (27, 54, 1024):
            torch.full((size,), -1, device="cuda")
        assert tokens.tolist() == right


@contextmanager
def no_waiting_from_token_1(made: InterleavedGenerator) -> Iterator[None]:
    """Every call that waits for the device on its own raises, from the second step until the loop is over."""
    lanes = lanes_of(made)
    launch, close = lanes.launch, lanes.close

    def strict(index: int, compute: Callable[[], None]) -> None:
        if index == 1:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
        launch(index, compute)

    def lenient() -> None:
        torch.cuda.set_sync_debug_mode("default")
        close()

    lanes.launch, lanes.close = strict, lenient  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        lanes.launch, lanes.close = launch, close  # type: ignore[method-assign]


CHOICES: list[dict[str, Any]] = [
    {},
    {"eos_token_id": 100, "pad_token_id": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"num_beams": 3, "eos_token_id": [99, 100]},
    {"num_beams": 2, "do_sample": True, "top_p": 0.9},
]


@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_nothing_in_the_loop_waits_but_the_read_of_the_token_before(
    tiny: Make, family: str, options: dict[str, Any]
) -> None:
    made = InterleavedGenerator(tiny(family, "cuda"), **options)
    ids, mask = prompts("cuda")
    for choice in CHOICES:
        for attention_mask in (mask, torch.ones_like(mask)):
            made.generate(ids, attention_mask, 14, **choice)  # kernels are compiled, a graph is captured
            with no_waiting_from_token_1(made):
                made.generate(ids, attention_mask, 14, **choice)


def test_that_mode_sees_a_wait(tiny: Make) -> None:
    made = InterleavedGenerator(tiny("llama", "cuda"))
    around(made, lambda: None, lambda: torch.ones(1, device="cuda").item())
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting_from_token_1(made):
        made.generate(*prompts("cuda"), 6)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("options", WAYS[:3], ids=str)
def test_the_only_copies_to_the_host_are_one_pinned_row_a_token(tiny: Make, options: dict[str, Any]) -> None:
    """The mode above does not see a copy to pageable memory that is called non-blocking, and waits all the same."""
    made = InterleavedGenerator(tiny("llama", "cuda"), **options)
    ids, mask = prompts("cuda")
    made.generate(ids, mask, 20)
    lanes = lanes_of(made)
    launch, close = lanes.launch, lanes.close
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def profiled(index: int, compute: Callable[[], None]) -> None:
        if index == 1:
            torch.cuda.synchronize()
            profiler.start()
        launch(index, compute)

    def stopped() -> None:
        torch.cuda.synchronize()
        profiler.stop()
        close()

    lanes.launch, lanes.close = profiled, stopped  # type: ignore[method-assign]
    made.generate(ids, mask, 20)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    copies = Counter(event.name() for event in events if "Memcpy" in event.name())
    to_host = {name: count for name, count in copies.items() if "DtoH" in name}
    assert to_host == {"Memcpy DtoH (Device -> Pinned)": 19}
    assert not [name for name in copies if "Pageable" in name or "HtoD" in name], copies


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma", "gemma3_text"])
def test_graphs_equal_transformers(tiny: Make, family: str) -> None:
    """Prompts of several lengths through one captured step; sliding windows that slide; then other choices."""
    model = tiny(family, "cuda")
    made = InterleavedGenerator(model, compile="cudagraphs")
    stop: dict[str, Any] = {}
    for length, count in ((30, 24), (9, 20), (9, 40), (3, 2), (5, 1)):
        ids, mask = prompts("cuda", length=length)
        right = expected(model, ids, mask, count)
        assert made.generate(ids, mask, count).tolist() == right.tolist()
        stop = stop or {"eos_token_id": int(right[0, length + 5]), "pad_token_id": 1}
    captured = made._captured
    assert captured is not None and captured[1].max_len == 64
    for choice in (stop, {"num_beams": 3}, {"num_beams": 3, **stop}):
        for length in (12, 6):
            ids, mask = prompts("cuda", length=length)
            right = expected(model, ids, mask, 20, **choice)
            assert made.generate(ids, mask, 20, **choice).tolist() == right.tolist(), choice
        assert made.num_wasted_steps <= 1


def test_an_engine_closes_and_another_is_built_while_a_step_is_captured(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one gave memory back and the other waited for the device: torch refuses the first, and CUDA the second, which
    ends the capture as well."""
    model = tiny("llama", "cuda")
    options = {"max_num_seqs": 4, "block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64}
    first = Engine.from_model(make_tiny("llama", device="cuda"), **options)
    built: list[Engine] = []
    other = TransformersModel(make_tiny("llama", device="cuda"))
    builder = threading.Thread(target=lambda: built.append(Engine(other, EngineConfig(**options))))
    step = Decoding._step

    def acting(self: Decoding) -> None:
        if torch.cuda.is_current_stream_capturing():
            first.close()
            builder.start()
            time.sleep(0.3)
        step(self)

    monkeypatch.setattr(Decoding, "_step", acting)
    ids, mask = prompts("cuda")
    tokens = InterleavedGenerator(model, compile="cudagraphs").generate(ids, mask, 12)
    builder.join()
    assert tokens.tolist() == expected(model, ids, mask, 12).tolist()
    assert not first._thread.is_alive() and "_executor" not in vars(first)
    with built[0] as engine:
        assert engine.stats()["num_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor's imports warn
def test_compiled_steps_equal_transformers(tiny: Make) -> None:
    model = tiny("llama", "cuda")
    made = InterleavedGenerator(model, compile=True)
    ids, mask = prompts("cuda")
    for _ in range(2):
        assert made.generate(ids, mask, 20).tolist() == expected(model, ids, mask, 20).tolist()
    with no_waiting_from_token_1(made):
        made.generate(ids, mask, 20)


def test_a_captured_draw_follows_the_seed(tiny: Make) -> None:
    """The first call with it captures, which draws too; none of that may show."""
    made = InterleavedGenerator(tiny("llama", "cuda"), compile="cudagraphs")
    ids, mask = prompts("cuda")

    def run(seed: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return made.generate(ids, mask, 16, top_k=0, **options).tolist()

    for options in ({}, {"num_beams": 2}):
        answers = [run(seed, **options) for seed in (1, 2, 1, 2)]
        assert answers[:2] == answers[2:] and answers[0] != answers[1]
    before = torch.cuda.get_rng_state()
    made.generate(ids, mask, 16, top_k=0)
    assert torch.cuda.get_rng_state().equal(before), "torch's own generator of the device is the caller's"


def test_each_token_of_a_captured_draw_is_new(tiny: Make) -> None:
    """A graph that replayed one noise would draw all tokens of a uniform model alike."""
    model = tiny("gpt2", "cuda")
    made = InterleavedGenerator(model, compile="cudagraphs")
    ids = torch.full((64, 2), 5, device="cuda")
    torch.manual_seed(0)
    tokens = made.generate(ids, None, 40, temperature=1e6, top_k=0)[:, 2:]
    shares = torch.bincount(tokens.flatten(), minlength=101).double() / tokens.numel()
    assert shares.max() < 0.03 and (shares > 0).sum() > 95
    assert all((tokens[:, i] == tokens[:, i + 1]).double().mean() < 0.2 for i in range(39))


def test_weights_that_the_caller_replaced_are_seen() -> None:
    """A graph reads the weights where they lay. It was kept for the next call that asked for the same, and then read
    the memory of weights that were no longer there."""
    model: Any = make_tiny("llama", "cuda")
    model.set_attn_implementation("sdpa")  # the eager one copies a number from the host, which no graph can
    made = InterleavedGenerator(model, compile="cudagraphs")
    ids, mask = prompts("cuda")
    before = made.generate(ids, mask, 12).tolist()
    kept = made._captured
    assert made.generate(ids, mask, 12).tolist() == before and made._captured is kept
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
    after = made.generate(ids, mask, 12).tolist()
    assert after == expected(model, ids, mask, 12).tolist() and after != before


def test_a_graph_survives_what_torch_compile_captures_meanwhile(tiny: Make) -> None:
    """Its captures give back the workspaces of cuBLAS, which a graph must therefore own."""
    model = tiny("llama", "cuda")
    made = InterleavedGenerator(model, compile="cudagraphs")
    ids, mask = prompts("cuda")
    right = made.generate(ids, mask, 20).tolist()
    torch._C._cuda_clearCublasWorkspaces()
    filled = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    assert made.generate(ids, mask, 20).tolist() == right
    assert all(bool(block.isnan().all()) for block in filled)


def test_a_model_that_waits_cannot_be_captured_and_says_so(tiny: Make) -> None:
    model = tiny("llama", "cuda")
    made = InterleavedGenerator(model, compile="cudagraphs")

    def waiting(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        output.sum().item()

    hook = model.model.norm.register_forward_hook(waiting)
    try:
        with pytest.raises(UnsupportedModelError, match="cannot be captured"):
            made.generate(*prompts("cuda"), 5)
    finally:
        hook.remove()
    ids, mask = prompts("cuda")
    assert made.generate(ids, mask, 5).tolist() == expected(model, ids, mask, 5).tolist()
    torch.rand(3, device="cuda")  # the generator of the device is not left as if a capture went on
