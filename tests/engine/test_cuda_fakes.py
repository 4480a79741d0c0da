"""What the CUDA side asks of torch, where a fake can answer: streams, the current device, a capture that fails."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch import graphs, memory, streams
from cbatch.buffers import Landing
from cbatch.config import EngineConfig
from cbatch.scheduler.kv_spec import group_layers
from tests.counting import CountingModel

DEVICE = torch.device("cuda", 1)


class Stream:
    """As torch hands them out: 32 in turn, and then the same again."""

    _numbers = itertools.count()

    def __init__(self, device: torch.device) -> None:
        self.device, self.number = device, next(self._numbers) % 32

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_engines_that_come_and_go_never_get_a_stream_of_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eleventh would capture its graphs on the stream that the first copies on, and end it."""
    monkeypatch.setattr(streams, "_idle_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)

    def numbers(lane: streams.CudaLane) -> set[int]:
        used: Any = lane.h2d, lane.compute, lane.d2h
        return {stream.number for stream in used}

    first = streams.CudaLane([], DEVICE)
    for _ in range(50):
        other, another = streams.CudaLane([], DEVICE), streams.CudaLane([], DEVICE)
        assert len(numbers(first) | numbers(other) | numbers(another)) == 9
        other.close()
        another.close()


def test_the_largest_step_is_measured_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: a model on the second GPU would be read from the first."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(new: torch.device) -> Any:
        current.append(new)
        yield
        current.pop()

    def measure(*_: Any) -> int:
        assert current[-1] == DEVICE
        return 0

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**32, 2**33))
    monkeypatch.setattr(memory, "measure_peak_bytes", measure)
    model = CountingModel(device="cpu")
    groups = group_layers(model.kv_specs)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64).resolve(model.max_model_len, model.device)
    model.device = DEVICE
    assert memory.num_blocks(config, model, groups) > 1 and len(current) == 1


class FailingGraph:
    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("ended_already", [False, True])
def test_a_capture_that_failed_is_over_for_the_allocator_too(
    monkeypatch: pytest.MonkeyPatch, ended_already: bool
) -> None:
    """Torch 2.11 does not tell it, and it then fails where it would free what it caches; later ones do.

    What is heard of is the cause, not that ending the capture failed for it.
    """
    calls: list[Any] = []

    def end(device: int, pool: Any) -> None:
        calls.append((device, pool))
        if ended_already:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    fake: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(graphs, "begin_capture", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    clear = SimpleNamespace(count=0)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: setattr(clear, "count", clear.count + 1), raising=False
    )
    graph: Any = FailingGraph()
    with pytest.raises(RuntimeError, match="not permitted"), graphs.capturing(graph, (0, 7)):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert calls == [(1, (0, 7))] and clear.count == 2


def test_what_a_container_keeps_of_files_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 50 GiB that were read are in its 60; pinned memory for pages may take their place."""
    gib = 2**30
    files = {
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 * gib // 1024} kB\n",
        "/sys/fs/cgroup/memory.max": f"{64 * gib}\n",
        "/sys/fs/cgroup/memory.current": f"{60 * gib}\n",
        "/sys/fs/cgroup/memory.stat": f"anon {9 * gib}\nshmem {gib}\ninactive_file {45 * gib}\nactive_file {5 * gib}\n",
    }
    monkeypatch.setattr(memory, "open", lambda path: io.StringIO(files[path]), raising=False)
    assert memory.available_memory_bytes() == 54 * gib
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.available_memory_bytes() == 100 * gib


def test_records_begin_at_16_bytes_for_any_number_of_slots() -> None:
    """Those of two rows, with which kernels are compiled beforehand, did not, and those of 256 did: two kernels."""
    for max_num_seqs in range(1, 10):
        landing = Landing(max_num_seqs, torch.device("cpu"))
        assert landing.records.data_ptr() % 16 == 0 and landing.records.stride(0) % 4 == 0
        assert landing.head(max_num_seqs)[-1].data_ptr() == landing.records[-1, -1].data_ptr()
        assert len(landing.head(0)) >= max_num_seqs
