"""Programmatic dependent launch: a kernel's blocks may start while the kernel before still has some running.

What every kernel here does that is launched with ``launch_options``:
- ``gdc_wait`` before the first read of what another kernel wrote and before the first write, on every path: a kernel
  that could end without waiting would let the one behind it overtake the one before. Weights, which no kernel
  writes, may be read earlier.
- ``gdc_launch_dependents`` once its own main work is done and only results are left to be stored. At the start, the
  next kernel's waiting blocks would take the places of working ones (40% slower over a chain of matrix products).
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options"]


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """What each launch has, of a kernel that takes ``PDL: tl.constexpr``: on where the card has it (from Hopper on)."""
    options = {"enable_fp_fusion": True}  # the default; Triton 3.9 warns where nothing is said
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return options | {"PDL": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return options | {"PDL": False}
    return options | {"PDL": True, "launch_pdl": True}
