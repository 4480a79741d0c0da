"""Prompts that share a beginning: 1,000 requests in 64 groups of 1,024 equal tokens, with the prefix cache and without.

    python -m benchmarks.shared_prefix [--shape llama-8b] [--json FILE]

All come in at once, in random order; each has 64 tokens of its own behind the group's, and 64 new ones. Greedy, no
stop at an end of sequence, random weights in bfloat16 (float32 on the CPU); at most 256 run. Time runs from the first
submission to the last token, TTFT from a request's submission, so it has the wait in the queue. ``hit_rate`` is the
share of prompt tokens that were taken from the cache; best is (requests - groups) x prefix of all. The last line is
JSON.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from benchmarks.common import make_parser, needs_gpu, positive, save
from cbatch.bench import environment, random_prompts, run_throughput, warm_up
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams


def make_prompts(num_requests: int, num_groups: int, prefix_len: int, own_len: int, vocab_size: int) -> list[list[int]]:
    """Groups of as equal a size as can be, in random order."""
    dice = np.random.default_rng(0)
    prefixes = dice.integers(0, vocab_size, (num_groups, prefix_len)).tolist()
    tails = dice.integers(0, vocab_size, (num_requests, own_len)).tolist()
    groups = dice.permutation(num_requests) % num_groups
    return [prefixes[group] + tail for group, tail in zip(groups, tails, strict=True)]


def main() -> None:
    parser = make_parser("shared_prefix", __doc__)
    parser.add_argument("--shape", default="llama-8b", help="or the path of a config file")
    parser.add_argument("--num-requests", type=positive, default=1000)
    parser.add_argument("--num-groups", type=positive, default=64)
    parser.add_argument("--prefix-len", type=positive, default=1024)
    parser.add_argument("--own-len", type=positive, default=64)
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--scheduling-policy", default="fcfs", choices=["fcfs", "longest_prefix"])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    model: Any = load_model(args.shape, dtype=dtype, device=args.device, load_format="dummy", model_impl="auto")
    lengths = args.prefix_len, args.own_len
    prompts = make_prompts(args.num_requests, args.num_groups, *lengths, model.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    report: dict[str, Any] = {
        "environment": environment(args.device),
        "num_groups": args.num_groups,
        "prefix_len": args.prefix_len,
        "own_len": args.own_len,
        "output_len": args.output_len,
        "best_hit_rate": (args.num_requests - args.num_groups) * args.prefix_len / (args.num_requests * sum(lengths)),
        "runs": [],
    }
    for caching in (True, False):
        options = {"max_num_seqs": args.max_num_seqs, "max_model_len": sum(lengths) + args.output_len}
        policy = args.scheduling_policy if caching else "fcfs"
        with Engine.from_model(model, enable_prefix_caching=caching, scheduling_policy=policy, **options) as engine:
            warm_up(engine, random_prompts(4, sum(lengths), model.vocab_size, 1))
            result = run_throughput(engine, prompts, params)
            if result.first_error is not None:
                raise result.first_error
        figures = {"enable_prefix_caching": caching, "scheduling_policy": policy, **result.figures}
        figures["hit_rate"] = figures["num_hit_tokens"] / figures["num_asked_tokens"]
        assert figures["output_tokens"] == args.num_requests * args.output_len
        report["runs"].append(figures)
        save(args.json, report)
        print(
            f"prefix cache {'on ' if caching else 'off'} {figures['duration_s']:7.2f} s  "
            f"{figures['output_tokens_per_s']:7.0f} output tokens/s  hits {100 * figures['hit_rate']:.1f}%  "
            f"p50/p99 TTFT {figures['ttft_ms_p50']:.0f}/{figures['ttft_ms_p99']:.0f} ms, "
            f"TPOT {figures['tpot_ms_p50']:.1f}/{figures['tpot_ms_p99']:.1f} ms  "
            f"activity {figures['activity_pct']:.2f}%",
            flush=True,
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
