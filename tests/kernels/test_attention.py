"""Choosing a backend by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cbatch.kernels.attention import make_backend
from cbatch.kernels.torch_attention import TorchAttention


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_cpu_is_served_by_torch(name) -> None:
    assert isinstance(make_backend(name, torch.device("cpu")), TorchAttention)


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'flash'.*'auto', 'torch', 'triton'"):
        make_backend("flash", torch.device("cpu"))


def run(code: str) -> str:
    """What the code prints in a process of its own, without Triton's interpreter and without a GPU."""
    root = str(Path(__file__).parents[2])
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": root}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    return result.stdout.strip()


def test_triton_never_falls_back() -> None:
    """An explicit "triton" on the CPU raises; "auto" is what chooses."""
    code = """
import torch
from cbatch.kernels.attention import make_backend
try:
    make_backend("triton", torch.device("cpu"))
except (ValueError, ImportError):
    print("refused")
"""
    assert run(code) == "refused"


def test_importing_the_interface_does_not_import_triton() -> None:
    code = """
import sys, torch
before = "triton" in sys.modules
import cbatch.kernels.attention, cbatch.kernels.torch_attention
print(("triton" in sys.modules) == before)
"""
    assert run(code) == "True"
