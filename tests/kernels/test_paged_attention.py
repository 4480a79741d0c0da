"""The Triton kernels against dense attention in float64: on CUDA, and in float32 under Triton's interpreter.

The interpreter is chosen when triton is first imported, so `test_under_the_interpreter` runs this file once more in a
process of its own. In this process the CPU cases are skipped.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.targets import INTERPRETED, run_under_the_interpreter, targets


@pytest.fixture
def backend_on():
    def make(device: str):
        from cbatch.kernels.paged_attention import TritonAttention

        return TritonAttention(torch.device(device))

    return make


@targets
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 32), (1, 31), (1, 33), (1, 1)],
        [(1, 300), (1, 5), (1, 0)],  # splits, some of them empty, and a padded row
        [(5, 5), (33, 33), (16, 16)],
        [(1, 30), (1, 64), (9, 9), (70, 80), (1, 17), (0, 0)],
        [(1, 0), (1, 0)],
    ],
    ids=["block boundaries", "splits", "prefill", "mixed", "padding"],
)
def test_rows_attend_to_their_context_and_nothing_else(paged_step, assert_near, backend_on, device, dtype, rows):
    step = paged_step(rows, device=device, dtype=dtype, num_padding=2)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"window": 1},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 150, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
def test_window_softcap_and_sinks(paged_step, assert_near, backend_on, device, dtype, options):
    step = paged_step([(1, 300), (1, 20), (1, 21), (1, 0), (19, 90), (30, 30)], device=device, dtype=dtype, **options)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, v_head_dim",
    [(4, 4, 64, 64), (6, 2, 80, 80), (8, 1, 96, 96), (3, 1, 24, 16), (3, 1, 16, 40), (20, 1, 16, 16), (2, 1, 256, 256)],
)
def test_heads(paged_step, assert_near, backend_on, device, dtype, num_heads, num_kv_heads, head_dim, v_head_dim):
    step = paged_step(
        [(1, 70), (1, 5), (6, 20)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        device=device,
        dtype=dtype,
    )
    assert_near(step.run(backend_on(device)), step.expected())


@targets
@pytest.mark.parametrize("block_size", [8, 24, 64, 128])
def test_block_sizes(paged_step, assert_near, backend_on, device, dtype, block_size):
    step = paged_step([(1, 257), (1, 63), (9, 130)], block_size=block_size, window=110, device=device, dtype=dtype)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
def test_inputs_may_be_slices_of_a_fused_projection(paged_step, assert_near, backend_on, device, dtype):
    step = paged_step([(1, 40), (7, 50)], device=device, dtype=dtype)
    fused = torch.cat([step.q, step.k, step.v], dim=1)
    step.q, step.k, step.v = fused.split([step.q.shape[1], step.k.shape[1], step.v.shape[1]], dim=1)
    assert_near(step.run(backend_on(device)), step.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 4096])
def test_long_contexts_on_cuda(paged_step, assert_near, backend_on, window):
    step = paged_step(
        [(1, 8100), (1, 4097), (1, 63), (300, 2500)],
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        window=window,
    )
    assert_near(step.run(backend_on("cuda")), step.expected())


@pytest.mark.gpu
def test_blocks_beyond_2_to_the_31_elements(paged_step, backend_on):
    """The same step in the lowest and in the highest blocks of a pool of 4.3 billion elements: bit for bit equal."""
    step = paged_step([(1, 200), (1, 64), (40, 100)], block_size=64, head_dim=64, dtype=torch.bfloat16, device="cuda")
    backend = backend_on("cuda")
    expected = step.run(backend)
    num_blocks, page = step.k_cache.shape[0], step.k_cache.stride(0)
    total = -(-(2**32) // page) + num_blocks
    pool = torch.empty(total, page, dtype=torch.bfloat16, device="cuda")
    shift = total - num_blocks
    for name in ("k_cache", "v_cache"):
        old = getattr(step, name)
        new = torch.as_strided(pool, (total, *old.shape[1:]), old.stride(), old.storage_offset())
        new[shift:] = old
        setattr(step, name, new)
    step.batch.block_tables += shift
    step.batch.slot_mapping += shift * 64
    assert torch.equal(step.run(backend), expected)


@pytest.mark.gpu
def test_a_decode_step_can_be_captured_and_replayed_with_longer_contexts(paged_step, assert_near, backend_on):
    """Grids come from host ints alone: a graph captured at one length is right at another that the device holds."""
    step = paged_step([(1, 700), (1, 130), (1, 0)], head_dim=64, block_size=64, device="cuda")
    shorter = step.batch.context_lens.clone()
    backend = backend_on("cuda")
    step.run(backend)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    step.batch.context_lens.copy_((shorter - 64).clamp(min=0))
    with torch.cuda.graph(graph, stream=stream):
        out = step.run(backend)
    step.batch.context_lens.copy_(shorter)
    graph.replay()
    torch.cuda.synchronize()
    assert_near(out, step.expected())


def test_a_device_without_kernels_is_refused(backend_on):
    if INTERPRETED:
        pytest.skip("the interpreter serves the CPU")
    with pytest.raises(ValueError, match="cpu"):
        backend_on("cpu")


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
