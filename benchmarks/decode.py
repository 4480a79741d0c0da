"""Steady decode on one GPU: the step's time, activity both ways, host time, and the share of the memory roofline.

    python -m benchmarks.decode [--shapes llama-8b llama-1b] [--contexts 160 4096] [--batches 32] [--json FILE]
    python -m benchmarks.decode --shapes llama-8b --contexts 1024 --batches 1 8 32 33 64 128 256 --schedules async

Random bf16 weights, greedy, prompts of random ids. One engine a shape and schedule serves all contexts and batches, one
after the other, with room for the longest context and 2,048 tokens more. For each, a window of steps in which exactly
so many requests decode, 100 steps after the last prompt (so a context has some 130 tokens at least): first timed by the
engine's own events, then recorded by the CUDA profiler for ``activity_cupti_pct`` and what a step launches. The
roofline share is (weight bytes + KV bytes of the live context, or of a layer's window where that is shorter) over the
read bandwidth measured at the start of the same run (a sum over 2 GiB), over the step's time. Where batches n and n + 1
are both there, so is the ratio of their steps. The last line is JSON.

``--sampling one-grammar`` and ``one-processor`` are greedy batches in which one request has a JSON schema (which needs
llguidance; the tokens are made up) or a logits processor: what the others pay for it is a step's time over that of
``greedy``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.common import (
    busy_share,
    device_intervals,
    is_copy,
    is_on_device,
    make_parser,
    needs_gpu,
    positive,
    read_bandwidth,
    save,
)
from benchmarks.tokens import made_up_tokenizer
from cbatch.bench import environment, random_prompts
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams, StructuredOutputsParams
from cbatch.scheduler.kv_spec import KVSpec

ROOM = 2048  # tokens that a request may grow while others are still at their prompts, and in its window
SETTLE = 100  # steps between the prompts and the window: prompts heat the GPU, which then lowers its clocks for a while
GREEDY = SamplingParams(temperature=0.0, max_tokens=ROOM, ignore_eos=True, detokenize=False)
SAMPLING = {
    "greedy": GREEDY,
    "everything": replace(
        GREEDY,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=dict.fromkeys(range(0, 30000, 100), -1.0),
        min_tokens=ROOM,
        stop_token_ids=[7, 8, 9],
        logprobs=20,
        seed=1,
    ),
}


# Of one request of the batch; the others are greedy. The list of records is longer than there is room.
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "kind": {"enum": [1, 2]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
RECORDS = StructuredOutputsParams(json={"type": "array", "items": RECORD, "minItems": 400}, disable_any_whitespace=True)
ONE_ROW = {
    "one-grammar": replace(GREEDY, temperature=1.0, seed=1, structured_outputs=RECORDS),
    "one-processor": replace(GREEDY, logits_processors=(lambda token_ids, logits: logits,)),
}


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that is no LM head too."""
    table = module.get_input_embeddings().weight  # type: ignore[operator]
    tied = module.get_output_embeddings().weight is table  # type: ignore[operator]
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    return total if tied else total - table.numel() * table.element_size()


def wait_until(engine: Engine, done: Callable[[], bool]) -> None:
    """Look every 20 ms: more often would take the interpreter from the loop. Raises what the engine dies of."""
    while not done():
        if not engine.is_healthy:
            engine.submit([0])
        time.sleep(0.02)


def decoding(engine: Engine, handles: list[RequestHandle]) -> None:
    """Wait until every request has its first token, and a little longer."""
    wait_until(engine, lambda: all(handle.metrics.first_token_time is not None for handle in handles))
    time.sleep(0.05)


def idle(engine: Engine) -> None:
    """Wait until nothing runs."""
    wait_until(engine, lambda: not (engine.stats()["num_running"] or engine.stats()["num_waiting"]))


def steps_from_now(engine: Engine, count: int) -> None:
    """Wait for so many steps, or until nothing runs any more."""
    end = engine.stats()["steps"] + count
    wait_until(engine, lambda: engine.stats()["steps"] >= end or not engine.stats()["num_running"])


def profile(engine: Engine, num_steps: int) -> dict[str, Any]:
    """What the CUDA profiler saw from the first kernel on: share of time in kernels or copies, launches. Or nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        steps_from_now(engine, num_steps)
    intervals = device_intervals(recorded)
    found = launches(recorded.profiler.kineto_results.events())
    return {"activity_cupti_pct": 100 * busy_share(intervals), **found} if intervals and found else {}


def launches(events: Iterable[Any]) -> dict[str, Any]:
    """What a step launches, over the whole steps of a profile: from its first copy to the host, one a step, to its
    last. Or nothing.

    The profiler goes on behind the steps that were waited for, some of them for a few ms: they are in it, too.
    """
    events = list(events)
    first = min((e.start_ns() for e in events if is_on_device(e) and not is_copy(e)), default=0)
    landings = sorted(e.start_ns() for e in events if is_on_device(e) and "DtoH" in e.name() and e.start_ns() >= first)
    if len(landings) < 2:
        return {}
    begin, end, num_steps = landings[0], landings[-1], len(landings) - 1
    copies: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    num_kernels = 0
    for event in events:
        if not begin <= event.start_ns() < end:
            continue
        if is_on_device(event):
            if is_copy(event):
                copies[event.name()] += 1
            else:
                num_kernels += 1
        elif event.name().startswith(("cuda", "cu")):
            calls[event.name()] += 1
    return {
        "kernels_per_step": num_kernels / num_steps,
        "copies_per_step": {name: count / num_steps for name, count in copies.items()},
        "calls_per_step": {name: round(count / num_steps, 2) for name, count in calls.most_common(12)},
        "profiled_steps": num_steps,
    }


def kv_bytes(specs: Iterable[KVSpec], itemsize: int, context: float) -> float:
    """Bytes of keys and values that one row of a step reads: a layer with a window no more than that."""
    return itemsize * sum(spec.elements_per_token * min(context, spec.window or context) for spec in specs)


def measure(
    engine: Engine, context: int, batch: int, sampling: str, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any] | None:
    """One window of decode steps of ``batch`` requests that starts at about ``context`` tokens each.

    None if not all of them decoded all the time: there is no memory for them, or their tokens did not last.
    """
    model: Any = engine.model
    rest = SAMPLING.get(sampling, GREEDY)
    params = [ONE_ROW.get(sampling, rest), *[rest] * (batch - 1)]
    preemptions = engine.stats()["num_preemptions"]
    input_len = max(1, context - 32 - SETTLE)
    prompts = random_prompts(batch, input_len, model.vocab_size, 0)
    handles = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    decoding(engine, handles)
    steps_from_now(engine, SETTLE)
    engine.reset_stats()
    first = engine.stats()["num_output_tokens"]
    begin = time.perf_counter()
    steps_from_now(engine, args.steps)
    stats = engine.stats()
    seconds = time.perf_counter() - begin
    generated = sum(len(h._token_ids) for h in handles) / len(handles)
    mean_context = input_len + generated - stats["steps"] / 2
    profiled = profile(engine, args.profiled_steps) if args.profiled_steps else {}
    after = engine.stats()
    for handle in handles:
        handle.abort()
    idle(engine)
    if after["num_running"] != batch or after["num_preemptions"] != preemptions:
        return None
    weights = getattr(model, "num_weight_bytes", None) or weight_bytes(model._module)
    needed = weights + batch * kv_bytes(model.kv_specs, model.dtype.itemsize, mean_context)
    step_ms = stats["ms_per_step_p50"]
    names = ("steps", "activity_pct", "ms_per_step_p50", "ms_per_step_p99", "num_graphs")
    host = {name: value for name, value in stats.items() if name.startswith("host_us")}
    return {
        "model": model.name,
        "model_impl": type(model).__name__,
        "schedule": engine.config.schedule,
        "depth": engine.config.depth,
        "max_model_len": engine.config.max_model_len,
        "num_requests": batch,
        "sampling": sampling,
        "context": context,
        "mean_context": round(mean_context),
        **{name: stats[name] for name in names},
        **host,
        "output_tokens_per_s": (stats["num_output_tokens"] - first) / seconds,
        "roofline_ms": needed / bandwidth * 1e3,
        "roofline_share_pct": 100 * needed / bandwidth / (step_ms * 1e-3),
        **profiled,
    }


def windows(model: Any, schedule: str, args: argparse.Namespace, bandwidth: float) -> Iterator[dict[str, Any]]:
    """All windows of one engine, printed as they come."""
    options = {"max_num_seqs": max(args.batches), "max_model_len": max(args.contexts) + ROOM, "schedule": schedule}
    if args.depth and schedule == "async":
        options["depth"] = args.depth
    start = time.perf_counter()
    tokenizer = made_up_tokenizer(model.vocab_size) if "one-grammar" in args.sampling else None
    with Engine.from_model(model, tokenizer, **options) as engine:
        ready_s = time.perf_counter() - start
        for context, batch, sampling in product(args.contexts, args.batches, args.sampling):
            run = measure(engine, context, batch, sampling, args, bandwidth)
            if run is None:
                what = f"{model.name:14} context {context:5} batch {batch:3} {schedule:5} {sampling}"
                print(f"{what} left out: not all decoded throughout", flush=True)
                continue
            print(
                f"{model.name:14} context {run['mean_context']:5} batch {batch:3} {schedule:5} {sampling:6} "
                f"{run['ms_per_step_p50']:7.3f} ms/step {run['output_tokens_per_s']:7.0f} tokens/s "
                f"activity {run['activity_pct']:6.2f}% cupti {run.get('activity_cupti_pct', 0):5.1f}% "
                f"kernels {run.get('kernels_per_step', 0):6.0f} host µs {run['host_us_per_step_p50']:6.0f} "
                f"{run['host_us_per_step_p99']:6.0f} {run['host_us_per_step_p999']:6.0f} "
                f"roofline {run['roofline_share_pct']:4.1f}%",
                flush=True,
            )
            yield {**run, "engine_ready_s": ready_s}


def ratios(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one request more costs: the step at n + 1 over the step at n, wherever both were measured."""
    step_ms = {
        (run["model"], run["schedule"], run["context"], run["num_requests"]): run["ms_per_step_p50"]
        for run in runs
        if run.get("sampling", "greedy") == "greedy"
    }
    found = []
    for (model, schedule, context, batch), ms in step_ms.items():
        if more := step_ms.get((model, schedule, context, batch + 1)):
            found.append({"model": model, "schedule": schedule, "context": context, "batch": batch, "ratio": more / ms})
            print(f"{model:14} context {context:5} {schedule:5} {batch + 1} over {batch}: {more / ms:.3f}", flush=True)
    return found


def main() -> None:
    parser = make_parser("decode", __doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "llama-1b", "smollm2-shape"])
    parser.add_argument("--contexts", nargs="+", type=positive, default=[160])
    parser.add_argument(
        "--batches", nargs="+", type=positive, default=[32], help="numbers of requests that decode together"
    )
    kinds = [*SAMPLING, *ONE_ROW]
    parser.add_argument("--sampling", nargs="+", choices=kinds, default=["greedy"], help="what requests ask for")
    parser.add_argument("--schedules", nargs="+", default=["async", "sync"])
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--profiled-steps", type=int, default=20)
    parser.add_argument("--depth", type=positive)
    parser.add_argument("--model-impl", default="auto", choices=["auto", "transformers", "decoder"])
    args = parser.parse_args()
    needs_gpu(parser)

    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    if args.profiled_steps:  # its first use takes a second, which no window should wait for
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            torch.zeros(1, device="cuda")
    report: dict[str, Any] = {"environment": environment("cuda"), "read_bandwidth_TBps": bandwidth / 1e12, "runs": []}
    for shape in args.shapes:
        model: Any = load_model(shape, dtype="bfloat16", device="cuda", load_format="dummy", model_impl=args.model_impl)
        for schedule in args.schedules:
            for run in windows(model, schedule, args, bandwidth):
                report["runs"].append(run)
                save(args.json, report)
        del model
        torch.cuda.empty_cache()
    report["ratios"] = ratios(report["runs"])
    save(args.json, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
