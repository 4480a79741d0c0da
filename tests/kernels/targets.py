"""Where a Triton kernel is tested: on CUDA in each dtype, and in float32 under Triton's interpreter on the CPU.

The interpreter is chosen when triton is first imported, so a test file runs itself once more in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
targets = pytest.mark.parametrize(
    "device, dtype",
    [
        pytest.param("cpu", torch.float32, marks=_INTERPRETER),
        *(
            pytest.param("cuda", dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
)


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """Equal up to rounding once: sums in another order may fall on the other side of half a unit."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1.01 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def run_under_the_interpreter(file: str) -> None:
    if INTERPRETED:
        pytest.skip("already there")
    try:
        triton = tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        pytest.skip("Triton is not installed")
    if triton < (3, 7):
        pytest.skip("Triton 3.6's interpreter does not run on numpy 2.4 (its compiler does)")
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", file]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
