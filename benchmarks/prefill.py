"""Prompts alone: tokens a second, and the share of the GPU's own rate of matrix products.

    python -m benchmarks.prefill [--shape llama-8b] [--max-num-batched-tokens 4096 8192 16384] [--json FILE]

16 prompts of 4,096 random tokens, one output token each, random weights in bfloat16 (float32 on the CPU). Time runs
from the first submission to the last token; all prompts go through once before, untimed. Counted as operations, with n
prompts of L tokens:

    layers       2 x parameters of their matrices x n L
    head         2 x its parameters x n                              (only a prompt's last token has logits)
    attention    4 x heads x head size x layers x n L (L + 1) / 2    (causal: q k and weights v, a multiply and an add)

The rate beside it is that of 8192 x 8192 x 8192 products of random bfloat16 matrices, measured at the start of the same
run. The last line is JSON.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import make_parser, matrix_rate, needs_gpu, positive, save
from cbatch.bench import environment, random_prompts, run_throughput
from cbatch.engine import Engine
from cbatch.models.decoder import Decoder
from cbatch.models.loader import load_model
from cbatch.sampling_params import SamplingParams


def count_operations(model: Decoder, num_prompts: int, length: int) -> dict[str, int]:
    """Operations of each part, by the formulas above."""
    config, layers = model.config, model.weights.layers
    in_layers = sum(part.weight.numel() for layer in layers for part in (layer.qkv, layer.o, layer.up, layer.down))
    pairs = num_prompts * length * (length + 1) // 2
    return {
        "layers": 2 * in_layers * num_prompts * length,
        "head": 2 * model.weights.head.weight.numel() * num_prompts,
        "attention": 4 * config.num_heads * config.head_dim * config.num_layers * pairs,
    }


def main() -> None:
    parser = make_parser("prefill", __doc__)
    parser.add_argument("--shape", default="llama-8b", help="or the path of a config file")
    parser.add_argument("--num-prompts", type=positive, default=16)
    parser.add_argument("--input-len", type=positive, default=4096)
    parser.add_argument("--max-num-batched-tokens", nargs="+", type=int, default=[None], help="one engine for each")
    parser.add_argument("--repeat", type=positive, default=3, help="timed passes over all prompts; the median counts")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    gpu = args.device != "cpu"
    model: Any = load_model(
        args.shape,
        dtype="bfloat16" if gpu else "float32",
        device=args.device,
        load_format="dummy",
        model_impl="decoder",
    )
    operations = count_operations(model, args.num_prompts, args.input_len)
    tflop = sum(operations.values()) / 1e12
    report: dict[str, Any] = {
        "environment": environment(args.device),
        "model": model.name,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len,
        "tflop": {part: count / 1e12 for part, count in operations.items()},
        "runs": [],
    }
    rate = None
    if gpu:
        report["matrix_tflop_per_s"] = rate = matrix_rate() / 1e12
        print(f"matrix products alone: {rate:.1f} TFLOP/s", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    for budget in args.max_num_batched_tokens:
        with Engine.from_model(
            model,
            max_num_seqs=args.num_prompts,
            max_model_len=args.input_len + 1,
            max_num_batched_tokens=budget,
        ) as engine:
            runs = []
            for seed in range(args.repeat + 1):  # other ids each time
                prompts = random_prompts(args.num_prompts, args.input_len, model.vocab_size, seed)
                result = run_throughput(engine, prompts, params)
                if result.first_error is not None:
                    raise result.first_error
                runs.append(result.figures)
            figures = sorted(runs[1:], key=lambda run: run["duration_s"])[args.repeat // 2]
            budget = engine.config.max_num_batched_tokens
        seconds = figures["duration_s"]
        share = tflop / seconds / rate if rate else None
        report["runs"].append(
            {
                "max_num_batched_tokens": budget,
                "seconds": seconds,
                "all_seconds": [run["duration_s"] for run in runs[1:]],
                "tokens_per_s": figures["input_tokens"] / seconds,
                "tflop_per_s": tflop / seconds,
                "matrix_rate_share": share,
                "steps": figures["steps"],
                "activity_pct": figures["activity_pct"],
            }
        )
        print(
            f"{model.name} {budget:6} tokens a step at most {seconds:7.3f} s "
            f"{figures['input_tokens'] / seconds:8.0f} tokens/s {tflop / seconds:7.1f} TFLOP/s "
            + (f"({share:.1%} of the products')" if share else "")
            + f"  {figures['steps']} steps, activity {figures['activity_pct']:.2f}%",
            flush=True,
        )
        save(args.json, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
