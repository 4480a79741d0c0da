"""From process start to an engine that takes requests: part by part, with Triton's cache cold and warm, on one GPU.

    python -m benchmarks.startup [--model llama-8b] [--json FILE]

Each start is a process of its own; the parts are what that process measured, ``interpreter_and_imports`` from before
the process was made. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def start(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One start, in a process of its own, with Triton's cache in the folder ``cache``."""
    command = [sys.executable, "-m", "benchmarks.startup", "--child", str(time.time()), "--model", args.model]
    command += ["--max-num-seqs", str(args.max_num_seqs)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "TRITON_CACHE_DIR": cache}
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def child(args: argparse.Namespace) -> None:
    begun = args.child
    from cbatch.engine import Engine
    from cbatch.sampling_params import SamplingParams

    parts = {"interpreter_and_imports": time.time() - begun}
    begin = time.time()
    with Engine.from_model(
        args.model, load_format="dummy", device="cuda", dtype="bfloat16", max_num_seqs=args.max_num_seqs
    ) as engine:
        ready = time.time()
        parts |= engine.startup_s
        parts["other"] = ready - begin - sum(engine.startup_s.values())
        stats = engine.stats()
        engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)).result()
        first_token = time.time()
    figures = {
        "total_s": ready - begun,
        "first_token_s": first_token - begun,
        "parts_s": parts,
        "num_graphs": stats["num_graphs"],
        "graph_mib": stats["graph_mib"],
        "graph_mib_per_bucket": stats["graph_mib_per_bucket"],
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    report: dict[str, Any] = {"model": args.model, "max_num_seqs": args.max_num_seqs}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            report[name] = figures = start(args, cache)
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in figures["parts_s"].items())
            print(
                f"Triton cache {name}: {figures['total_s']:.1f} s to ready ({parts}); {figures['num_graphs']} graphs "
                f"in {figures['graph_mib']:.0f} MiB, one more {figures['graph_mib_per_bucket']:.1f} MiB",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
