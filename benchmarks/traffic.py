"""Mixed traffic, all at once: seconds, output tokens a second, latencies, activity.

    python -m benchmarks.traffic [--shapes llama-8b llama-1b] [--repeat 2] [--json FILE]

512 requests with the log-normal lengths of ``traffic.csv`` (258,125 prompt and 143,784 output tokens; prompts of 16 to
2,048, outputs of 16 to 1,024) and random token ids come in at once; at most 256 run. Greedy, no stop at an end of
sequence, random weights in bfloat16 (float32 on the CPU). Time runs from the first submission to the last token; a few
short requests go before, untimed. TTFT counts from a request's submission, the wait in the queue included. The last
line is JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import make_parser, needs_gpu, positive, save
from cbatch.bench import environment, run_throughput, warm_up
from cbatch.engine import Engine
from cbatch.models.base import Model
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams

LENGTHS = Path(__file__).with_name("traffic.csv")


def read_lengths(limit: int | None) -> list[tuple[int, int]]:
    """(prompt length, output length) of each request."""
    with LENGTHS.open(newline="") as file:
        lines = list(csv.DictReader(file))[:limit]
    return [(int(line["prompt_len"]), int(line["output_len"])) for line in lines]


def passes(
    model: Model, lengths: list[tuple[int, int]], options: dict[str, Any], repeat: int
) -> Iterator[dict[str, Any]]:
    """The figures of each pass over all requests, on one engine. Fails if a request did not get all its tokens."""
    dice = np.random.default_rng(0)
    params = [
        SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for _, output_len in lengths
    ]
    with Engine.from_model(model, max_model_len=max(map(sum, lengths)), **options) as engine:
        for i in range(repeat):  # with other ids each time
            prompts = [dice.integers(0, model.vocab_size, prompt_len).tolist() for prompt_len, _ in lengths]
            if i == 0:
                warm_up(engine, prompts)
            result = run_throughput(engine, prompts, params)
            if result.first_error is not None:
                raise result.first_error
            figures = {"max_num_batched_tokens": engine.config.max_num_batched_tokens, **result.figures}
            assert figures["output_tokens"] == sum(output_len for _, output_len in lengths)
            print(
                f"{model.name:14} at most {figures['max_num_batched_tokens']} tokens a step: "
                f"{figures['duration_s']:.2f} s  {figures['output_tokens_per_s']:.0f} output tokens/s  "
                f"activity {figures['activity_pct']:.2f}%  p50/p99 TTFT {figures['ttft_ms_p50']:.0f}/"
                f"{figures['ttft_ms_p99']:.0f} ms, TPOT {figures['tpot_ms_p50']:.1f}/{figures['tpot_ms_p99']:.1f} ms  "
                f"{figures['steps']} steps, {figures['num_preemptions']} preemptions",
                flush=True,
            )
            yield figures


def main() -> None:
    parser = make_parser("traffic", __doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "llama-1b"], help="or paths of config files")
    parser.add_argument("--max-num-batched-tokens", nargs="+", type=int, default=[None], help="one engine for each")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--schedule", default="async", choices=["async", "sync"])
    parser.add_argument("--repeat", type=positive, default=1)
    parser.add_argument("--limit", type=positive, help="only the first so many requests")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    lengths = read_lengths(args.limit)
    report: dict[str, Any] = {
        "environment": environment(args.device),
        "num_requests": len(lengths),
        "prompt_tokens": sum(prompt_len for prompt_len, _ in lengths),
        "max_num_seqs": args.max_num_seqs,
        "runs": [],
    }
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    for shape in args.shapes:
        model = load_model(shape, dtype=dtype, device=args.device, load_format="dummy", model_impl="auto")
        for budget in args.max_num_batched_tokens:
            options = {"max_num_seqs": args.max_num_seqs, "schedule": args.schedule, "max_num_batched_tokens": budget}
            for figures in passes(model, lengths, options, args.repeat):
                report["runs"].append(figures)
                save(args.json, report)
        del model  # before the next one is made
    print(json.dumps(report))


if __name__ == "__main__":
    main()
