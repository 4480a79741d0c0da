"""Decode attention over its constants and over ways to lay pages out: what stands in ``kernels/paged_decode.py``.

    python -m benchmarks.attention_sweep [--layers 4 32] [--seconds 120] [--json FILE]

Microseconds a layer at 32 heads on 8 of 128 in bfloat16, in a CUDA graph over distinct layers, the first of which is
checked against the reference. A line a setting: tile, warps and stages; programs a multiprocessor that the plan takes
for resident; layout. More layers spread a context's pages over more of the pool. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import cbatch.kernels.paged_decode as kernel
from benchmarks.attention_rows import Pages
from benchmarks.common import GIB, make_parser, needs_gpu, read_bandwidth, save
from benchmarks.kernel_row import error, us_per_call
from cbatch.kernels import reference
from cbatch.kernels.attention import make_backend

MIX = [16 + min(3056, int(300 * 2.718 ** random.Random(i).gauss(0, 1))) for i in range(32)]
CASES = {
    "32x224": [224] * 32,
    "32x1024": [1024] * 32,
    "32x4192": [4192] * 32,
    "32x8100": [8100] * 32,
    "32 mixed": MIX,
    "1x60000, 31x1000": [60000] + [1000] * 31,
    "256x1024": [1024] * 256,
}
TILES = ((64, 4, 3), (64, 4, 2), (32, 4, 4))
RESIDENT = (3, 2, 4)  # programs a multiprocessor that the plan fills, which are 3 at the first tile
POOL_BYTES = 60 * GIB  # of one case, at most: fewer layers where more would not fit


@dataclass(frozen=True)
class Setting:
    tile: tuple[int, int, int]
    resident: int
    heads_first: bool
    layer_major: bool
    layers: int


def settings(layers: list[int]) -> Iterator[Setting]:
    """What ships first, then one thing changed at a time."""
    first = Setting(TILES[0], RESIDENT[0], False, False, layers[-1])
    yield first
    for heads_first, layer_major in ((False, True), (True, False), (True, True)):
        yield Setting(first.tile, first.resident, heads_first, layer_major, first.layers)
    for count in layers[:-1]:
        yield Setting(first.tile, first.resident, False, False, count)
    for tile in TILES:
        for resident in RESIDENT:
            if (tile, resident) != (first.tile, first.resident):
                yield Setting(tile, resident, False, False, first.layers)


def measure(setting: Setting, lens: list[int]) -> float:
    """Microseconds a layer; checks the first."""
    kernel.DECODE[128], kernel.RESIDENT_PROGRAMS[128] = setting.tile, setting.resident
    layer_bytes = 2 * (sum(lens) + 64 * len(lens)) * 8 * 128 * 2
    layers = max(2, min(setting.layers, POOL_BYTES // layer_bytes))
    layout = {"heads_first": setting.heads_first, "layer_major": setting.layer_major}
    pages = Pages(lens, layers, 32, 8, 128, torch.bfloat16, "cuda", **layout)
    pages.batch.max_context_len = 131072
    backend, b = make_backend("triton", torch.device("cuda")), pages.batch
    backend.prepare(b)
    calls = [partial(backend.attend, pages.q, None, None, k, v, 0, scale=pages.scale) for k, v in pages.layers]
    lines = (b.block_tables[0], b.row_slots, b.cu_seqlens_q, b.context_lens)
    error(calls[0](), reference.paged_attention(pages.q.float(), *pages.layers[0], *lines, scale=pages.scale))
    return us_per_call(calls)


def main() -> None:
    parser = make_parser("attention_sweep", __doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 32], help="of a pool; the last is the default one")
    parser.add_argument("--seconds", type=float, default=120.0, help="no new setting after this")
    args = parser.parse_args()
    needs_gpu(parser)
    end = time.monotonic() + args.seconds
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "read_TBps": read_bandwidth() / 1e12, "runs": []}
    print(f"{report['device']} reads {report['read_TBps']:.2f} TB/s;", ", ".join(CASES), flush=True)
    for setting in settings(args.layers):
        if time.monotonic() > end:
            break
        run: dict[str, Any] = {**vars(setting), "us": {}}
        for name, lens in CASES.items():
            run["us"][name] = measure(setting, lens)
            torch.cuda.empty_cache()
        report["runs"].append(run)
        layout = (
            f"{'heads' if setting.heads_first else 'tokens'} first, {'layer' if setting.layer_major else 'block'}-major"
        )
        figures = " ".join(f"{us:8.1f}" for us in run["us"].values())
        print(f"{setting.tile!s:11} {setting.resident} {setting.layers:2} layers {layout:28} {figures}", flush=True)
        save(args.json, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
