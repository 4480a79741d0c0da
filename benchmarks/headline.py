"""The work that transformers' asynchronous continuous batching was announced with, in full, on one GPU.

    python -m benchmarks.headline [--model llama-8b] [--output-len 8192] [--schedules async sync] [--json FILE]

32 requests, prompts of 128 tokens, 8,192 new tokens each, greedy, random bf16 weights of the Llama-3.1-8B shape. The
source reports 300.6 s synchronous and 234.5 s asynchronous. Time runs from the first submission to the last token.
The last line is JSON.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import make_parser, needs_gpu, positive, save
from cbatch.bench import environment, random_prompts, run_throughput, warm_up
from cbatch.engine import Engine
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams


def main() -> None:
    parser = make_parser("headline", __doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--num-requests", type=positive, default=32)
    parser.add_argument("--input-len", type=positive, default=128)
    parser.add_argument("--output-len", type=positive, default=8192)
    parser.add_argument("--schedules", nargs="+", default=["async", "sync"])
    args = parser.parse_args()
    needs_gpu(parser)

    model: Any = load_model(args.model, dtype="bfloat16", device="cuda", load_format="dummy", model_impl="auto")
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    prompts = random_prompts(args.num_requests, args.input_len, model.vocab_size, 0)
    report: dict[str, Any] = {"environment": environment("cuda"), "runs": []}
    for schedule in args.schedules:
        length = args.input_len + args.output_len
        with Engine.from_model(
            model, schedule=schedule, max_num_seqs=args.num_requests, max_model_len=length
        ) as engine:
            warm_up(engine, prompts)
            result = run_throughput(engine, prompts, params)
        if result.first_error is not None:  # fewer requests are another work
            raise result.first_error
        figures = result.figures
        report["runs"].append(figures)
        save(args.json, report)
        print(
            f"{schedule:5} {figures['duration_s']:7.2f} s  {figures['output_tokens_per_s']:8.1f} output tokens/s  "
            f"activity {figures['activity_pct']:.2f}%",
            flush=True,
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
