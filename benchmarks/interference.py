"""What disturbs the loop: busy CPUs, 64 consumers in one event loop, 64 in threads; each streams text. On one GPU.

    python -m benchmarks.interference --tokenizer FOLDER [--model llama-8b] [--json FILE]

Each case runs on an engine of its own in this process: activity between steps, the step's time and the host's time
while every request decodes. ``gc_ms_max`` is the longest pause of Python's garbage collector meanwhile. Random weights
draw from the whole vocabulary, so ids are folded into the tokenizer's. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import above_zero, make_parser, needs_gpu, positive, save
from benchmarks.decode import wait_until
from cbatch import AsyncLLM
from cbatch.bench import environment, random_prompts
from cbatch.detokenizer import Detokenizer
from cbatch.models.loader import load_model, load_tokenizer
from cbatch.sampling_params import RequestOutputKind, SamplingParams


class Folded:
    """A tokenizer that knows every id: those beyond its vocabulary stand for others of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return str(self._tokenizer.decode([t % self._size for t in token_ids], **options))


def spin(stop: Any) -> None:
    while not stop.is_set():
        sum(range(1000))


class Pauses:
    """Times the collector while it is in the ``with`` block."""

    def __enter__(self) -> Pauses:
        self.longest_ms, self._start = 0.0, 0.0
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.longest_ms = max(self.longest_ms, (time.perf_counter() - self._start) * 1e3)


def watch(llm: AsyncLLM, seconds: float) -> dict[str, Any]:
    """Wait until all decode, then measure for a while."""
    wait_until(llm.engine, lambda: llm.stats()["num_running"] and not llm.stats()["num_waiting"])
    time.sleep(1.0)
    with Pauses() as pauses:
        llm.engine.reset_stats()
        time.sleep(seconds)
        stats = llm.stats()
    names = ("activity_pct", "ms_per_step_p50", "ms_per_step_p99", "steps", "num_running")
    host = {name: value for name, value in stats.items() if name.startswith("host_us")}
    return {**{name: stats[name] for name in names}, **host, "gc_ms_max": pauses.longest_ms}


def consume_in_loop(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams, seconds: float) -> dict[str, Any]:
    async def read(prompt: list[int]) -> int:
        length = 0
        async for output in llm.generate(prompt, params):
            length += len(output.outputs[0].text)
        return length

    async def everyone() -> dict[str, Any]:
        readers = [asyncio.create_task(read(prompt)) for prompt in prompts]
        figures = await asyncio.to_thread(watch, llm, seconds)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return figures

    return asyncio.run(everyone())


def consume_in_threads(
    llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams, seconds: float
) -> dict[str, Any]:
    handles = [llm.engine.submit(prompt, params) for prompt in prompts]

    def read(handle: Any) -> None:
        detokenizer = Detokenizer(llm.get_tokenizer(), handle.prompt_token_ids, params)  # type: ignore[arg-type]
        finish = None
        while finish is None:
            chunk = handle.next_chunk()
            finish = chunk.finish_reason
            detokenizer.push(chunk.token_ids, finish)

    readers = [threading.Thread(target=read, args=(handle,)) for handle in handles]
    for reader in readers:
        reader.start()
    figures = watch(llm, seconds)
    for handle in handles:
        handle.abort()
    for reader in readers:
        reader.join()
    return figures


def consume_nothing(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams, seconds: float) -> dict[str, Any]:
    handles = [llm.engine.submit(prompt, params) for prompt in prompts]
    figures = watch(llm, seconds)
    for handle in handles:
        handle.abort()
    return figures


def beside_busy_cpus(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams, seconds: float) -> dict[str, Any]:
    """As many busy processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes = [context.Process(target=spin, args=(stop,), daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    time.sleep(3.0)  # until all of them spin
    try:
        return consume_nothing(llm, prompts, params, seconds)
    finally:
        stop.set()
        for process in processes:
            process.join()


CASES: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "nobody": (consume_nothing, 32),
    "busy CPUs": (beside_busy_cpus, 32),
    "64 asyncio consumers": (consume_in_loop, 64),
    "64 threads": (consume_in_threads, 64),
}


def main() -> None:
    parser = make_parser("interference", __doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=above_zero, default=6.0)
    parser.add_argument("--depth", type=positive)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    needs_gpu(parser)

    model: Any = load_model(args.model, dtype="bfloat16", device="cuda", load_format="dummy", model_impl="auto")
    tokenizer = Folded(load_tokenizer(args.tokenizer))
    params = SamplingParams(temperature=0.0, max_tokens=3500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    report: dict[str, Any] = {"environment": environment("cuda"), "model": args.model, "cases": {}}
    for name in args.cases:
        consume, count = CASES[name]
        options = {"max_num_seqs": count, "max_model_len": 4096, **({"depth": args.depth} if args.depth else {})}
        llm = AsyncLLM(model, tokenizer, **options)
        try:
            figures = consume(llm, random_prompts(count, 64, model.vocab_size, 0), params, args.seconds)
        finally:
            llm.close()
        if figures["num_running"] != count:
            sys.exit(f"{name}: {figures['num_running']} of {count} requests decoded to the end: fewer --seconds")
        report["cases"][name] = {"num_requests": count, "depth": llm.engine.config.depth, **figures}
        print(
            f"{name:22} {count:3} requests  activity {figures['activity_pct']:6.2f}%  "
            f"{figures['ms_per_step_p50']:.2f} ms/step (p99 {figures['ms_per_step_p99']:.2f})  host µs "
            f"{figures['host_us_per_step_p50']:.0f} / {figures['host_us_per_step_p99']:.0f}  "
            f"collector {figures['gc_ms_max']:.1f} ms",
            flush=True,
        )
        save(args.json, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
