"""A linear layer out of torch's own operators: the way of the CPU. Knows no model.

`pack` lays a weight out once in the blocks that oneDNN reads; `F.linear` is MKL in float32, which reads it as it is.
SmolLM2's products in float32, two Zen 4 cores with AVX-512, microseconds, weights from memory:

    rows                   1       8      16      32      64       256
    a layer   F.linear  1396    1441    1735    2300    3466    10603
              packed     775     723     931    1423    2421     8640
    LM head   F.linear  9845   15999   18352   25955   35018   112241
              packed    4327    4332    5944   10597   17774    79341

MKL's own packed form (`torch.ops.mkl`) gains nothing there. oneDNN wins with AVX2 alone too (`ONEDNN_MAX_CPU_ISA`), and
in bfloat16, where `F.linear` is oneDNN without blocks, 1.1 to 1.3 times. SiLU and the product with the other half as
part of the GEMMs (two matrices, `_linear_pointwise.binary`) would bring 3% of theirs.

The operators are those that `torch.compile` uses when it freezes weights. They are private to torch: `pack` leaves a
weight alone where they are missing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.kernels.reference import act_and_mul, activate


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] as `linear` reads it fastest: float32 and, where the CPU has it, bfloat16, on x86 with AVX2.

    Elsewhere the weight itself. A packed one is a copy of as many bytes, with the same shape, dtype and device; it has
    no elements to look at, so it serves `linear` and `linear_act` alone.
    """
    return weight if not _packs(weight) else torch.ops.mkldnn._reorder_linear_weight(weight)


def linear(
    x: Tensor,  # [num_rows, K]
    weight: Tensor,  # [N, K], packed or not
    bias: Tensor | None = None,  # [N]
    *,
    partial: bool = False,
) -> Tensor:
    """x @ weight.T + bias, [num_rows, N], always one whole sum: ``partial`` allows for parts and asks for none."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def linear_act(
    x: Tensor,  # [num_rows, K]
    weight: Tensor,  # [N, K], gated [2 * N, K]: the rows of the gate, then those of the other; packed or not
    bias: Tensor | None,  # [N], gated [2 * N]
    act: str,  # one of ``reference.ACTIVATIONS``
    *,
    gated: bool,
) -> Tensor:
    """act(x @ weight.T + bias), gated act(gate) * up of the two halves of that: [num_rows, N] in x's dtype."""
    out = linear(x, weight, bias)
    return act_and_mul(out, act) if gated else activate(out, act)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
