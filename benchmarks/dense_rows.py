"""Matrix products, norms, rotary positions and sampling as rows of the kernels' table, at the shapes of 8B and 1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import GIB
from benchmarks.kernel_row import Row, error, us_per_call
from cbatch.kernels import reference
from cbatch.kernels.activation import act_and_mul
from cbatch.kernels.linear import linear, linear_act
from cbatch.kernels.norm import add_rms_norm
from cbatch.kernels.paged_attention import write_kv
from cbatch.kernels.rope import qk_norm_rope, rope_and_store
from cbatch.kernels.sampling import draw, greedy
from cbatch.sampler import encode
from cbatch.sampling_params import SamplingParams

NUM_ROWS = 32
MORE_ROWS = (40, 48, 64)  # of the 8B shape: why no decode step has 40
BLOCK_SIZE = 64
EPS = 1e-5
MATRICES = {  # name: (inputs, rows of the weight, what stands behind)
    "8B": {
        "qkv": (4096, 6144, "rope"),
        "o": (4096, 4096, "norm"),
        "gate and up": (4096, 28672, "act"),
        "down": (14336, 4096, "norm"),
        "head": (4096, 128256, "sampling"),
    },
    "1B": {
        "qkv": (2048, 3072, "rope"),
        "o": (2048, 2048, "norm"),
        "gate and up": (2048, 16384, "act"),
        "down": (8192, 2048, "norm"),
        "head": (2048, 128256, "sampling"),
    },
}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def num_copies(num_bytes: int) -> int:
    """Of one call's data: all together are far more than the L2 cache holds."""
    return max(4, min(256, GIB // num_bytes))


def product(model: str, name: str, num_rows: int) -> Row:
    """One matrix of a layer, as the decoder calls it. Beside it cuBLAS, and the activation."""
    k, n, behind = MATRICES[model][name]
    weights = [0.02 * random(n, k) for _ in range(num_copies(2 * n * k))]
    x = random(num_rows, k)
    beside: Callable[[Tensor], Tensor]
    if behind == "act":
        calls = [partial(linear_act, x, weight, None, "silu", gated=True) for weight in weights]
        beside = lambda weight: act_and_mul(F.linear(x, weight), "silu")  # noqa: E731
        expected = reference.linear_act(x.float(), weights[0].float(), None, "silu", gated=True)
    else:
        calls = [partial(linear, x, weight, None, partial=behind != "sampling") for weight in weights]
        beside = partial(F.linear, x)
        expected = reference.linear(x.float(), weights[0].float(), None)
    actual = calls[0]()
    num_splits = len(actual) if actual.dim() == 3 else 1
    distance = error(actual.sum(0) if actual.dim() == 3 else actual, expected)
    del expected
    return Row(
        kernel="linear_act" if behind == "act" else "linear",
        case=f"{model} {name}: {num_rows} x {k} -> {n}" + (f", {num_splits} parts" if num_splits > 1 else ""),
        us=us_per_call(calls),
        amount=weights[0].nbytes + x.nbytes + 2 * num_rows * (n // 2 if behind == "act" else n),
        unit="TB/s",
        beside="cuBLAS, act_and_mul" if behind == "act" else "cuBLAS",
        beside_us=us_per_call([partial(beside, weight) for weight in weights]),
        error=distance,
    )


def norm(num_rows: int, num_columns: int, num_parts: int) -> Row:
    """The residual sum and the norm behind it, of a product that is whole (0 parts) or in parts. Beside it torch's."""
    shape = (num_rows, num_columns)
    amount = ((4 * num_parts or 2) + 6) * num_rows * num_columns  # x; residual, total and what is normed
    copies = num_copies(amount)
    xs = [random(num_parts, *shape, dtype=torch.float32) if num_parts else random(*shape) for _ in range(copies)]
    residuals = [random(*shape) for _ in range(copies)]
    weight = random(num_columns, dtype=torch.float32)
    weight_16 = weight.bfloat16()

    def in_torch(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + (x.sum(0).bfloat16() if num_parts else x)
        return F.rms_norm(total, (num_columns,), weight_16, EPS), total

    calls = [partial(add_rms_norm, x, residual, weight, EPS) for x, residual in zip(xs, residuals, strict=True)]
    actual, expected = torch.stack(calls[0]()), reference.add_rms_norm(xs[0], residuals[0], weight, EPS)
    return Row(
        kernel="add_rms_norm",
        case=f"{num_rows} x {num_columns}" + (f", {num_parts} parts" if num_parts else ""),
        us=us_per_call(calls),
        amount=amount,
        unit="TB/s",
        beside="add, rms_norm of torch" if not num_parts else "sum, add, rms_norm of torch",
        beside_us=us_per_call([partial(in_torch, x, r) for x, r in zip(xs, residuals, strict=True)]),
        error=error(actual, torch.stack(expected)),
    )


def rope(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, num_parts: int) -> Row:
    """Turn queries and keys, and store keys and values in their pages. Beside it the same in two kernels."""
    heads = num_heads + 2 * num_kv_heads
    amount = num_tokens * head_dim * (heads * (4 * num_parts or 2) + 2 * heads + 4)
    copies = num_copies(amount + 2 * num_tokens * num_kv_heads * head_dim * 2)
    shape = (num_tokens, heads * head_dim)
    qkvs = [random(num_parts, *shape, dtype=torch.float32) if num_parts else random(*shape) for _ in range(copies)]
    angles = torch.rand(8192, head_dim // 2, device="cuda") * 6.2831853
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(8192, (num_tokens,), device="cuda")
    num_blocks = max(64, num_tokens // BLOCK_SIZE)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens].int()
    pool = torch.zeros(num_blocks, 2 * copies, BLOCK_SIZE, num_kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    parts = pool.unbind(1)
    caches = list(zip(parts[::2], parts[1::2], strict=True))

    def call(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return rope_and_store(qkv, num_heads, num_kv_heads, positions, cos_sin, None, EPS, k_cache, v_cache, slots)

    def in_two(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        whole = qkv.sum(0).bfloat16() if num_parts else qkv
        q, k, v = whole.view(num_tokens, heads, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
        qk_norm_rope(whole.view(num_tokens, heads, head_dim)[:, :-num_kv_heads], num_heads, positions, cos_sin, None, 0)
        write_kv(k, v, k_cache, v_cache, slots)
        return q

    k_cache, v_cache = caches[0]
    expected_k, expected_v = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    line = (num_heads, num_kv_heads, positions, cos_sin, None, EPS)
    expected = reference.rope_and_store(qkvs[0], *line, expected_k, expected_v, slots)
    distance = error(call(qkvs[0], k_cache, v_cache), expected)
    distance = max(distance, error(k_cache, expected_k), error(v_cache, expected_v))
    return Row(
        kernel="rope_and_store",
        case=f"{num_tokens} tokens, {num_heads} heads on {num_kv_heads} of {head_dim}"
        + (f", {num_parts} parts" if num_parts else ""),
        us=us_per_call([partial(call, qkv, *cache) for qkv, cache in zip(qkvs, caches, strict=True)]),
        amount=amount,
        unit="TB/s",
        beside="sum, qk_norm_rope, write_kv" if num_parts else "qk_norm_rope, write_kv",
        beside_us=us_per_call([partial(in_two, qkv, *cache) for qkv, cache in zip(qkvs, caches, strict=True)]),
        error=distance,
    )


def sampling(num_columns: int, top_k: int | None) -> Row:
    """The tokens of ``NUM_ROWS`` rows of logits. Beside it torch, which sorts where there is a top-k.

    ``top_k`` is None for greedy rows, 0 for rows drawn from all tokens, else they also have a top-p of 0.9. The error
    is the share of rows whose token is another one: noise that is rounded otherwise may turn a near-tie, once.
    """
    logits = [3 * random(NUM_ROWS, num_columns) for _ in range(16)]
    slots = torch.randperm(NUM_ROWS, device="cuda").int()
    last_tokens, sampled = torch.zeros(2, NUM_ROWS + 1, dtype=torch.int32, device="cuda").unbind(0)
    wishes = SamplingParams(temperature=0.8, top_k=top_k or 0, top_p=0.9 if top_k else 1.0)
    words = [
        encode(wishes, 77 * i, prompt_len=1, stop_ids=(), bad_word_ids=()).param_values for i in range(NUM_ROWS + 1)
    ]
    params = torch.from_numpy(np.stack(words)).to("cuda")
    positions = torch.randint(8192, (NUM_ROWS,), dtype=torch.int32, device="cuda")
    rows = torch.arange(NUM_ROWS, dtype=torch.int32, device="cuda")

    def calls(kernel: Callable[..., None]) -> list[Callable[[], None]]:
        if top_k is None:
            return [partial(kernel, x, slots, last_tokens, sampled) for x in logits]
        line = (params, positions, rows, slots, last_tokens, sampled)
        return [partial(kernel, x, *line, filtered=top_k > 0) for x in logits]

    mine, beside = (greedy, reference.greedy) if top_k is None else (draw, reference.draw)
    calls(beside)[0]()
    expected = sampled.clone(), last_tokens.clone()
    sampled.zero_(), last_tokens.zero_()
    calls(mine)[0]()
    wrong = (sampled != expected[0]).sum().item() / NUM_ROWS
    if wrong > 1 / NUM_ROWS or (last_tokens != expected[1]).sum().item() / NUM_ROWS != wrong:
        raise ArithmeticError(f"{wrong:.0%} of the tokens are others than the reference's")
    return Row(
        kernel="greedy" if top_k is None else "draw",
        case=f"{NUM_ROWS} x {num_columns}" + (f", top_k {top_k}, top_p 0.9" if top_k else ""),
        us=us_per_call(calls(mine)),
        amount=logits[0].nbytes,
        unit="TB/s",
        beside="torch, sorts" if top_k else "torch",
        beside_us=us_per_call(calls(beside)),
        error=wrong,
    )


def cases() -> Iterator[tuple[str, partial[Row]]]:
    """(kernel, how to measure a row of it)."""
    for model, matrices in MATRICES.items():
        for name, (_, _, behind) in matrices.items():
            for num_rows in (NUM_ROWS, *(MORE_ROWS if model == "8B" else ())):
                yield "linear_act" if behind == "act" else "linear", partial(product, model, name, num_rows)
    for num_rows, num_columns, num_parts in ((32, 4096, 0), (32, 4096, 4), (32, 2048, 4), (8192, 4096, 0)):
        yield "add_rms_norm", partial(norm, num_rows, num_columns, num_parts)
    for num_tokens, head_dim, num_parts in ((32, 128, 0), (32, 128, 2), (32, 64, 2), (8192, 128, 0)):
        yield "rope_and_store", partial(rope, num_tokens, 32, 8, head_dim, num_parts)
    for top_k in (None, 0, 50):
        yield "greedy" if top_k is None else "draw", partial(sampling, 128256, top_k)
