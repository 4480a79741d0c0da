"""A prompt of 100,000 tokens that comes while 32 requests decode: what it does to them, and they to it.

    python -m benchmarks.long_prompt [--shape llama-8b] [--json FILE]

Three windows on one engine: the long prompt alone (its TTFT); 32 requests alone (their inter-token latencies); both,
from the long prompt's submission to its first token. Two ratios come out of it, of the latencies' 99th percentile and
of the TTFT. Streams are read in one event loop. Greedy, random weights in bfloat16 (float32 on the CPU),
random ids, other ones for the second long prompt. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from benchmarks.clients import milliseconds, send
from benchmarks.common import above_zero, make_parser, needs_gpu, positive, save
from cbatch.bench import environment, random_prompts, warm_up
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


async def measure(
    engine: Engine, long: list[list[int]], short: list[list[int]], seconds: float, most_tokens: int
) -> dict[str, Any]:
    """``long`` are two prompts of one length, ``short`` those of the requests that run beside the second."""
    alone = await send(engine, long[0], greedy(1)).read()

    streams = [send(engine, prompt, greedy(most_tokens)) for prompt in short]
    readers = [asyncio.create_task(stream.read()) for stream in streams]
    while not all(stream.times for stream in streams):
        await asyncio.sleep(0.01)
        for reader in readers:
            if reader.done():
                await reader  # raises what ended it, for which the others would wait for ever
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    steps = engine.stats()["steps"]
    beside = await send(engine, long[1], greedy(1)).read()
    steps = engine.stats()["steps"] - steps
    assert not any(reader.done() for reader in readers), "a request ended before the long prompt did: --most-tokens"
    for stream in streams:
        stream.handle.abort()
    await asyncio.gather(*readers)

    def gaps(begin: float, end: float) -> list[float]:
        return [gap for stream in streams for gap in stream.gaps_s(begin, end)]

    figures: dict[str, Any] = {
        "ttft_alone_s": alone.ttft_s,
        "ttft_beside_s": beside.ttft_s,
        "steps_beside": steps,
        **milliseconds("itl_undisturbed", gaps(begin, end)),
        **milliseconds("itl_disturbed", gaps(beside.sent, beside.times[0])),
    }
    if figures["itl_undisturbed_ms_p99"] is None or figures["itl_disturbed_ms_p99"] is None:
        sys.exit("no token came in one of the windows: more --seconds, or a larger --prompt-len")
    figures["ttft_ratio"] = figures["ttft_beside_s"] / figures["ttft_alone_s"]
    figures["itl_p99_ratio"] = figures["itl_disturbed_ms_p99"] / figures["itl_undisturbed_ms_p99"]
    return figures


def main() -> None:
    parser = make_parser("long_prompt", __doc__)
    parser.add_argument("--shape", default="llama-8b", help="or the path of a config file")
    parser.add_argument("--num-running", type=positive, default=32)
    parser.add_argument("--prompt-len", type=positive, default=100_000)
    parser.add_argument("--short-len", type=positive, default=128, help="prompts of those that run beside it")
    parser.add_argument("--most-tokens", type=positive, default=20_000, help="new tokens of those, more than they need")
    parser.add_argument("--seconds", type=above_zero, default=3.0, help="of the undisturbed window")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--itl-target-ms", type=float, default=12.0, help="of the engine; 0: none")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    model: Any = load_model(args.shape, dtype=dtype, device=args.device, load_format="dummy", model_impl="auto")
    long = random_prompts(2, args.prompt_len, model.vocab_size, 0)
    short = random_prompts(args.num_running, args.short_len, model.vocab_size, 1)
    options = {
        "max_num_seqs": args.num_running + 1,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "itl_target_ms": args.itl_target_ms or None,
        "max_model_len": max(args.prompt_len + 1, args.short_len + args.most_tokens),
    }
    with Engine.from_model(model, **options) as engine:
        warm_up(engine, random_prompts(4, 64, model.vocab_size, 2))
        figures = asyncio.run(measure(engine, long, short, args.seconds, args.most_tokens))
        figures = {"max_num_batched_tokens": engine.config.max_num_batched_tokens, **figures}
    report = {
        "environment": environment(args.device),
        "model": args.shape,
        "num_running": args.num_running,
        "prompt_len": args.prompt_len,
        "itl_target_ms": args.itl_target_ms or None,
        **figures,
    }
    save(args.json, report)
    print(
        f"{args.prompt_len} tokens beside {args.num_running} requests: TTFT {figures['ttft_beside_s']:.2f} s, alone "
        f"{figures['ttft_alone_s']:.2f} s, ratio {figures['ttft_ratio']:.2f}; ITL p99 "
        f"{figures['itl_disturbed_ms_p99']:.1f} ms, undisturbed {figures['itl_undisturbed_ms_p99']:.1f} ms, ratio "
        f"{figures['itl_p99_ratio']:.2f}; {figures['steps_beside']} steps",
        flush=True,
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
