"""cbatch beside transformers' continuous batching: same model, dtype, prompts and lengths, greedy, in turn.

    python -m benchmarks.vs_transformers [--model smollm2-135m] [--device cpu] [--dtype float32] [--json FILE]

Both compute with the same weights and continue every prompt by exactly ``--output-len`` tokens (no stop at an
end of sequence), so the work is the same; the run fails if the numbers of tokens differ. Time runs from the first
submission to the last token: transformers' allocation of its cache, which ``generate_batch`` does anew in each call, is
not counted against it (``wall_s`` has it). Each side is warmed up first. They take turns ``--rounds`` times, and the
fastest run of each counts: on two cores that other processes use too, the ratio of single runs of one commit went from
1.06 to 1.77. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks.common import make_parser, needs_gpu, positive, save
from cbatch import Engine, SamplingParams
from cbatch.bench import environment, run_throughput, warm_up
from cbatch.models.demo import NAME, ensure_demo_model
from cbatch.prompts import encode_prompt, render_chat

Run = tuple[dict[str, Any], list[list[int]]]  # figures, and the tokens of each sequence
PROMPTS = Path(__file__).resolve().parent.parent / "cbatch" / "data" / "demo_prompts.json"


def run_cbatch(model: str | PreTrainedModel, prompts: list[list[int]], output_len: int, **options: Any) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    with Engine.from_model(model, **options) as engine:
        warm_up(engine, prompts)
        started = time.perf_counter()
        result = run_throughput(engine, prompts, params)
        wall = time.perf_counter() - started
    if result.first_error is not None:
        raise result.first_error
    tokens = [output.outputs[0].token_ids for output in result.outputs if output is not None]
    return {**result.figures, "wall_s": wall}, tokens


def run_transformers(model: PreTrainedModel, prompts: list[list[int]], output_len: int) -> Run:
    def config(max_new_tokens: int) -> GenerationConfig:  # an eos of -1 is transformers' own way to say "none" here
        return GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=-1, pad_token_id=0)

    model.generate_batch(prompts[:4], generation_config=config(4))
    started = time.perf_counter()
    results = list(model.generate_batch(prompts, generation_config=config(output_len), record_timestamps=True).values())
    wall = time.perf_counter() - started
    tokens = [list(result.generated_tokens) for result in results]
    seconds = max(result.timestamps[-1] for result in results) - min(result.created_time for result in results)
    num_out = sum(map(len, tokens))
    return {
        "num_requests": len(prompts),
        "output_tokens": num_out,
        "duration_s": seconds,
        "output_tokens_per_s": num_out / seconds,
        "wall_s": wall,
    }, tokens


def main() -> int:
    parser = make_parser("vs_transformers", __doc__)
    parser.add_argument("--model", default=NAME, help="alias, folder or hub name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-requests", type=positive, default=32)
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--schedule", default="async", choices=["async", "sync"])
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--same-module", action="store_true", help="cbatch runs transformers' module, not its decoder")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(ensure_demo_model()) if args.model == NAME else args.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    chats = [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    encoded = [encode_prompt(tokenizer, chat, add_special_tokens=False) for chat in chats]
    prompts = [encoded[i % len(encoded)] for i in range(args.num_requests)]

    options: dict[str, Any] = {"schedule": args.schedule}
    if args.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = args.max_num_batched_tokens
    if not args.same_module:
        options |= {"dtype": args.dtype, "device": args.device}
    runs: dict[str, list[Run]] = {"cbatch": [], "transformers": []}
    for _ in range(args.rounds):
        runs["cbatch"].append(run_cbatch(model if args.same_module else folder, prompts, args.output_len, **options))
        runs["transformers"].append(run_transformers(model, prompts, args.output_len))
        for name, side in runs.items():
            figures = side[-1][0]
            print(
                f"{name:12}  {figures['output_tokens_per_s']:9.1f} output tokens/s  ({figures['duration_s']:.1f} s)",
                flush=True,
            )
    (ours, our_tokens), (theirs, their_tokens) = (
        max(side, key=lambda run: float(run[0]["output_tokens_per_s"])) for side in runs.values()
    )

    ratio = ours["output_tokens_per_s"] / theirs["output_tokens_per_s"]
    same = sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True))
    print(f"ratio {ratio:.2f}; {same} of {len(prompts)} sequences match token for token")
    result = {
        "model": args.model,
        "dtype": args.dtype,
        "ratio": ratio,
        "matching_sequences": same,
        "output_tokens_per_s_by_round": {
            name: [run[0]["output_tokens_per_s"] for run in side] for name, side in runs.items()
        },
        "environment": environment(args.device),
        "cbatch": {**ours, "model": args.model},
        "transformers": theirs,
    }
    save(args.json, result)
    print(json.dumps(result))
    expected = [args.output_len] * len(prompts)
    if any(list(map(len, tokens)) != expected for side in runs.values() for _, tokens in side):
        print("the two did not do the same work: numbers of output tokens differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
