"""Measures an engine at work: throughput, latencies, activity. Knows handles and their times; knows no command line."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

import cbatch
from cbatch.engine import Engine
from cbatch.errors import CBatchError
from cbatch.outputs import RequestOutput
from cbatch.progress import watch
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams
from cbatch.timeline import Timeline

_OF_STATS = (
    *("schedule", "device", "steps", "num_asked_tokens", "num_hit_tokens", "activity_kind", "activity_pct"),
    *("ms_per_step_p50", "host_us_per_step_p50", "host_us_per_step_p99"),
)


@dataclass(frozen=True)
class Throughput:
    """One measured run: its figures by name (as in the JSON), the outputs in order (None: failed), the first error."""

    figures: dict[str, Any]
    outputs: list[RequestOutput | None]
    first_error: CBatchError | None
    timeline: Timeline | None = None


def run_throughput(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    progress: str | None = None,
    timeline_steps: int = 0,
) -> Throughput:
    """Submits all prompts at once and waits for the last answer.

    Time runs from the first submission to the last token; what the consumer does afterwards (text) does not count.
    Warm the engine up first, see ``warm_up``.

    Args:
        prompts: token ids.
        params: one for all or one for each.
        progress: label of a progress bar; None: no bar.
        timeline_steps: record so many steps, from the first on in which no prompt is computed. The timeline may end
            with the engine only, if there are not so many.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    handles: list[RequestHandle | None] = []
    first_error: CBatchError | None = None
    name, dtype = engine.model.name, str(engine.model.dtype).removeprefix("torch.")  # an engine that dies drops it
    engine.reset_stats()
    preemptions_before = engine.stats()["num_preemptions"]
    try:
        for prompt, one in zip(prompts, each, strict=True):
            try:
                handles.append(engine.submit(list(prompt), one))
            except CBatchError as error:
                first_error = first_error or error
                handles.append(None)
        timeline = None
        if timeline_steps and engine.is_healthy:  # all prompts are in: decode steps follow when all are computed
            timeline = engine.record_timeline(timeline_steps, decode_only=True)
        if progress is not None:
            watch([handle for handle in handles if handle is not None], progress)
        outputs: list[RequestOutput | None] = []
        for handle in handles:
            try:
                outputs.append(handle.result() if handle is not None else None)
            except CBatchError as error:
                first_error = first_error or error
                outputs.append(None)
    except BaseException:
        for handle in handles:
            if handle is not None:
                handle.abort()
        raise
    stats = engine.stats()
    done = [output for output in outputs if output is not None]
    figures = {
        "model": name,
        "dtype": dtype,
        "num_requests": len(prompts),
        "failed": len(prompts) - len(done),
        **_rates(done),
        **_latencies(done),
        **{name: stats[name] for name in _OF_STATS},
        "num_preemptions": stats["num_preemptions"] - preemptions_before,
    }
    return Throughput(figures, outputs, first_error, timeline)


def warm_up(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Runs a few short requests, so that kernels are compiled before anything is measured; resets the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    handles = []
    for prompt in prompts[:4]:
        try:
            handles.append(engine.submit(list(prompt), params))
        except CBatchError:
            continue  # it is counted as failed when it is measured
    for handle in handles:
        handle.result()
    engine.reset_prefix_cache()


def random_prompts(num_requests: int, input_len: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of uniformly random token ids, all of one length."""
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (num_requests, input_len)).tolist()
    return ids


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Versions and machine: what a figure needs beside it to mean something."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "cbatch": cbatch.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton")},
        "platform": platform.platform(),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


def _rates(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    starts = [output.metrics.arrival_time for output in outputs if output.metrics.arrival_time is not None]
    ends = [output.metrics.finished_time for output in outputs if output.metrics.finished_time is not None]
    seconds = max(ends) - min(starts) if starts and ends else 0.0

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "input_tokens": num_in,
        "output_tokens": num_out,
        "duration_s": seconds,
        "requests_per_s": rate(len(outputs)),
        "output_tokens_per_s": rate(num_out),
        "total_tokens_per_s": rate(num_in + num_out),
    }


def _latencies(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """Time to first token, from submission, and per output token after it, in ms; None where nothing tells.

    Of several answers, which come side by side, the longest counts.
    """
    first, per_token = [], []
    for output in outputs:
        times, num_out = output.metrics, max(len(answer.token_ids) for answer in output.outputs)
        if times.arrival_time is None or times.first_token_time is None:
            continue
        first.append((times.first_token_time - times.arrival_time) * 1e3)
        if num_out > 1 and times.finished_time is not None:
            per_token.append((times.finished_time - times.first_token_time) * 1e3 / (num_out - 1))
    return {
        f"{name}_ms_p{p}": float(np.percentile(values, p)) if values else None
        for name, values in (("ttft", first), ("tpot", per_token))
        for p in (50, 99)
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]} ({len(names)} logical cores)"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()
