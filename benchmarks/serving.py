"""A server's day: requests of many lengths that come at random times, each read as a stream.

    python -m benchmarks.serving [--shape llama-8b] [--rates 20] [--prefix-caching on off] [--json FILE]

The log-normal lengths of ``traffic.csv``, random token ids, and Poisson arrivals at so many requests a second; all
streams are read in one event loop of this process. Greedy, no stop at an end of sequence, random weights in bfloat16
(float32 on the CPU). No two prompts share anything: this shows what the cache costs, ``benchmarks.shared_prefix`` what
it gives. TTFT runs from a request's submission, the wait in the queue included; ITL are the gaps between a stream's
tokens, TPOT their mean of a request. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np

from benchmarks.clients import at_their_times, milliseconds
from benchmarks.common import above_zero, make_parser, needs_gpu, positive, save
from benchmarks.traffic import read_lengths
from cbatch.bench import environment, random_prompts, warm_up
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams


def serve(engine: Engine, lengths: list[tuple[int, int]], rate: float, seed: int) -> dict[str, Any]:
    """The figures of all requests at one rate. Fails if one did not get all its tokens."""
    dice = np.random.default_rng(seed)
    arrivals = dice.exponential(1 / rate, len(lengths)).cumsum()
    prompts = [dice.integers(0, engine.model.vocab_size, prompt_len).tolist() for prompt_len, _ in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for _, output_len in lengths
    ]
    engine.reset_stats()
    streams = asyncio.run(at_their_times(engine, arrivals.tolist(), prompts, params))
    stats = engine.stats()
    assert [stream.num_tokens for stream in streams] == [output_len for _, output_len in lengths]
    duration = max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)
    return {
        "rate": rate,
        "num_requests": len(streams),
        "duration_s": duration,
        "requests_per_s": len(streams) / duration,
        "output_tokens_per_s": sum(stream.num_tokens for stream in streams) / duration,
        **milliseconds("ttft", (stream.ttft_s for stream in streams)),
        **milliseconds("tpot", (stream.tpot_s for stream in streams)),
        **milliseconds("itl", (gap for stream in streams for gap in stream.gaps_s())),
        **milliseconds("latency", (stream.times[-1] - stream.sent for stream in streams)),
        "steps": stats["steps"],
        "activity_kind": stats["activity_kind"],
        "activity_pct": stats["activity_pct"],
        "hit_rate": stats["num_hit_tokens"] / stats["num_asked_tokens"],
    }


def main() -> None:
    parser = make_parser("serving", __doc__)
    parser.add_argument("--shape", default="llama-8b", help="or the path of a config file")
    parser.add_argument(
        "--rates", nargs="+", type=above_zero, default=[20.0], help="requests a second; one pass for each"
    )
    parser.add_argument("--limit", type=positive, help="only the first so many requests")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--itl-target-ms", type=float, help="of the engine")
    parser.add_argument("--prefix-caching", nargs="+", choices=["on", "off"], default=["on"], help="a pass for each")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    lengths = read_lengths(args.limit)
    report: dict[str, Any] = {"environment": environment(args.device), "model": args.shape, "runs": []}
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    model: Any = load_model(args.shape, dtype=dtype, device=args.device, load_format="dummy", model_impl="auto")
    names = ("max_num_seqs", "max_num_batched_tokens", "itl_target_ms")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    for caching in args.prefix_caching:
        options["enable_prefix_caching"] = caching == "on"
        with Engine.from_model(model, max_model_len=max(map(sum, lengths)), **options) as engine:
            warm_up(engine, random_prompts(4, 64, model.vocab_size, 1))
            for seed, rate in enumerate(args.rates):
                figures = {"enable_prefix_caching": caching == "on", **serve(engine, lengths, rate, seed)}
                report["runs"].append(figures)
                save(args.json, report)
                print(
                    f"{rate:6.1f} requests/s, prefix cache {caching:3}: {figures['output_tokens_per_s']:7.0f} output "
                    f"tokens/s  p50/p99 TTFT {figures['ttft_ms_p50']:.0f}/{figures['ttft_ms_p99']:.0f} ms, "
                    f"TPOT {figures['tpot_ms_p50']:.1f}/{figures['tpot_ms_p99']:.1f} ms, "
                    f"ITL {figures['itl_ms_p50']:.1f}/{figures['itl_ms_p99']:.1f} ms  "
                    f"activity {figures['activity_pct']:.2f}%  hits {figures['hit_rate']:.1%}",
                    flush=True,
                )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
