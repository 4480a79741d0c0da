"""Programmatic dependent launch: a kernel's blocks may start while the kernel before still has some running.

Every kernel launched with ``launch_options`` calls
- ``gdc_wait`` before its first read of another kernel's results and before its first write, on every path: if it could
  end without waiting, the kernel behind it might overtake the one before it. Weights, which no kernel writes, may be
  read earlier.
- ``gdc_launch_dependents`` after its main work, when only results remain to be stored. At the start, the next kernel's
  waiting blocks would take the places of working ones (40% slower over a chain of matrix products).
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
    """Launch options of a kernel with the parameter ``PDL: tl.constexpr``, which is True from Hopper on."""
    options = {"enable_fp_fusion": True}  # the default; Triton 3.9 warns if it is left out
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return options | {"PDL": False}
    if torch.cuda.get_device_capability(device)[0] < 9:
        return options | {"PDL": False}
    return options | {"PDL": True, "launch_pdl": True}
