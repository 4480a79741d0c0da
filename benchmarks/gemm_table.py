"""Finds the fastest way to cut each linear layer's product: `python -m benchmarks.gemm_table --write FILE`.

For each product of the given models and each number of rows, candidates of `skinny_gemm` stand beside cuBLAS, all in
CUDA graphs over weights enough that none stays in the L2 cache (512 MiB; at most 200 copies, which for the smallest is
2.6 times an H200's L2). Each result is checked against float32.

What a candidate leaves to its reader is in its time: behind every product of a layer, cuBLAS's too, runs the norm that
adds it to the residual stream, and adds the parts first where K was split. The norm's own time, measured alone on a
whole sum, is taken off all of them alike. The LM head and the products that end in an activation have no such reader;
with cuBLAS, the activation is a kernel more.

The kernels are compiled first, in parallel, into Triton's cache on disk. The table is what `kernels/linear.py` reads;
what is not measured, for want of `--seconds` or of a kernel that compiles, keeps its entry of before.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.common import cuda_ms, make_parser, needs_gpu, read_bandwidth, save, write_whole
from cbatch.kernels import reference
from cbatch.kernels.activation import act_and_mul, activate
from cbatch.kernels.linear import Kind, shape_key
from cbatch.kernels.norm import add_rms_norm
from cbatch.kernels.skinny_gemm import ROWS, Config, skinny_gemm

CONFIGS = Path(__file__).parents[1] / "cbatch" / "configs"
MODELS = ("llama-8b", "llama-1b", "smollm2-shape", "gpt2-shape")
ACT = {"linear": None, "act": "gelu_tanh", "gated": "silu"}
DTYPE = torch.bfloat16
EPS = 1e-5

# block_n x block_k x stages x warps, by rows; of a gated product, block_n rows of each half. Deep where few rows leave
# nothing but latency to hide, with more warps where there are many sums to hold.
FEW, FEW_GATED = (
    "64x64x6x4 64x128x3x4 64x128x4x4 64x128x5x4 64x256x3x4 128x64x4x4 128x64x6x4 128x128x3x4",
    "64x64x3x4 64x64x4x4 64x64x6x4 64x128x2x4 64x128x3x4 64x128x4x4 128x64x3x4 128x64x4x8",
)
MANY, MANY_GATED = (
    "64x64x4x4 64x64x6x4 64x128x3x4 128x64x3x8 128x64x4x8 128x64x5x8",
    "64x64x3x8 64x64x4x8 64x64x5x8 128x64x3x8",
)
TILES = {
    16: FEW,
    32: FEW,
    64: "64x64x6x4 64x128x3x4 64x128x4x4 128x64x4x4 128x64x4x8 128x128x3x4 128x128x3x8",
    128: "64x64x4x4 64x64x6x4 64x128x3x4 128x64x3x4 128x64x4x4 128x64x4x8 128x128x2x8 128x128x3x8",
}
TILES |= {80: f"{TILES[64]} 64x64x4x4 128x64x3x4", 96: TILES[128]}
TILES |= {144: MANY, 160: MANY, 192: MANY}
GATED_TILES = {
    16: FEW_GATED,
    32: FEW_GATED,
    64: "64x64x3x4 64x64x4x4 64x64x6x4 64x128x2x4 64x128x3x4 64x128x3x8 128x64x3x8",
    128: "64x64x3x4 64x64x4x4 64x64x4x8 64x128x2x8 64x128x3x8 128x64x3x8 128x64x4x8",
}
GATED_TILES |= {80: f"{GATED_TILES[64]} 64x64x4x8", 96: GATED_TILES[128]}
GATED_TILES |= {144: MANY_GATED, 160: MANY_GATED, 192: MANY_GATED}


@dataclass(frozen=True)
class Product:
    """[num_rows, k] times a weight of n columns of result."""

    k: int
    n: int
    kind: Kind
    is_head: bool = False

    @property
    def key(self) -> str:
        return shape_key(self.k, self.n, self.kind)

    @property
    def has_reader(self) -> bool:
        """Whether a norm stands behind it in a layer, which can add up parts of K."""
        return self.kind == "linear" and not self.is_head

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.n * (2 if self.kind == "gated" else 1), self.k

    @property
    def num_bytes(self) -> int:
        return math.prod(self.weight_shape) * DTYPE.itemsize

    @property
    def num_copies(self) -> int:
        return 2 if self.is_head and self.num_bytes > 256 << 20 else min(200, max(3, -(-(512 << 20) // self.num_bytes)))


def products(model: str) -> list[Product]:
    """The distinct products of a decode step."""
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    kind: Kind
    if config["model_type"] == "gpt2":
        hidden, kind = config["n_embd"], "act"
        inner, heads, columns = 4 * hidden, hidden, 3 * hidden
    else:
        hidden, inner, kind = config["hidden_size"], config["intermediate_size"], "gated"
        heads = config["num_attention_heads"] * config["head_dim"]
        columns = heads + 2 * config["num_key_value_heads"] * config["head_dim"]
    return [
        Product(hidden, columns, "linear"),
        Product(heads, hidden, "linear"),
        Product(hidden, inner, kind),
        Product(inner, hidden, "linear"),
        Product(hidden, config["vocab_size"], "linear", is_head=True),
    ]


def candidates(product: Product, block_m: int, num_multiprocessors: int) -> list[Config]:
    """At most 30: each tile, K split by the three numbers that come nearest to 3 programs for 2 multiprocessors."""
    gated = product.kind == "gated"
    found = []
    for tile in (GATED_TILES if gated else TILES)[block_m].split():
        block_n, block_k, num_stages, num_warps = map(int, tile.split("x"))
        num_tiles, num_blocks = -(-product.n // block_n), -(-product.k // block_k)
        splits = [1]
        if product.has_reader:
            splits = [split for split in (1, 2, 4, 8) if split <= num_blocks]
            splits.sort(key=lambda split: abs(math.log(num_tiles * split / (1.5 * num_multiprocessors))))
        configs = [Config(block_n, block_k, num_stages, split, num_warps) for split in splits[:3]]
        found += [config for config in configs if config.fits(block_m, gated)]
    return found


@dataclass(frozen=True)
class Variant:
    """A product that is compiled for itself, and with it all that differ in K, in N but for one bit, or in rows."""

    block_m: int
    config: Config  # split_k is 1 or, for any more, 2
    kind: Kind
    aligned: bool  # N is a multiple of 16

    @classmethod
    def of(cls, product: Product, block_m: int, config: Config) -> Variant:
        config = Config(**asdict(config) | {"split_k": min(2, config.split_k)})
        return cls(block_m, config, product.kind, product.n % 16 == 0)


Work = tuple[Product, int, list[Config]]  # with a number of rows, and candidates


def compile_product(v: Variant) -> None:
    """Run it once on next to nothing: the compiled kernel then lies on disk. In a process of its own."""
    gated, n = v.kind == "gated", v.config.block_n - (0 if v.aligned else 8)
    x = torch.zeros(v.block_m, v.config.block_k, dtype=DTYPE, device="cuda")
    weight = torch.zeros(n * (2 if gated else 1), v.config.block_k, dtype=DTYPE, device="cuda")
    skinny_gemm(x, weight, None, v.config, act=ACT[v.kind], gated=gated)
    torch.cuda.synchronize()


def compile_reader(n: int, split_k: int) -> None:
    """The same for the norm behind a product."""
    y = torch.zeros(16, n, dtype=DTYPE, device="cuda")
    parts = y if split_k == 1 else torch.zeros(split_k, 16, n, device="cuda")
    add_rms_norm(parts, y, torch.ones(n, device="cuda"), EPS)
    torch.cuda.synchronize()


class Bench:
    """The weights of all products, one after another over the same memory, and the reader behind them."""

    def __init__(self, largest: int) -> None:
        self.memory = torch.empty(largest // DTYPE.itemsize, dtype=DTYPE, device="cuda").normal_(std=0.02)

    def cell(self, product: Product, block_m: int, configs: list[Config]) -> dict[str, Any]:
        """cuBLAS and the best candidate for one product and number of rows."""
        rows, columns = product.weight_shape
        weights = list(self.memory[: product.num_copies * rows * columns].view(-1, rows, columns))
        x = torch.randn(block_m, columns, dtype=DTYPE, device="cuda")
        read, reader_ms = self._reader(product, block_m)
        act, gated = ACT[product.kind], product.kind == "gated"

        def library(weight: Tensor) -> Tensor:
            y = F.linear(x, weight)
            return y if act is None else act_and_mul(y, act) if gated else activate(y, act)

        def us(multiply: Callable[[Tensor], Tensor]) -> float:
            ms = cuda_ms(lambda: [read(multiply(weight)) for weight in weights], repeats=9)
            return (ms - reader_ms) / len(weights) * 1e3

        exact = x.float() @ weights[0].float().T
        if act is not None:
            exact = reference.act_and_mul(exact, act) if gated else reference.activate(exact, act)
        cell: dict[str, Any] = {"shape": product.key, "rows": block_m, "cublas_us": us(library), "config": None}
        for config in configs:

            def ours(weight: Tensor, config: Config = config) -> Tensor:
                return skinny_gemm(x, weight, None, config, act=act, gated=gated)

            try:
                y = ours(weights[0]).float()
                error = (((y.sum(0) if config.split_k > 1 else y) - exact).norm() / exact.norm()).item()
                if not error < 5e-3:  # rounding once to bfloat16 makes 0.0017
                    raise ValueError(f"relative error {error:.4f}")
                triton_us = us(ours)
            except Exception as failure:  # the time on the card that the others have had is not to be lost
                print(f"  {product.key}, {block_m} rows, {config}: {failure!r}", flush=True)
                continue
            if cell["config"] is None or triton_us < cell["triton_us"]:
                cell |= {"config": asdict(config), "triton_us": triton_us, "relative_error": error}
        return cell

    def _reader(self, product: Product, block_m: int) -> tuple[Callable[[Tensor], object], float]:
        """What stands behind a product, and the milliseconds of all copies of it over a whole sum each."""
        if not product.has_reader:
            return lambda y: y, 0.0
        y, residual = torch.randn(2, block_m, product.n, dtype=DTYPE, device="cuda").unbind(0)
        gain = torch.ones(product.n, device="cuda")

        def read(y: Tensor) -> object:
            return add_rms_norm(y, residual, gain, EPS)

        return read, cuda_ms(lambda: [read(y) for _ in range(product.num_copies)], repeats=9)


def line(product: Product, cell: dict[str, Any], bandwidth: float) -> str:
    """A cell for people."""

    def speed(us: float) -> str:
        return f"{us:7.2f} us {product.num_bytes / us / 1e6:.2f} TB/s"

    text = f"{product.key:17} {cell['rows']:4} rows   cuBLAS {speed(cell['cublas_us'])}   "
    if cell["config"] is None:
        return text + "no candidate"
    cut = "{block_n}x{block_k}x{num_stages}, split {split_k}, {num_warps} warps".format(**cell["config"])
    share = product.num_bytes / cell["triton_us"] * 1e6 / bandwidth
    return f"{text}Triton {speed(cell['triton_us'])} {share:4.0%}   {cut}   error {cell['relative_error']:.5f}"


def table_text(table: Any, depth: int = 0) -> str:
    """JSON with a line for each entry."""
    if depth == 3 or isinstance(table, str):
        return json.dumps(table)
    inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(k)}: {table_text(v, depth + 1)}" for k, v in table.items())
    return f"{{\n{inner}\n{' ' * depth}}}"


def write(path: Path, device: str, cells: list[dict[str, Any]]) -> None:
    """Put the cells' winners into the table of a file, beside what it has of other shapes, rows and devices.

    The file is written whole or not at all.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    for cell in cells:
        winner = cell["config"] if cell.get("triton_us", math.inf) < cell["cublas_us"] else "cublas"
        table.setdefault(device, {}).setdefault(cell["shape"], {})[str(cell["rows"])] = winner
    write_whole(path, table_text(table) + "\n")


def what_compiled(work: list[Work], jobs: dict[Variant, Future[None]]) -> list[Work]:
    """The work with those candidates that compiled. A product all of whose candidates failed is left out, and said:
    cuBLAS would win without having been compared.
    """
    failures = {repr(job.exception())[:200] for job in jobs.values() if not job.cancelled() and job.exception()}
    for failure in sorted(failures):
        print(f"  not compiled: {failure}", flush=True)
    compiled = {v for v, job in jobs.items() if not job.cancelled() and job.exception() is None}
    found = []
    for product, block_m, configs in work:
        ready = [config for config in configs if Variant.of(product, block_m, config) in compiled]
        if ready or not configs:
            found.append((product, block_m, ready))
        else:
            print(f"  {product.key}, {block_m} rows left out: none of its kernels compiled", flush=True)
    print(f"{len(compiled)} of {len(jobs)} kernels compiled", flush=True)
    return found


def main() -> None:
    parser = make_parser("gemm_table", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--m", nargs="+", type=int, choices=ROWS, default=[32, 16, 64, 128], help="rows, in order")
    parser.add_argument("--seconds", type=float, default=150, help="stop after so long, compilation included")
    parser.add_argument("--write", type=Path, help="put the winners into this table")
    arguments = parser.parse_args()
    needs_gpu(parser)
    deadline = time.monotonic() + arguments.seconds

    wanted = list(dict.fromkeys(p for model in arguments.shapes for p in products(model)))
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and CUDA not before the fork
    context.set_forkserver_preload(["benchmarks.gemm_table"])
    pool = concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context)
    properties = torch.cuda.get_device_properties("cuda")
    work = [(p, m, candidates(p, m, properties.multi_processor_count)) for m in arguments.m for p in wanted]
    variants = dict.fromkeys(Variant.of(p, m, config) for p, m, configs in work for config in configs)
    readers = dict.fromkeys((p.n, c.split_k) for p, _, configs in work for c in configs if p.has_reader)
    jobs = {v: pool.submit(compile_product, v) for v in variants}
    others = [pool.submit(compile_reader, *reader) for reader in readers]
    concurrent.futures.wait([*jobs.values(), *others], timeout=deadline - time.monotonic())
    pool.shutdown(wait=True, cancel_futures=True)  # nothing else may run on the card from here on
    ready = what_compiled(work, jobs)

    bandwidth = read_bandwidth()
    bench = Bench(max(p.num_copies * p.num_bytes for p in wanted))
    print(f"{properties.name}: reads {bandwidth / 1e12:.2f} TB/s (sum over 2 GiB)")
    print(f"{deadline - time.monotonic():.0f} s left", flush=True)

    cells: list[dict[str, Any]] = []
    report = {"device": properties.name, "read_tb_per_s": bandwidth / 1e12, "triton": triton.__version__}
    for product, block_m, configs in ready:
        if time.monotonic() > deadline:
            print(f"stopped after {arguments.seconds:.0f} s: {len(work) - len(cells)} of {len(work)} not measured")
            break
        cells.append(bench.cell(product, block_m, configs))
        print(line(product, cells[-1], bandwidth), flush=True)
        save(arguments.json, report | {"torch": torch.__version__, "products": cells})
        if arguments.write:
            write(arguments.write, properties.name, cells)
    print(json.dumps(report | {"measured": len(cells), "of": len(work)}))


if __name__ == "__main__":
    main()
