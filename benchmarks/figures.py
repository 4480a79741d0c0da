"""The tables of figures, out of the JSON under ``results/``: nobody types a figure.

python -m benchmarks.figures [--write]      # prints the README's; --write puts that, the kernels' and the ladder's in
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- python -m benchmarks.figures --write -->\n", "<!-- end of the figures -->\n"
MORE = HERE / "README.md"
KERNELS_BEGIN = "<!-- python -m benchmarks.figures --write: the kernels -->\n"
KERNELS_END = "<!-- end of the kernels -->\n"
LADDER_BEGIN = "<!-- python -m benchmarks.figures --write: the ladder -->\n"
LADDER_END = "<!-- end of the ladder -->\n"
SHAPES = {"llama-8b": "8B", "llama-1b": "1B", "smollm2-shape": "SmolLM2"}


def load(name: str) -> Any:
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


def decode(run: dict[str, Any]) -> str:
    return (
        f"{run['ms_per_step_p50']:.2f} ms a step, {run['output_tokens_per_s']:,.0f} tokens/s, GPU active "
        f"{run['activity_pct']:.2f}% (CUPTI {run['activity_cupti_pct']:.1f}%), {run['roofline_share_pct']:.0f}% of the "
        "memory roofline"
    )


def latencies(run: dict[str, Any]) -> str:
    return (
        f"TTFT p50 {run['ttft_ms_p50']:.0f}, p99 {run['ttft_ms_p99']:.0f} ms; "
        f"TPOT p50 {run['tpot_ms_p50']:.1f}, p99 {run['tpot_ms_p99']:.1f} ms"
    )


def decode_rows() -> Iterator[tuple[str, str, str, str]]:
    for run in load("h200-decode-contexts")["runs"]:
        shape = f"{SHAPES[run['model']]} shape, {run['num_requests']} requests at a context of {run['mean_context']:,}"
        yield f"decode, {shape}", decode(run), "", "decode --contexts …"
    greedy, everything, grammar = load("h200-decode-sampling")["runs"][:3]
    first = greedy["ms_per_step_p50"]
    yield (
        f"decode, 8B shape, 32 requests at a context of {greedy['mean_context']:,}: every sampling parameter set; or a "
        "grammar in one row",
        f"{everything['ms_per_step_p50']:.2f} ms; {grammar['ms_per_step_p50']:.2f} ms a step",
        f"greedy {first:.2f} ms: {everything['ms_per_step_p50'] / first - 1:.1%} and "
        f"{grammar['ms_per_step_p50'] / first - 1:.1%} more",
        "decode --sampling …",
    )
    greedy, everything = load("h200-decode-sampling-qwen3")["runs"]
    yield (
        "the same at the shape of Qwen3 8B, whose vocabulary has 151,936 tokens: every sampling parameter set",
        f"{everything['ms_per_step_p50']:.2f} ms a step",
        f"greedy {greedy['ms_per_step_p50']:.2f} ms: "
        f"{everything['ms_per_step_p50'] / greedy['ms_per_step_p50'] - 1:.1%} more",
        "decode --shapes qwen3-8b --sampling …",
    )


def other_rows() -> Iterator[tuple[str, str, str, str]]:
    runs = {run["num_requests"]: run for run in load("h200-decode-batches")["runs"]}
    batches = [n for n in (1, 8, 64, 128, 256) if n in runs]
    yield (
        f"decode, 8B shape at a context of about {runs[batches[0]]['mean_context']:,}: "
        f"{', '.join(map(str, batches))} requests",
        ", ".join(f"{runs[n]['ms_per_step_p50']:.1f}" for n in batches) + " ms a step",
        ", ".join(f"{runs[n]['roofline_share_pct']:.0f}" for n in batches) + "% of the roofline",
        "decode --batches …",
    )
    edges = [n for n in sorted(runs) if n >= 8 and n + 1 in runs]
    ratios = {n: runs[n + 1]["ms_per_step_p50"] / runs[n]["ms_per_step_p50"] for n in edges}
    worst = max(ratios, key=ratios.__getitem__)
    yield (
        f"of these, one request more than {', '.join(map(str, edges))}",
        f"at most {ratios[worst]:.3f} times the step (at {worst}), {sum(ratios.values()) / len(ratios):.3f} on average",
        "",
        "decode --batches …",
    )
    traffic = {run["model"]: run for run in load("h200-traffic")["runs"]}
    yield (
        "traffic: 512 requests at once, 258,125 tokens in, 143,784 out, 256 running",
        "; ".join(
            f"{SHAPES[model]} {run['duration_s']:.1f} s, {run['output_tokens_per_s']:,.0f} output tokens/s"
            for model, run in traffic.items()
        ),
        "",
        "traffic",
    )
    prefill = load("h200-prefill")
    run = max(prefill["runs"], key=lambda run: run["tokens_per_s"])
    yield (
        f"{prefill['num_prompts']} prompts of {prefill['input_len']:,} tokens, 8B shape",
        f"{run['tokens_per_s']:,.0f} tokens/s, {run['tflop_per_s']:.0f} TFLOP/s",
        f"{run['matrix_rate_share']:.0%} of matrix products alone",
        "prefill",
    )
    cached, computed = load("h200-shared-prefix")["runs"]
    yield (
        "1,000 requests in 64 groups that share 1,024 tokens, 64 of their own, 64 out, 8B shape",
        f"{cached['duration_s']:.1f} s, {cached['hit_rate']:.0%} of prompt tokens from the prefix cache",
        f"`enable_prefix_caching=False`: {computed['duration_s']:.1f} s",
        "shared_prefix",
    )
    long = load("h200-long-prompt")
    yield (
        f"a prompt of {long['prompt_len']:,} tokens comes while {long['num_running']} requests decode, 8B shape, "
        f"`itl_target_ms={long['itl_target_ms']:g}`",
        f"inter-token latency p99 {long['itl_disturbed_ms_p99']:.1f} ms meanwhile; first token of the prompt after "
        f"{long['ttft_beside_s']:.1f} s",
        f"undisturbed {long['itl_undisturbed_ms_p99']:.1f} ms; alone {long['ttft_alone_s']:.1f} s",
        "long_prompt",
    )
    served = {(run["rate"], run["enable_prefix_caching"]): run for run in load("h200-serving")["runs"]}
    for rate in dict.fromkeys(rate for rate, _ in served):
        run, off = served[rate, True], served[rate, False]
        yield (
            f"Poisson arrivals of the traffic's requests, {rate:.0f} a second, 8B shape, streams; hit rate "
            f"{run['hit_rate']:.0%}",
            f"{latencies(run)}; {run['output_tokens_per_s']:,.0f} output tokens/s, active {run['activity_pct']:.1f}%",
            f"`enable_prefix_caching=False`: {latencies(off)}",
            "serving --prefix-caching on off",
        )
    (headline,) = load("h200-headline")["runs"]
    yield (
        "32 requests, 128 tokens in, 8,192 out, 8B shape",
        f"{headline['duration_s']:.1f} s, {headline['output_tokens_per_s']:,.0f} tokens/s, active "
        f"{headline['activity_pct']:.1f}%",
        "",
        "headline",
    )
    start = load("h200-startup")
    yield (
        "from process start to ready, 8B shape, 256 requests",
        f"{start['warm']['total_s']:.1f} s",
        f"with Triton's cache cold: {start['cold']['total_s']:.1f} s",
        "startup",
    )
    against = load("cpu-vs-transformers")
    yield (
        "SmolLM2-135M, float32, 2 CPU cores: 32 chat prompts, 64 tokens each",
        f"{against['cbatch']['output_tokens_per_s']:.1f} tokens/s",
        f"transformers' `generate_batch`: {against['transformers']['output_tokens_per_s']:.1f} tokens/s; "
        f"ratio {against['ratio']:.2f}",
        "vs_transformers",
    )


def host_row() -> str:
    """Median µs of a step, with nobody waiting and with 50,000; then with the prefix cache."""
    medians: dict[tuple[str, int, int], float] = {}
    for benchmark in load("cpu-host-cost")["benchmarks"]:
        params, name = benchmark["params"], benchmark["name"].partition("[")[0]
        medians[name, params["num_running"], params.get("num_waiting", 50_000)] = benchmark["stats"]["median"] * 1e6
    running = sorted({running for _, running, _ in medians})

    def row(name: str, waiting: int) -> str:
        return ", ".join(f"{medians[name, n, waiting]:.0f}" for n in running)

    counts = ", ".join(f"{n:,}" for n in running)
    return (
        f"| host time to plan one decode step and land another, caches hot: {counts} running "
        f"| {row('test_plan_and_land', 0)} µs | with 50,000 waiting: {row('test_plan_and_land', 50_000)} µs; "
        f"and the prefix cache: {row('test_plan_and_land_with_prefix_cache', 50_000)} µs | `make bench` |"
    )


def table() -> str:
    lines = ["| what | cbatch | beside it | command |", "|---|---|---|---|"]
    for what, ours, beside, command in (*decode_rows(), *other_rows()):
        lines.append(f"| {what} | {ours} | {beside} | `python -m benchmarks.{command}` |")
    return "\n".join([*lines, host_row()]) + "\n"


def kernel_table() -> str:
    """The table of ``benchmarks.kernels``."""
    from benchmarks.kernel_row import Machine, Row, markdown

    report = load("h200-kernels")
    machine = Machine(report["read_tb_per_s"], report["matrix_tflop_per_s"])
    rows = [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in report["rows"]]
    return (
        f"NVIDIA H200: reads {machine.read_tb_per_s:.2f} TB/s, multiplies at {machine.matrix_tflop_per_s:.0f} TFLOP/s "
        f"in bfloat16.\n\n{markdown(rows, machine)}\n"
    )


def ladder_table() -> str:
    """The tables of ``benchmarks.ladder``."""
    from benchmarks.ladder import markdown

    return markdown(load("h200-ladder")["runs"])


def put(file: Path, begin: str, text: str, end: str) -> None:
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    file.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the two README files")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    put(README, BEGIN, table(), END)
    put(MORE, KERNELS_BEGIN, kernel_table(), KERNELS_END)
    put(MORE, LADDER_BEGIN, ladder_table(), LADDER_END)


if __name__ == "__main__":
    main()
