"""From process start to an engine that takes requests: part by part, with Triton's cache cold and warm, on one GPU.

    python -m benchmarks.startup [--model llama-8b] [--profile] [--json FILE]

Random weights. Each start is a process of its own; the parts are what that process measured: ``torch`` from before the
process was made until torch is imported, ``transformers`` its import and ours, ``device`` the CUDA context, then what
the engine says of itself. With ``--profile``, a third process loads the model alone, under Python's profiler and with
launches that wait, and the functions that took longest are printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import make_parser, needs_gpu, save


def start(args: argparse.Namespace, cache: str, child: str, **environment: str) -> dict[str, Any]:
    """One start, in a process of its own, with Triton's cache in the folder ``cache``."""
    command = [sys.executable, "-m", "benchmarks.startup", "--child", child, "--begun", str(time.time())]
    command += ["--model", args.model, "--max-num-seqs", str(args.max_num_seqs), "--device", args.device]
    variables = {**os.environ, "TRITON_CACHE_DIR": cache, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=variables)  # its errors are ours
    if done.returncode:
        sys.exit(f"the process that was started ended with {done.returncode}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    return {"load_format": "dummy", "device": args.device, "dtype": dtype, "model_impl": "auto"}


def engine_child(args: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, float] = {}
    last = args.begun

    def part(name: str) -> None:
        nonlocal last
        now = time.time()
        parts[name] = now - last
        last = now

    part("torch")
    import cbatch.models.loader  # noqa: F401  # what the engine imports when it is given a name
    from cbatch.bench import environment
    from cbatch.engine import Engine
    from cbatch.sampling_params import SamplingParams

    part("transformers")
    torch.zeros(1, device=args.device).item()
    part("device")
    with Engine.from_model(args.model, max_num_seqs=args.max_num_seqs, **load_options(args)) as engine:
        ready = time.time()
        parts |= engine.startup_s
        parts["other"] = ready - last - sum(engine.startup_s.values())
        stats = engine.stats()
        engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)).result()
        first_token = time.time()
    return {
        "total_s": ready - args.begun,
        "first_token_s": first_token - args.begun,
        "parts_s": parts,
        "num_graphs": stats["num_graphs"],
        "graph_mib": stats["graph_mib"],
        "graph_mib_per_bucket": stats["graph_mib_per_bucket"],
        "environment": environment(args.device),
    }


def profile_child(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the functions that took longest while the model was loaded, what they called included."""
    from cbatch.models.loader import load_model

    torch.zeros(1, device=args.device).item()
    profiler = cProfile.Profile()
    profiler.runcall(load_model, args.model, **load_options(args))
    seconds: dict[str, float] = {}
    for (file, line, name), (_, _, _, cumulative, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
        seconds[where] = max(seconds.get(where, 0.0), cumulative)
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:40]
    return {where: value for where, value in longest if value >= 0.02}


def main() -> None:
    parser = make_parser("startup", __doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", choices=["engine", "profile"], help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(engine_child(args) if args.child == "engine" else profile_child(args)))
        return
    needs_gpu(parser, args.device)
    report: dict[str, Any] = {"model": args.model, "max_num_seqs": args.max_num_seqs}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            figures = start(args, cache, "engine")
            report["environment"] = figures.pop("environment")
            report[name] = figures
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in figures["parts_s"].items())
            print(
                f"Triton cache {name}: {figures['total_s']:.1f} s to ready ({parts}); first token at "
                f"{figures['first_token_s']:.1f} s; {figures['num_graphs']} graphs in {figures['graph_mib']:.0f} MiB, "
                f"one more {figures['graph_mib_per_bucket']:.1f} MiB",
                flush=True,
            )
            save(args.json, report)
        if args.profile:
            report["load_profile_s"] = start(args, cache, "profile", CUDA_LAUNCH_BLOCKING="1")
            for where, seconds in report["load_profile_s"].items():
                print(f"{seconds:8.2f} s  {where}")
            save(args.json, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
