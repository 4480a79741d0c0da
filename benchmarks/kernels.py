"""Every kernel alone, as distance to the machine.

    python -m benchmarks.kernels [--only attend linear ...] [--markdown] [--json FILE]

On CUDA: bfloat16, each call on weights, pages or rows of its own, so that nothing stays in L2, all calls of a line in
one CUDA graph; the median of 15 replays over the number of calls. The rate counts the bytes that have to be read and
written once, or the operations; the share is that of what the same GPU does in the same run: a sum over 2 GiB, or a
bfloat16 product of 8192 x 8192 x 8192. Rows that were just written are in L2 in a step, so small kernels are faster
there than here. Beside each the obvious alternative. Each kernel is first compared with its float32 reference on
fresh random numbers; a line that is wrong or fails is named, and the rest still run.

On the CPU: TorchAttention at SmolLM2's shape in float32, two threads. Beside it the time to merely add up K and V, and
the naive way: gather all rows' K and V and attend once under one large mask. The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_row
from benchmarks.common import make_parser, matrix_rate, needs_gpu, read_bandwidth, save
from cbatch.bench import environment


def on_cuda(report: dict[str, Any], only: list[str], path: Path | None, markdown: bool) -> bool:
    """Measure all cases whose kernel begins with a word of ``only``; whether none failed."""
    from benchmarks import attention_rows, dense_rows

    machine = kernel_row.Machine(read_bandwidth() / 1e12, matrix_rate() / 1e12)
    report |= {**vars(machine), "rows": [], "failed": []}
    print(f"reads {machine.read_tb_per_s:.2f} TB/s, multiplies at {machine.matrix_tflop_per_s:.0f} TFLOP/s", flush=True)
    print(kernel_row.line(kernel_row.HEADER), flush=True)
    rows = []
    for kernel, case in itertools.chain(attention_rows.cases(), dense_rows.cases()):
        if only and not any(kernel.startswith(word) for word in only):
            continue
        try:
            row = case()
        except Exception as error:  # whatever a kernel does wrong: the others are measured all the same
            reason = f"{kernel} {case.args}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            report["failed"].append(reason)
            print(reason, file=sys.stderr, flush=True)
        else:
            rows.append(row)
            report["rows"].append(row.figures(machine))
            print(kernel_row.line(row.cells(machine)), flush=True)
        save(path, report)
        torch.cuda.empty_cache()
    if markdown:
        print(kernel_row.markdown(rows, machine))
    return not report["failed"]


def main() -> int:
    parser = make_parser("kernels", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="those whose names begin so")
    parser.add_argument("--markdown", action="store_true", help="print the table once more, for a page")
    args = parser.parse_args()
    needs_gpu(parser, args.device)

    report: dict[str, Any] = {"environment": environment(args.device)}
    right = True
    if args.device == "cuda":
        right = on_cuda(report, args.only, args.json, args.markdown)
    else:
        from benchmarks.attention_rows import on_cpu

        report["decode_cpu"] = on_cpu()
        save(args.json, report)
    print(json.dumps(report))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
