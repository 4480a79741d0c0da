"""One line of the kernels' table: a kernel's time, its distance to the machine, and the obvious alternative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from benchmarks.common import cuda_ms

# Relative L2 distance to the reference in float32 that no kernel may exceed: rounding of inputs and results to bfloat16
# gives 0.002 to 0.004.
LARGEST_ERROR = 0.01


@dataclass(frozen=True)
class Machine:
    read_tb_per_s: float
    matrix_tflop_per_s: float


@dataclass(frozen=True)
class Row:
    kernel: str
    case: str
    us: float  # one call, among calls on other data
    amount: float  # bytes that have to be read and written, or operations
    unit: Literal["TB/s", "TFLOP/s"]
    beside: str  # the obvious alternative
    beside_us: float
    error: float

    @property
    def rate(self) -> float:
        return self.amount / self.us / 1e6

    def share(self, machine: Machine) -> float:
        return self.rate / (machine.read_tb_per_s if self.unit == "TB/s" else machine.matrix_tflop_per_s)

    def cells(self, machine: Machine) -> list[str]:
        return [
            self.kernel,
            self.case,
            f"{self.us:.1f}",
            f"{self.rate:.2f} TB/s" if self.unit == "TB/s" else f"{self.rate:.0f} TFLOP/s",
            f"{self.share(machine):.1%}",
            f"{self.beside_us:.1f} ({self.beside})",
            f"{self.error:.4f}",
        ]

    def figures(self, machine: Machine) -> dict[str, Any]:
        return {**vars(self), "rate": self.rate, "share": self.share(machine)}


HEADER = ["kernel", "case", "µs", "rate", "share", "alternative, µs", "error"]
WIDTHS = [22, 40, 8, 12, 7, 38, 6]


def line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def markdown(rows: Sequence[Row], machine: Machine) -> str:
    table = [HEADER, ["---"] * len(HEADER), *(row.cells(machine) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def us_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of ``calls``, captured one behind the other in one CUDA graph.

    Each should have data of its own, and all together more than the L2 cache holds.
    """
    return cuda_ms(lambda: [call() for call in calls]) * 1e3 / len(calls)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 distance. Raises ArithmeticError where it is more than rounding, or not finite."""
    distance = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    if not distance <= LARGEST_ERROR:
        raise ArithmeticError(f"relative error {distance:.3g}, but rounding explains {LARGEST_ERROR}")
    return distance
