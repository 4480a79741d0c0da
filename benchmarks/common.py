"""What the benchmarks share: their command lines and files, and what the GPU itself can do. Knows no engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The command line of ``benchmarks.name``, with ``--json``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=_in_a_folder, metavar="FILE", help="write the figures here, after every result")
    return parser


def _in_a_folder(text: str) -> Path:
    """Said at once, and not after minutes, when the first figures are to be written."""
    if not (path := Path(text)).parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no file in a folder that is there")
    return path


def positive(text: str) -> int:
    """Of a command line: a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def above_zero(text: str) -> float:
    """Of a command line: a finite number above 0."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def needs_gpu(parser: argparse.ArgumentParser, device: str = "cuda") -> None:
    """End with one line where ``device`` is a GPU and there is none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: needs a CUDA GPU, and torch finds none here\n")


def save(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report as it is now, whole or not at all: what has been measured stays if the rest fails."""
    if path is not None:
        write_whole(path, json.dumps(report, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Put the text in the place of the file at once: who is interrupted leaves the old one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def device_intervals(recorded: torch.profiler.profile) -> list[tuple[int, int]]:
    """Begin and end, in ns, of the kernels and copies that a profile of CUDA holds, from the first kernel on, in order.

    A graph that runs when the profiler begins is not in it, though a copy for the step behind may be: a whole step
    would seem idle.
    """
    events = [e for e in recorded.profiler.kineto_results.events() if is_on_device(e)]  # type: ignore[union-attr]
    begin = min((event.start_ns() for event in events if not is_copy(event)), default=0)
    intervals = ((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events)
    return sorted(interval for interval in intervals if interval[0] >= begin)


def is_on_device(event: Any) -> bool:
    return str(event.device_type()).endswith("CUDA")


def is_copy(event: Any) -> bool:
    return "memcpy" in event.name().lower() or "memset" in event.name().lower()


def busy_share(intervals: list[tuple[int, int]]) -> float:
    """The share of the time from the first begin to the last end that lies in some interval; they are in order."""
    busy, end = 0, intervals[0][0]
    for start, stop in intervals:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - intervals[0][0])


def cuda_ms(step: Callable[[], object], repeats: int = 15) -> float:
    """Median milliseconds of a CUDA graph of ``step``, which runs once before the capture. Waits for the device."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which made the inputs
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def read_bandwidth() -> float:
    """Bytes a second that a sum over 2 GiB of random numbers reads."""
    data = torch.empty(2 * GIB // 8, dtype=torch.int64, device="cuda").random_()
    return 2 * GIB / (cuda_ms(data.sum, repeats=21) * 1e-3)


def matrix_rate() -> float:
    """Operations a second of bfloat16 products of random 8192 x 8192 matrices, after 0.3 s of them."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind(0)
    out = torch.empty_like(a)
    for _ in range(200):
        torch.matmul(a, b, out=out)
    ms = cuda_ms(lambda: [torch.matmul(a, b, out=out) for _ in range(10)], repeats=21)
    return 10 * 2 * 8192**3 / (ms * 1e-3)
