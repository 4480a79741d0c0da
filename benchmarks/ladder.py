"""From a generation loop without a cache to cbatch's engine, rung by rung, one batch of equal prompts at a time.

    python -m benchmarks.ladder [--shapes gpt2-shape] [--batches 1 8 32] [--new-tokens 50 100 200 400] [--json FILE]
    python -m benchmarks.ladder --shapes llama-1b llama-8b --json FILE     # fewer rungs; merged into the same file
    python -m benchmarks.ladder --markdown FILE                            # the table of such a file
    python -m benchmarks.ladder --plot FILE [--out PICTURE]                # and the picture

A shape is one of those that ship (random weights), a folder (its weights) or a config file (random weights; one that
is called config.json is known by its folder). Greedy; the stop check of each rung runs, with a stop token that never
comes; the engine, whose random weights are its own, has none. Seconds are from the call to the last token of
``generate``, prompt included (the engine has no prefix cache), the fastest of up to three runs after a warm-up; no more
are begun after a second, so what takes longer is measured once. ``first_s`` is the very first run, of the most tokens,
with whatever it compiles or plans; ``ready_s`` is that and all before it.

``activity_pct`` is measured alike for all rungs, in a run of its own of 32 tokens: the union of the intervals of
kernels and copies that the CUDA profiler (CUPTI) records, over the time from the first to the last. ``peak_mib`` is the
most that tensors held during the timed runs, weights included, ``reserved_mib`` the most that the allocator held, and
``fragmentation_mib`` the difference. The engine's pool of KV pages counts as held.

Every rung starts from an empty allocator. ``expandable`` is a process of its own, since the setting is read once. The
quick rungs run first; with ``--seconds``, what does not fit is left out and said. A run that is in the file already is
measured again and replaced, all others stay. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import busy_share, device_intervals, make_parser, needs_gpu, positive, save

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"
PROFILED_TOKENS = 32
Run = Callable[[Tensor, int], Any]  # prompts [batch, length] and a number of tokens -> tokens, in any form


@dataclass(frozen=True)
class Rung:
    title: str
    beside: bool = False  # no rung of the ladder: it tells what a rung's parts are worth


RUNGS = {
    "no-cache": Rung("no KV cache"),
    "kv-cache": Rung("KV cache"),
    "expandable": Rung("KV cache, expandable segments"),
    "static": Rung("StaticCache"),
    "compile-dynamic": Rung("torch.compile, dynamic cache"),
    "compile-static": Rung("torch.compile, StaticCache"),
    "interleaved": Rung("torch.compile, StaticCache, two streams"),
    "engine": Rung("cbatch's engine"),
    "one-stream": Rung("interleaved, but one stream", beside=True),
    "graphs": Rung("interleaved, but no torch.compile", beside=True),
    "no-cudnn": Rung("KV cache, without cuDNN's attention", beside=True),
}
# The engine before there is a stock model beside its own. What compiles last; one-stream finds it compiled.
ORDER = ["engine", "no-cache", "kv-cache", "no-cudnn", "static", "graphs", "expandable"]
ORDER += ["compile-static", "interleaved", "one-stream", "compile-dynamic"]
FEWER = ["engine", "static", "graphs", "compile-static", "interleaved", "one-stream"]


def shape_name(shape: str) -> str:
    """A config file that is called as all of them are is known by its folder."""
    path = Path(shape).absolute()
    return path.parent.name if path.name == "config.json" else path.name


@dataclass
class Bench:
    """What the rungs of one shape share."""

    shape: str
    device: torch.device
    dtype: torch.dtype
    input_len: int
    deadline: float  # of time.monotonic

    def __post_init__(self) -> None:
        from transformers import AutoConfig

        from cbatch.models.loader import shape_names

        folder = Path(__file__).parents[1] / "cbatch" / "configs"
        file = folder / f"{self.shape}.json" if self.shape in shape_names() else self.shape
        self.config = AutoConfig.from_pretrained(file).get_text_config()

    @functools.cached_property
    def stop(self) -> int:
        eos, last = self.config.eos_token_id, self.config.vocab_size - 1
        return next((token for token in (eos if isinstance(eos, list) else [eos]) if token in range(last)), last)

    @functools.cached_property
    def model(self) -> Any:
        """Transformers' own module. Made when the first rung asks for it, which the engine does not."""
        from transformers import AutoModelForCausalLM

        if os.path.isdir(self.shape):
            model = AutoModelForCausalLM.from_pretrained(self.shape, dtype=self.dtype).to(self.device).eval()
        else:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.device:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = self.stop
        with torch.no_grad():
            model.get_output_embeddings().weight[self.stop] = 0  # its logit is 0: the likeliest one's is above
        return model

    def prompts(self, batch: int) -> Tensor:
        """Random ids, of which none is the stop token."""
        vocab_size = self.config.vocab_size
        ids = torch.randint(vocab_size, (batch, self.input_len), generator=torch.Generator().manual_seed(batch))
        return torch.where(ids == self.stop, (ids + 1) % vocab_size, ids).to(self.device)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def opened(name: str, bench: Bench, batches: list[int], new_tokens: int) -> Iterator[Run]:
    """The function that a rung is, ready for the largest of ``batches`` and ``new_tokens``."""
    if name == "engine":
        with engine(bench, max(batches), new_tokens) as run:
            yield run
        return
    model = bench.model

    def transformers(**options: Any) -> Run:
        def run(ids: Tensor, count: int) -> Tensor:
            mask = torch.ones_like(ids)
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
            return tokens[:, ids.shape[1] :]

        return run

    if name in ("interleaved", "one-stream", "graphs"):
        from cbatch.interleave import InterleavedGenerator

        compile: Any = "cudagraphs" if name == "graphs" else True
        made = InterleavedGenerator(model, num_streams=1 if name == "one-stream" else 2, compile=compile)
        yield lambda ids, count: made.generate(ids, None, count, do_sample=False)[:, ids.shape[1] :]
    elif name == "compile-dynamic":
        plain, compiled = model.forward, torch.compile(model.forward, dynamic=True)

        def forward(**inputs: Any) -> Any:
            """The prompt and the first token, whose cache has another layout, would be compilations of their own."""
            first = inputs["input_ids"].shape[1] > 1 or not inputs["past_key_values"].layers[0].keys.is_contiguous()
            return plain(**inputs) if first else compiled(**inputs)

        model.forward = functools.update_wrapper(forward, plain)
        try:
            yield transformers()
        finally:
            del model.forward
    elif name == "compile-static":
        yield transformers(cache_implementation="static")  # which compiles by itself, mode="reduce-overhead"
    elif name == "static":
        run = transformers(cache_implementation="static", disable_compile=True)

        def fresh(ids: Tensor, count: int) -> Tensor:
            vars(model).pop("_previous_max_cache_length", None)  # else a cache is as long as the longest so far
            return run(ids, count)

        yield fresh
    elif name == "no-cudnn":
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield transformers()
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled)
    else:
        yield transformers(use_cache=name != "no-cache")


@contextlib.contextmanager
def engine(bench: Bench, batch: int, new_tokens: int) -> Iterator[Run]:
    from cbatch import LLM, SamplingParams

    length = bench.input_len + new_tokens
    options: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": length}
    options["num_blocks"] = batch * (-(-length // 64) + 1) + 1
    options["max_num_batched_tokens"] = max(256, batch * bench.input_len)
    options["enable_prefix_caching"] = False  # the other rungs compute the prompts in each run
    options |= {"device": str(bench.device), "dtype": bench.dtype}
    if not os.path.isdir(bench.shape):
        options["load_format"] = "dummy"
    with LLM(bench.shape, **options) as llm:

        def run(ids: Tensor, count: int) -> list[list[int]]:
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            outputs = llm.generate(ids.tolist(), params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        yield run


def measure(bench: Bench, run: Run, batch: int, count: int) -> dict[str, Any]:
    """The fastest of up to three runs; no more are begun after a second."""
    ids, times = bench.prompts(batch), []
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    while len(times) < 3 and sum(times) < 1.0:
        bench.sync()
        begin = time.perf_counter()
        tokens = run(ids, count)
        bench.sync()
        times.append(time.perf_counter() - begin)
    made = torch.as_tensor(tokens)
    if made.shape != (batch, count) or (isinstance(tokens, Tensor) and bool((made == bench.stop).any())):
        sys.exit(f"batch {batch}, {count} tokens: {list(made.shape)} came, with the stop token: not the same work")
    figures = {"seconds": min(times), "runs": len(times), "tokens_per_s": batch * count / min(times)}
    if on_gpu:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures |= {"peak_mib": peak / MIB, "reserved_mib": reserved / MIB}
        figures["fragmentation_mib"] = (reserved - peak) / MIB
    return figures


def activity(bench: Bench, run: Run, batch: int) -> dict[str, Any]:
    """The GPU's busy share while 32 tokens are made, and the kernels a token."""
    if bench.device.type != "cuda":
        return {}
    ids = bench.prompts(batch)
    run(ids, PROFILED_TOKENS)
    bench.sync()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run(ids, PROFILED_TOKENS)
        bench.sync()
    intervals = device_intervals(recorded)
    if not intervals:
        return {}
    return {"activity_pct": 100 * busy_share(intervals), "kernels_per_token": len(intervals) / PROFILED_TOKENS}


def climb(bench: Bench, name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A rung over batches and numbers of tokens. Those that compile begin with the most tokens, and keep that cache."""
    compiles = name in ("compile-static", "compile-dynamic", "interleaved", "graphs", "one-stream")
    counts = sorted(args.new_tokens, reverse=compiles)
    at_once = name in ("engine", "compile-dynamic")  # what serves all batches is made once
    groups = [args.batches] if at_once else [[batch] for batch in args.batches]
    for group in groups:
        if time.monotonic() > bench.deadline:
            print(f"{name}: batches {group} left out, --seconds is over", flush=True)
            continue
        clear(compiled=name != "one-stream")
        begin = time.perf_counter()
        with opened(name, bench, group, max(counts)) as run:
            for batch in group:
                clear(compiled=False)
                # A cache that grows has a new shape at each token, which libraries may make plans for: the first 400
                # tokens of GPT-2 took 24 s on an H200. torch.compile may want to see shapes twice.
                first = time.perf_counter()
                run(bench.prompts(batch), max(counts))
                bench.sync()
                first_s = time.perf_counter() - first
                if compiles:
                    run(bench.prompts(batch), max(counts))
                    bench.sync()
                ready_s = time.perf_counter() - begin
                seen = activity(bench, run, batch)
                for count in counts:
                    if time.monotonic() > bench.deadline:
                        print(f"{name}: batch {batch}, {count} tokens left out, --seconds is over", flush=True)
                        continue
                    if compiles and bench.device.type == "cpu":  # where no cache is kept: a new size, a compilation
                        run(bench.prompts(batch), count)
                    yield {
                        **key(bench, name, batch, count),
                        **measure(bench, run, batch, count),
                        **seen,
                        "first_s": first_s,
                        "ready_s": ready_s,
                    }
                begin = time.perf_counter()
        del run


def clear(compiled: bool = True) -> None:
    """Start from an empty allocator, and with nothing compiled: caches of compiled code have a limit of their own."""
    if compiled and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def key(bench: Bench, name: str, batch: int, count: int) -> dict[str, Any]:
    """What tells runs apart."""
    dtype = str(bench.dtype).removeprefix("torch.")
    return {
        "shape": shape_name(bench.shape),
        "rung": name,
        "batch": batch,
        "new_tokens": count,
        "input_len": bench.input_len,
        "dtype": dtype,
        "device": bench.device.type,
    }


TABLE = ("shape", "batch", "input_len", "dtype", "device")
KEY = (*TABLE, "rung", "new_tokens")


def merged(report: dict[str, Any], run: dict[str, Any]) -> None:
    """Put a run in, in place of the one that it measures again."""
    same = [old for old in report["runs"] if any(old[name] != run[name] for name in KEY)]
    names = list(RUNGS)
    report["runs"] = sorted(
        [*same, run],
        key=lambda r: (r["shape"], r["dtype"], r["input_len"], names.index(r["rung"]), r["batch"], r["new_tokens"]),
    )


def in_a_process_of_its_own(args: argparse.Namespace, shape: str, seconds: float) -> list[dict[str, Any]]:
    """The runs of ``expandable``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.json"
        command = [sys.executable, "-m", "benchmarks.ladder", "--shapes", shape, "--rungs", "expandable"]
        command += ["--batches", *map(str, args.batches), "--new-tokens", *map(str, args.new_tokens)]
        command += ["--input-len", str(args.input_len), "--device", args.device, "--seconds", str(seconds)]
        command += ["--json", str(file)] + (["--dtype", args.dtype] if args.dtype else [])
        variables = {**os.environ, "PYTORCH_ALLOC_CONF": EXPANDABLE}
        done = subprocess.run(command, env=variables, stdout=subprocess.DEVNULL)  # its errors are ours
        if done.returncode:
            sys.exit(f"the process with {EXPANDABLE} ended with {done.returncode}")
        if not file.exists():
            print("expandable: left out, --seconds was over before its first run", flush=True)
            return []
        runs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["runs"]
        return runs


def check_allocator() -> None:
    """In that process: that the allocator has heard of it."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
        if not settings.get("expandable_segments"):
            sys.exit(f"PYTORCH_ALLOC_CONF={EXPANDABLE} had no effect: the allocator says {settings}")


# ---- what is shown


def speed_ups(runs: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Of each run over the lowest rung that was measured with the same shape, batch and numbers of tokens."""
    names = [name for name in RUNGS if not RUNGS[name].beside]
    bases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in sorted((r for r in runs if r["rung"] in names), key=lambda r: names.index(r["rung"])):
        bases.setdefault(_case(run), run)
    return {
        (*_case(run), run["rung"]): run["tokens_per_s"] / bases[_case(run)]["tokens_per_s"]
        for run in runs
        if _case(run) in bases
    }


def _case(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in KEY if name != "rung")


def tables(runs: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The runs that may stand side by side, behind their title: alike in all but rung and number of tokens."""
    for case in dict.fromkeys(tuple(run[name] for name in TABLE) for run in runs):
        shape, batch, input_len, dtype, device = case
        title = f"{shape}, batch {batch}, {input_len} tokens in, {dtype}" + (", on the CPU" if device == "cpu" else "")
        yield title, [run for run in runs if tuple(run[name] for name in TABLE) == case]


def line(run: dict[str, Any]) -> str:
    memory = (
        f" peak {run['peak_mib']:6.0f} MiB reserved {run['reserved_mib']:6.0f} fragmentation "
        f"{run['fragmentation_mib']:5.0f} active {run.get('activity_pct', 0):5.1f}% kernels "
        f"{run.get('kernels_per_token', 0):5.0f}"
        if "peak_mib" in run
        else ""
    )
    return (
        f"{run['shape']:12} {run['rung']:15} batch {run['batch']:2} tokens {run['new_tokens']:3} "
        f"{run['tokens_per_s']:9.1f} tokens/s ({run['seconds']:.3f} s, ready {run['ready_s']:.1f} s){memory}"
    )


MEMORY = ("peak_mib", "reserved_mib", "fragmentation_mib")


def markdown(runs: list[dict[str, Any]]) -> str:
    """A table for each shape and batch, prompt, dtype and device: a row a rung, a column a number of tokens."""
    ups = speed_ups(runs)
    parts = []
    for title, chosen in tables(runs):
        counts = sorted({run["new_tokens"] for run in chosen})
        lines = [
            f"{title}; tokens/s and times the first rung:",
            "",
            "| rung | "
            + " | ".join(f"{count} tokens" for count in counts)
            + " | first call, s | GPU active | peak MiB | reserved | fragmentation |",
            "|---|" + "---|" * (len(counts) + 5),
        ]
        for name, rung in RUNGS.items():
            row = {run["new_tokens"]: run for run in chosen if run["rung"] == name}
            if not row:
                continue
            cells = [
                f"{row[n]['tokens_per_s']:,.0f} (×{ups[(*_case(row[n]), name)]:.2f})"
                if n in row and (*_case(row[n]), name) in ups
                else f"{row[n]['tokens_per_s']:,.0f}"
                if n in row
                else ""
                for n in counts
            ]
            last = row[max(row)]
            memory = [f"{last[name]:,.0f}" if name in last else "" for name in MEMORY]
            first = f"{last['first_s']:.1f}" if "first_s" in last else ""
            active = f"{last['activity_pct']:.1f}%" if "activity_pct" in last else ""
            label = f"*beside: {rung.title}*" if rung.beside else rung.title
            lines.append("| " + " | ".join([label, *cells, first, active, *memory]) + " |")
        parts.append("\n".join([*lines, *worth(chosen)]) + "\n")
    return "\n".join(parts)


PAIRS = {  # what a rung is worth over another
    ("static", "kv-cache"): "StaticCache over a KV cache that grows",
    ("interleaved", "compile-static"): "two streams and one graph over torch.compile and StaticCache",
    ("interleaved", "one-stream"): "of that, the second stream alone",
    ("engine", "interleaved"): "the engine over two streams",
}


def worth(runs: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: rates over each other, by numbers of tokens, where both were measured."""
    rates = {(run["rung"], run["new_tokens"]): run["tokens_per_s"] for run in runs}
    counts = sorted({run["new_tokens"] for run in runs})
    found = []
    for (upper, lower), what in PAIRS.items():
        ratios = [
            f"×{rates[upper, n] / rates[lower, n]:.2f} ({n} tokens)"
            for n in counts
            if {(upper, n), (lower, n)} <= rates.keys()
        ]
        if ratios:
            found.append(f"- {what}: {', '.join(ratios)}")
    return ["", *found] if found else []


def plot(runs: list[dict[str, Any]], out: Path) -> None:
    """A panel for each table: tokens/s by rung, a bar a number of tokens, times the first rung on top.

    What stands beside the ladder is grey. A number of tokens has one shade in all panels, which the legend tells.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ups, panels = speed_ups(runs), list(tables(runs))
    all_counts = sorted({run["new_tokens"] for run in runs})
    shades = {count: 0.35 + 0.6 * (i + 1) / len(all_counts) for i, count in enumerate(all_counts)}
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 3.4 * len(panels)), squeeze=False, layout="constrained")
    for axis, (title, of_panel) in zip(axes[:, 0], panels, strict=True):
        chosen = {(run["rung"], run["new_tokens"]): run for run in of_panel}
        counts = sorted({count for _, count in chosen})
        rungs = [name for name in RUNGS if any(rung == name for rung, _ in chosen)]
        width = 0.8 / len(counts)
        for i, count in enumerate(counts):
            present = [(x, chosen[name, count]) for x, name in enumerate(rungs) if (name, count) in chosen]
            places = [x + (i - (len(counts) - 1) / 2) * width for x, _ in present]
            heights = [run["tokens_per_s"] for _, run in present]
            blue, grey = (pyplot.get_cmap(name)(shades[count]) for name in ("Blues", "Greys"))
            colors = [grey if RUNGS[run["rung"]].beside else blue for _, run in present]
            bars = axis.bar(places, heights, width, color=colors)
            if count == max(counts):
                texts = [f"×{up:.1f}" if (up := ups.get((*_case(run), run["rung"]))) else "" for _, run in present]
                axis.bar_label(bars, texts, fontsize=8)
        axis.set_yscale("log")
        axis.margins(y=0.15)
        axis.set_ylabel("tokens/s")
        axis.set_title(title, loc="left", fontsize=10)
        titles = [textwrap.fill(RUNGS[name].title, 14) for name in rungs]
        axis.set_xticks(range(len(rungs)), titles, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for count in all_counts:
        axes[0, 0].bar(0, 0, color=pyplot.get_cmap("Blues")(shades[count]), label=f"{count} new tokens")
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _seconds(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{value} is no number of seconds")
    return value


def read(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    """A file that this benchmark wrote. Ends in a line where it is none."""
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for run in report["runs"]:
            if run["rung"] not in RUNGS or not run["tokens_per_s"] > 0 or not run.keys() >= set(KEY):
                raise ValueError(f"a run is {run}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{file} is no file with runs of the ladder: {error!r:.100}")
    return report


def read_to_show(parser: argparse.ArgumentParser, file: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = read(parser, file)["runs"]
    return runs or parser.error(f"{file} is no file with runs of the ladder: it has none")


def check_shapes(parser: argparse.ArgumentParser, shapes: list[str]) -> None:
    """Before anything is measured: each is there, and their runs can be told apart."""
    from cbatch.models.loader import shape_names

    names: dict[str, str] = {}
    for shape in shapes:
        if shape not in shape_names() and not os.path.exists(shape):
            parser.error(f"{shape} is no folder, no config file, and none of the shapes {', '.join(shape_names())}")
        if names.setdefault(shape_name(shape), shape) != shape:
            parser.error(f"{names[shape_name(shape)]} and {shape} would both be named {shape_name(shape)}")


def main() -> None:
    parser = make_parser("ladder", __doc__)
    parser.add_argument("--shapes", nargs="+", default=["gpt2-shape"], help="shapes, folders or config files")
    parser.add_argument("--batches", nargs="+", type=positive, help="rows (1 8 32; other shapes: 1)")
    parser.add_argument("--new-tokens", nargs="+", type=positive, help="tokens a row (50 100 200 400; others: 200)")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, help="(all; other shapes: those from StaticCache on)")
    parser.add_argument("--input-len", type=positive, default=32, help="tokens of each prompt")
    parser.add_argument("--seconds", type=_seconds, default=float("inf"), help="leave out what begins later")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="(bfloat16; float32 on the CPU)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of a JSON; measures nothing")
    shown.add_argument("--plot", type=Path, metavar="FILE", help="draw a JSON; measures nothing")
    parser.add_argument("--out", type=Path, help="the picture, .png or .svg (beside the JSON, .png)")
    args = parser.parse_args()
    if args.out is not None and args.plot is None:
        parser.error("--out is for --plot")
    if args.markdown is not None:
        print(markdown(read_to_show(parser, args.markdown)), end="")
        return
    if args.plot is not None:
        out = args.out or args.plot.with_suffix(".png")
        try:
            plot(read_to_show(parser, args.plot), out)
        except ModuleNotFoundError as error:
            parser.exit(1, f"{parser.prog}: {error}; the picture needs the extra: pip install 'cbatch[plot]'\n")
        except (OSError, ValueError) as error:  # no such folder, no such kind of picture
            parser.error(f"{out} cannot be drawn: {error}")
        print(out)
        return
    needs_gpu(parser, args.device)
    check_shapes(parser, args.shapes)
    start, given = time.monotonic(), (args.batches, args.new_tokens, args.rungs)
    from cbatch.bench import environment
    from cbatch.models.config_facts import max_positions

    device = torch.device(args.device)
    report: dict[str, Any] = {"environment": environment(device), "runs": []}
    if args.json is not None and args.json.exists():
        report = read(parser, args.json)
        was, now = report.get("environment", {}), environment(device)
        if different := [name for name in ("torch", "transformers", "device_name") if was.get(name) != now.get(name)]:
            parser.error(f"{args.json} holds runs with other {', '.join(different)}: give another --json")

    def take(run: dict[str, Any]) -> None:
        merged(report, run)
        print(line(run), flush=True)
        save(args.json, report)

    own_process = os.environ.get("PYTORCH_ALLOC_CONF") == EXPANDABLE
    if own_process:
        check_allocator()
    for shape in args.shapes:
        whole = shape_name(shape).startswith("gpt2") or given[2] is not None
        args.batches = given[0] or ([1, 8, 32] if whole else [1])
        args.new_tokens = given[1] or ([50, 100, 200, 400] if whole else [200])
        rungs = given[2] or (ORDER if whole else FEWER)
        dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
        bench = Bench(shape, device, dtype, args.input_len, start + args.seconds)
        if (length := args.input_len + max(args.new_tokens)) > (most := max_positions(bench.config)):
            parser.error(f"{args.input_len} + {max(args.new_tokens)} tokens are {length}, but {shape} takes {most}")
        for name in sorted(rungs, key=ORDER.index):
            if name == "graphs" and device.type == "cpu":
                print("graphs: left out, there are no CUDA graphs on the CPU", flush=True)
                continue
            if name == "expandable" and not own_process:
                left = bench.deadline - time.monotonic()
                if left > 0:
                    for run in in_a_process_of_its_own(args, shape, left):
                        take(run)
                else:
                    print("expandable: left out, --seconds is over", flush=True)
                continue
            for run in climb(bench, name, args):
                take(run)
        del bench
        clear()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
