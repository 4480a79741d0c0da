"""A linear layer: for few rows in 16 bits the kernel measured fastest for its shape, else cuBLAS. Knows no model.

The choice is in a table: device name -> shape -> rows -> "cublas" or a ``Config``. A shape is "KxN", "KxN act" with an
activation, or "KxN gated" with N columns behind the gate. ``gemm_table.json`` beside this file ships;
``python -m benchmarks.gemm_table`` measures another card or model, and ``CBATCH_GEMM_TABLE`` or ``load_table`` names
its file. Nothing is measured here.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.kernels.activation import act_and_mul, activate
from cbatch.kernels.skinny_gemm import ROWS, Config, skinny_gemm, sum_partials

Kind = Literal["linear", "act", "gated"]

MAX_ROWS = ROWS[-1]  # beyond, a product is bound by compute, not by memory


def linear(
    x: Tensor,  # [num_rows, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    partial: bool = False,
) -> Tensor:
    """x @ weight.T + bias, [num_rows, N] in x's dtype.

    With ``partial``, the result may be partial sums over K for the caller to add up: [num_parts, num_rows, N] float32,
    contiguous, with the bias in the first.
    """
    config = _config_for(x, weight, "linear")
    if config is None:
        return F.linear(x, weight, bias)
    out = skinny_gemm(x, weight, bias, config)
    return out if partial or config.split_k == 1 else sum_partials(out, x.dtype)


def linear_act(
    x: Tensor,  # [num_rows, K]
    weight: Tensor,  # [N, K], gated [2 * N, K]: the gate's rows, then up's
    bias: Tensor | None,  # [N], gated [2 * N]
    act: str,  # one of ``reference.ACTIVATIONS``
    *,
    gated: bool,
) -> Tensor:
    """act(x @ weight.T + bias), or gated act(gate) * up of the product's two halves: [num_rows, N] in x's dtype."""
    config = _config_for(x, weight, "gated" if gated else "act")
    if config is None:
        out = F.linear(x, weight, bias)
        return act_and_mul(out, act) if gated else activate(out, act)
    return skinny_gemm(x, weight, bias, config, act=act, gated=gated)


def _config_for(x: Tensor, weight: Tensor, kind: Kind) -> Config | None:
    num_rows, k = x.shape
    if not (x.is_cuda and 0 < num_rows <= MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16)):
        return None
    if not (k % 8 == 0 and _is_aligned(x) and _is_aligned(weight)):
        return None
    return choose(k, weight.shape[0] // (2 if kind == "gated" else 1), num_rows, kind, x.device)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a 16-bit matrix can have a tensor descriptor."""
    row, element = matrix.stride()
    return element == 1 and row % 8 == 0 and matrix.data_ptr() % 16 == 0


def choose(
    k: int, n: int, num_rows: int, kind: Kind, device: torch.device, *, fixed_order: bool = False
) -> Config | None:
    """The config of a product with n output columns; None: cuBLAS.

    The device's table decides. For a shape that it lacks, ``heuristic`` decides up to 64 rows on Hopper; else cuBLAS.

    With ``fixed_order`` a row is summed in the same order for any number of rows up to ``MAX_ROWS``, so that its bits
    do not depend on the batch: all sizes have the ``block_k`` and ``split_k`` of 32 rows, and none uses cuBLAS, on any
    card with tensor descriptors.
    """
    rows = next(size for size in ROWS if num_rows <= size)
    return _choose(k, n, rows, kind, device, fixed_order)


@functools.cache
def _choose(k: int, n: int, rows: int, kind: Kind, device: torch.device, fixed_order: bool) -> Config | None:
    properties = torch.cuda.get_device_properties(device)
    entries = _tables().get(properties.name, {}).get(shape_key(k, n, kind), {})
    if fixed_order:
        config = entries.get(32) or heuristic(k, n, 32, kind, properties.multi_processor_count)
        return _with_room(config, rows, kind)
    if rows in entries:
        return entries[rows]
    if 64 in entries and 64 < rows < 128:  # 80 or 96, if not measured
        at_64 = entries[64]
        return at_64 and _with_room(at_64, rows, kind)
    if properties.major == 9 and rows <= 64:
        return heuristic(k, n, rows, kind, properties.multi_processor_count)
    return None


def heuristic(k: int, n: int, rows: int, kind: Kind, num_multiprocessors: int) -> Config:
    """A config near the best on a Hopper card, for shapes that the table lacks.

    - a tile has 64 rows of the weight; without a gate 128 if x, which each tile reads again, has more than 32 rows, or
      if that leaves at least two tiles per multiprocessor.
    - K is split by the smallest power of two that gives 4 programs per 3 multiprocessors, but each split has at least
      16 * rows of K: with less, the partial sums would exceed a quarter of the weight's bytes.
    - each program has some 64 KiB of the weight in flight.
    """
    num_weights = 2 if kind == "gated" else 1
    block_n = 128 if num_weights == 1 and (rows > 32 or n >= 128 * 2 * num_multiprocessors) else 64
    num_tiles = -(-n // block_n)
    split_k = 1
    while kind == "linear" and 3 * num_tiles * split_k < 4 * num_multiprocessors and k // (2 * split_k) >= 16 * rows:
        split_k *= 2
    block_k = 128 if num_weights * block_n == 64 else 64
    return _with_room(Config(block_n, block_k, num_stages=4, split_k=split_k, num_warps=4), rows, kind)


def _with_room(config: Config, rows: int, kind: Kind) -> Config:
    """The config, with enough warps for its accumulator and as many stages as shared memory holds."""
    gated, values = kind == "gated", vars(config)
    for num_warps in (config.num_warps, 8):
        for num_stages in range(config.num_stages, 0, -1):
            fitting = Config(**values | {"num_warps": num_warps, "num_stages": num_stages})
            if fitting.fits(rows, gated):
                return fitting
    raise ValueError(f"{config} does not fit {rows} rows")


def shape_key(k: int, n: int, kind: Kind) -> str:
    return f"{k}x{n}" if kind == "linear" else f"{k}x{n} {kind}"


Shapes = dict[str, dict[int, Config | None]]  # shape -> rows -> config, None for cuBLAS


def load_table(path: str | Path) -> None:
    """Add a file that ``benchmarks.gemm_table`` wrote; its entries replace earlier ones.

    Raises:
        ValueError: the file is no such table; the message names the file and the entry.
    """
    _add(_tables(), Path(path))
    _choose.cache_clear()


@functools.cache
def _tables() -> dict[str, Shapes]:
    tables: dict[str, Shapes] = {}
    _add(tables, Path(__file__).with_name("gemm_table.json"))
    if own := os.environ.get("CBATCH_GEMM_TABLE"):
        _add(tables, Path(own).expanduser())
    return tables


def _add(tables: dict[str, Shapes], path: Path) -> None:
    for device, shapes in read_table(path).items():
        tables.setdefault(device, {}).update(shapes)


def read_table(path: Path) -> dict[str, Shapes]:
    """The table of a file, by device name. Raises as ``load_table`` does."""
    where = "the file"
    tables: dict[str, Shapes] = {}
    try:
        for device, shapes in json.loads(path.read_text(encoding="utf-8")).items():
            for shape, entries in shapes.items():
                for rows, entry in entries.items():
                    where = f"{device!r}, {shape!r}, {rows} rows"
                    config = None if entry == "cublas" else Config(**entry)
                    fits = config is None or config.fits(int(rows), shape.endswith(" gated"))
                    if int(rows) not in ROWS or not fits or (config and " " in shape and config.split_k > 1):
                        raise ValueError(f"no such kernel: {entry}")
                    tables.setdefault(device, {}).setdefault(shape, {})[int(rows)] = config
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of matrix products ({where}): {error}") from error
    return tables
