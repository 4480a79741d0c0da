"""Steady decode on one GPU: the step's time, activity both ways, host time, and the share of the memory roofline.

    python -m benchmarks.decode [--shapes llama-8b llama-1b smollm2-shape] [--contexts 160 4096] [--json FILE]

Random bf16 weights, 32 requests, greedy, to fixed lengths. For each shape, context and schedule: a window of steps in
which all requests decode, first timed by the engine's own events, then recorded by the CUDA profiler for
``activity_cupti_pct`` and what a step launches. The roofline share is (weight bytes + KV bytes of the live context)
over the read bandwidth measured at the start of the same run (a sum over 2 GiB), over the step's time. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from cbatch.bench import environment, random_prompts
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams

GIB = 1 << 30


def read_bandwidth() -> float:
    """Bytes a second that a sum over 2 GiB reads: median of 20 replays of a graph."""
    data = torch.empty(2 * GIB // 8, dtype=torch.int64, device="cuda").random_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        data.sum()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            data.sum()
        times = []
        for _ in range(23):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 2 * GIB / (sorted(times[3:])[10] * 1e-3)


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that is no LM head too."""
    table = module.get_input_embeddings().weight  # type: ignore[operator]
    tied = module.get_output_embeddings().weight is table  # type: ignore[operator]
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    return total if tied else total - table.numel() * table.element_size()


def decoding(engine: Engine, handles: list[RequestHandle]) -> None:
    """Wait until every request has its first token, and a little longer."""
    while any(handle.metrics.first_token_time is None for handle in handles):
        time.sleep(0.002)
    time.sleep(0.05)


def steps_from_now(engine: Engine, count: int) -> None:
    start = engine.stats()["steps"]
    while engine.stats()["steps"] < start + count:
        time.sleep(0.001)


def profile(engine: Engine, num_steps: int) -> dict[str, Any]:
    """What the CUDA profiler saw: share of the window in kernels or copies, and what a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        before = engine.stats()["steps"]
        steps_from_now(engine, num_steps)
        seen = engine.stats()["steps"] - before
    kernels: list[tuple[int, int]] = []
    copies: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    num_kernels = 0
    for event in recorded.profiler.kineto_results.events():
        if str(event.device_type()).endswith("CUDA"):
            kernels.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            if "memcpy" in event.name().lower() or "memset" in event.name().lower():
                copies[event.name()] += 1
            else:
                num_kernels += 1
        elif event.name().startswith(("cuda", "cu")):
            calls[event.name()] += 1
    kernels.sort()
    busy, end = 0, kernels[0][0]
    for start, stop in kernels:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return {
        "activity_cupti_pct": 100 * busy / (end - kernels[0][0]),
        "kernels_per_step": num_kernels / seen,
        "copies_per_step": {name: count / seen for name, count in copies.items()},
        "calls_per_step": {name: round(count / seen, 2) for name, count in calls.most_common(12)},
        "profiled_steps": seen,
    }


def measure(model: Any, schedule: str, context: int, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One window of decode steps that starts at about ``context`` tokens a request."""
    options = {"max_num_seqs": args.num_requests, "max_model_len": context + 2048, "schedule": schedule}
    if args.depth and schedule == "async":
        options["depth"] = args.depth
    start = time.perf_counter()
    with Engine.from_model(model, **options) as engine:
        ready_s = time.perf_counter() - start
        prompts = random_prompts(args.num_requests, context - 32, model.vocab_size, 0)
        params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True, detokenize=False)
        handles = [engine.submit(prompt, params) for prompt in prompts]
        decoding(engine, handles)
        engine.reset_stats()
        first = engine.stats()["num_output_tokens"]
        begin = time.perf_counter()
        steps_from_now(engine, args.steps)
        stats = engine.stats()
        seconds = time.perf_counter() - begin
        generated = sum(len(h._token_ids) for h in handles) / len(handles)
        mean_context = context - 32 + generated - stats["steps"] / 2
        profiled = profile(engine, args.profiled_steps) if args.profiled_steps else {}
        for handle in handles:
            handle.abort()
        kv = 2 * sum(s.num_kv_heads * s.k_head_dim for s in model.kv_specs) * model.dtype.itemsize
    weights = getattr(model, "num_weight_bytes", None) or weight_bytes(model._module)
    needed = weights + kv * args.num_requests * mean_context
    step_ms = stats["ms_per_step_p50"]
    names = ("steps", "activity_pct", "ms_per_step_p50", "ms_per_step_p99", "num_graphs")
    host = {name: value for name, value in stats.items() if name.startswith("host_us")}
    return {
        "model": model.name,
        "model_impl": type(model).__name__,
        "schedule": schedule,
        "depth": engine.config.depth,
        "num_requests": args.num_requests,
        "mean_context": round(mean_context),
        **{name: stats[name] for name in names},
        **host,
        "output_tokens_per_s": (stats["num_output_tokens"] - first) / seconds,
        "roofline_ms": needed / bandwidth * 1e3,
        "roofline_share_pct": 100 * needed / bandwidth / (step_ms * 1e-3),
        **profiled,
        "engine_ready_s": ready_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "llama-1b", "smollm2-shape"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[160])
    parser.add_argument("--schedules", nargs="+", default=["async", "sync"])
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profiled-steps", type=int, default=20)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--model-impl", default="auto", choices=["auto", "transformers", "decoder"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    runs = []
    for shape in args.shapes:
        model: Any = load_model(shape, dtype="bfloat16", device="cuda", load_format="dummy", model_impl=args.model_impl)
        for context in args.contexts:
            for schedule in args.schedules:
                run = measure(model, schedule, context, args, bandwidth)
                runs.append(run)
                print(
                    f"{shape:14} context {run['mean_context']:5} {schedule:5} {run['ms_per_step_p50']:7.3f} ms/step "
                    f"activity {run['activity_pct']:6.2f}% cupti {run.get('activity_cupti_pct', 0):5.1f}% "
                    f"kernels {run.get('kernels_per_step', 0):6.0f} host µs {run['host_us_per_step_p50']:6.0f} "
                    f"{run['host_us_per_step_p99']:6.0f} {run['host_us_per_step_p999']:6.0f} "
                    f"roofline {run['roofline_share_pct']:4.1f}%",
                    flush=True,
                )
        del model
        torch.cuda.empty_cache()
    report = {"environment": environment("cuda"), "read_bandwidth_TBps": bandwidth / 1e12, "runs": runs}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
