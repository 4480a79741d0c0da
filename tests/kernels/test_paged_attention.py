"""The Triton kernels against dense attention in float64: on CUDA, and in float32 under Triton's interpreter.

The interpreter is chosen when triton is first imported, so `test_under_the_interpreter` runs this file once more in a
process of its own. In this process the CPU cases are skipped.
"""

from __future__ import annotations

import pytest
import torch

from cbatch.kernels.attention import AttentionBatch
from tests.kernels.targets import INTERPRETED, run_under_the_interpreter, targets

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture
def backend_on():
    """Make a backend. Whatever it was used for, its counters are zero in the end: the next launch relies on it."""
    made = []

    def make(device: str):
        from cbatch.kernels.paged_attention import TritonAttention

        made.append(TritonAttention(torch.device(device)))
        return made[-1]

    yield make
    assert not any(counters.any() for backend in made for counters in backend._counters)


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 64 tokens, as many as a step can have, so that small steps are split as large ones are."""
    from cbatch.kernels import paged_decode, paged_prefill

    monkeypatch.setattr(paged_decode, "MIN_SPLIT_LEN", 64)
    monkeypatch.setattr(paged_decode, "FULL_SPLIT_LEN", 64)
    monkeypatch.setattr(paged_decode, "RESIDENT_PROGRAMS", dict.fromkeys((64, 128, 256), 1000))
    monkeypatch.setattr(paged_prefill, "MIN_PREFILL_SPLIT", 64)
    monkeypatch.setattr(paged_prefill, "PROGRAMS_FOR_SPLITS", dict.fromkeys((64, 128, 256), 3))


def plan_of(backend, rows, window=0) -> list[list[int]]:
    """The items of a decode plan for rows of (query_len, context_len), 8 KV heads and tiles of 64, on an H200."""
    backend._num_multiprocessors = 132
    lens = [query_len for query_len, _ in rows]
    ints = {"dtype": torch.int32, "device": backend._device}
    backend.prepare(
        AttentionBatch(
            block_tables=torch.zeros(1, 1, 1, **ints),
            slot_mapping=torch.zeros(1, sum(lens), **ints),
            row_slots=torch.arange(len(rows), **ints) + 1000,
            cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).to(**ints),
            context_lens=torch.tensor([context_len for _, context_len in rows], **ints),
            num_decodes=0,
            max_query_len=max(lens),
            max_context_len=131072,  # what a captured step is told
        )
    )
    return backend._plan(window, 64, 8, 3, set(lens) != {1}).tolist()


def assert_covers(plan, rows, window=0) -> int:
    """Every row that decodes is read once from its window's first tile to its end. Returns the extras used."""
    used, token = len(rows), 0
    for row, (query_len, context_len) in enumerate(rows):
        if query_len == 1:
            _, _, _, _, start, end, num_splits, second = plan[row]
            items = [plan[row], *plan[second : second + num_splits - 1]]
            assert start == (max(context_len - window, 0) // 64 * 64 if window else 0)
            assert num_splits == 1 or second == used
            used += num_splits - 1
            split_len = end - start
            for item in items:
                end = min(start + split_len, context_len)
                assert item == [row, 1000 + row, token, context_len, start, end, num_splits, second]
                assert num_splits == 1 or (split_len % 64 == 0 and start < end)
                start = end
            assert end == context_len
        else:
            assert plan[row][0] == -1
        token += query_len
    assert used <= len(plan) and all(item[0] == -1 for item in plan[used:])
    return used - len(rows)


def assert_same_bits(actual, expected) -> None:
    """Bit for bit, NaN included."""
    bits = torch.int32 if actual.element_size() == 4 else torch.int16
    assert torch.equal(actual.view(bits), expected.view(bits))


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
def test_heads_may_lie_one_behind_the_other_in_a_page(paged_step, assert_near, backend_on, device, dtype):
    rows = [(1, 300), (1, 16), (1, 0), (19, 90), (30, 30)]
    step = paged_step(rows, device=device, dtype=dtype, heads_first=True, num_padding=3, head_dim=24, v_head_dim=40)
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


@targets
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 150}, {"window": 100, "softcap": 2.0, "sinks": True}],
    ids=str,
)
def test_splits_begin_and_end_anywhere(paged_step, assert_near, backend_on, short_splits, device, dtype, options):
    contexts = [1, 63, 64, 65, 0, 127, 128, 129, 300, 320]
    step = paged_step([(1, n) for n in contexts], num_heads=3, num_kv_heads=1, device=device, dtype=dtype, **options)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
def test_splits_beside_prompts_and_padding(paged_step, assert_near, backend_on, short_splits, device, dtype):
    rows = [(1, 200), (1, 0), (1, 130), (40, 40), (1, 65), (0, 0), (3, 200), (1, 1)]
    step = paged_step(rows, num_heads=3, num_kv_heads=1, num_padding=3, device=device, dtype=dtype)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
@pytest.mark.parametrize(
    "rows, options",
    [
        ([(7, 300)], {}),
        ([(1, 100), (1, 5), (33, 290)], {"head_dim": 24, "v_head_dim": 40}),
        ([(5, 200), (2, 2), (9, 130), (3, 64), (0, 0)], {"window": 70, "softcap": 2.0, "sinks": True}),
        ([(64, 300)], {"window": 150}),
        ([(33, 130), (2, 200)], {"num_heads": 6, "num_kv_heads": 2}),
        ([(5, 140)], {"num_heads": 3, "num_kv_heads": 3, "sinks": True}),
        ([(6, 140)], {"num_heads": 5, "num_kv_heads": 1, "sinks": True}),
        ([(3, 140)], {"num_heads": 20, "num_kv_heads": 1}),
    ],
    ids=["one", "beside decodes", "several", "two tiles", "3 a KV head", "1", "5", "too many"],
)
def test_chunks_behind_long_contexts_are_split(
    paged_step, assert_near, backend_on, short_splits, device, dtype, rows, options
):
    """Few queries and many keys: programs share the keys of a tile, and the last one adds their results up."""
    step = paged_step(rows, device=device, dtype=dtype, num_padding=2, **options)
    step.batch.max_context_len = 4096  # what a captured step is told
    backend = backend_on(device)
    expected = step.expected()
    for _ in range(2):  # the counters are zero again
        assert_near(step.run(backend), expected)
    assert backend._partials and len(backend._partials[-1]) > 1


@targets
def test_one_row_of_very_many_splits(paged_step, assert_near, backend_on, short_splits, device, dtype):
    """18 splits, of which the last program to arrive reads 8 at a time: two full turns and a broken one."""
    step = paged_step([(1, 5), (1, 1100)], num_heads=8, num_kv_heads=1, head_dim=64, device=device, dtype=dtype)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
@pytest.mark.parametrize("num_multiprocessors", [1, 1000])
def test_contexts_of_many_lengths_share_the_splits(
    paged_step, assert_near, backend_on, short_splits, monkeypatch, device, dtype, num_multiprocessors
):
    """With few extra programs only the longest rows are split, and never into more than there are programs for."""
    from cbatch.kernels import paged_decode

    monkeypatch.setattr(paged_decode, "RESIDENT_PROGRAMS", dict.fromkeys((64, 128, 256), 1))
    backend = backend_on(device)
    backend._num_multiprocessors = num_multiprocessors
    contexts = range(1, 131, 1 if device == "cuda" else 10)
    step = paged_step([(1, n) for n in contexts], num_heads=2, num_kv_heads=1, device=device, dtype=dtype)
    assert_near(step.run(backend), step.expected())


@targets
def test_more_rows_than_a_program_looks_at_in_one_go(paged_step, assert_near, backend_on, short_splits, device, dtype):
    """It takes 128. Rows that are split, and prompts, stand before and behind that line."""
    rows = [(1, 200), (4, 9), *[(0, 0)] * 124, (1, 70), (1, 90), (1, 150), (1, 1), (5, 40)]
    step = paged_step(rows, num_heads=2, num_kv_heads=1, device=device, dtype=dtype)
    backend = backend_on(device)
    backend._num_multiprocessors = 0  # half as many extra programs as there are rows
    assert_near(step.run(backend), step.expected())


@devices
@pytest.mark.parametrize("context_len", [1, 224, 1024, 4192, 8100, 131072])
def test_rows_of_one_length_are_not_split(backend_on, device, context_len):
    """Two halves of 32 rows were 512 programs, and 396 are resident: a wave and a third took 20% longer.

    So did a grid of 50 items, 400 programs, though all but 256 of them had nothing to do.
    """
    rows = [(1, context_len)] * 32
    plan = plan_of(backend_on(device), rows)
    assert len(plan) == 49
    assert assert_covers(plan, rows) == 0


@devices
def test_rows_of_little_more_than_a_wave_are_split(backend_on, device):
    """64 rows make 512 programs: the last 116 of them would run alone. As 1,024 halves, all waves are full."""
    rows = [(1, 1024)] * 64
    assert assert_covers(plan_of(backend_on(device), rows), rows) == 64


@devices
@pytest.mark.parametrize(("num_rows", "bucket"), [(49, 64), (97, 112)])
def test_rows_that_fill_their_waves_are_not_split_for_the_padding_behind_them(backend_on, device, num_rows, bucket):
    """97 rows are two waves. Counted as 112 they were halved, and their step took 1.058 times that of 96, not 1.029."""
    rows = [(1, 1130)] * num_rows + [(1, 0)] * (bucket - num_rows)
    assert assert_covers(plan_of(backend_on(device), rows), rows) == 0


@devices
def test_a_row_alone_is_split_by_128_tokens(backend_on, device):
    assert assert_covers(plan_of(backend_on(device), [(1, 1024)]), [(1, 1024)]) == 7


@devices
@pytest.mark.parametrize("window", [0, 1000])
def test_a_plan_covers_any_mix_of_rows(backend_on, device, window):
    """On one backend, so that each plan lies where a longer or shorter one was."""
    backend = backend_on(device)
    generator = torch.Generator().manual_seed(0)
    for num_rows, spread in [(1, 3), (32, 0.5), (300, 1), (7, 2), (32, 2), (129, 1.5), (200, 0.1)]:
        contexts = (torch.randn(num_rows, generator=generator) * spread + 7).exp().int().clamp(0, 131072).tolist()
        for rows in ([(1, n) for n in contexts], [(1 if n % 3 else n % 5, n) for n in contexts] + [(9, 70000)]):
            assert_covers(plan_of(backend, rows, window), rows, window)
    rows = [(1, 100000), *[(1, 1000)] * 30, (1, 0)]
    # One wave has room for 17 more items, which all go to the long row.
    assert assert_covers(plan_of(backend, rows, window), rows, window) == (0 if window else 17)
    rows = [(1, 1)] * 32
    assert assert_covers(plan_of(backend, rows, window), rows, window) == 0


@targets
def test_layers_share_a_plan_by_window_and_steps_share_none(
    paged_step, assert_near, backend_on, short_splits, device, dtype
):
    backend = backend_on(device)
    for contexts in ([300, 5, 0, 129], [5, 300, 129, 64]):
        step = paged_step([(1, n) for n in contexts], num_heads=2, num_kv_heads=1, device=device, dtype=dtype)
        backend.prepare(step.batch)
        for window in (0, 70, 0, 70):
            step.options["window"] = window
            out = backend.attend(step.q, step.k, step.v, step.k_cache, step.v_cache, step.group, **step.options)
            assert_near(out, step.expected())
        assert len(backend._plans) == 2


@targets
def test_programs_take_several_tiles_of_prompts(paged_step, assert_near, backend_on, monkeypatch, device, dtype):
    """The grid has room for 2 broken ends: the 7 short prompts share it with a long one's tiles."""
    from cbatch.kernels import paged_prefill

    monkeypatch.setattr(paged_prefill, "PREFILL_ROWS", 2)
    rows = [(1, 40), (2, 2), (3, 70), (5, 5), (1, 9), (300 if device == "cuda" else 40, 400), (2, 9), (4, 4), (6, 6)]
    step = paged_step(rows, num_heads=2, num_kv_heads=1, device=device, dtype=dtype)
    assert_near(step.run(backend_on(device)), step.expected())


@targets
def test_keys_and_values_may_be_in_the_pages_already(paged_step, backend_on, device, dtype):
    step = paged_step([(1, 40), (1, 0), (7, 50)], device=device, dtype=dtype)
    backend = backend_on(device)
    expected = step.run(backend)
    assert torch.equal(backend.slot_mapping(step.group), step.batch.slot_mapping[step.group])
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    step.k, step.v = None, None
    assert torch.equal(step.run(backend), expected)
    assert_same_bits(step.k_cache, k_cache)
    assert_same_bits(step.v_cache, v_cache)


@targets
def test_scratch_is_kept_and_only_grows(paged_step, backend_on, short_splits, device, dtype):
    """A captured graph may hold the address of any scratch there ever was, so none is freed or left dirty."""
    backend = backend_on(device)
    small, large = (
        paged_step([(1, 130)] * num_rows, num_heads=2, num_kv_heads=1, device=device, dtype=dtype)
        for num_rows in (1, 3)
    )
    first = small.run(backend)
    assert torch.equal(small.run(backend), first)
    assert len(backend._counters) == len(backend._partials) == 1
    large.run(backend)
    assert len(backend._counters) == len(backend._partials) == 2
    assert torch.equal(small.run(backend), first)
    large.run(backend)
    assert len(backend._counters) == len(backend._partials) == 2


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
@pytest.mark.parametrize(
    "rows",
    [[(64, 20000)], [*[(1, 3000)] * 8, (100, 9000)], [(30, 5000), (2, 4100), (64, 700)]],
    ids=["one tile", "beside decodes", "several"],
)
@pytest.mark.parametrize("window", [0, 4096])
def test_split_chunks_have_the_same_bits_whoever_arrives_last(paged_step, assert_near, backend_on, rows, window):
    """Few queries behind many keys, whose programs leave parts for the last one: 300 launches, all equal and right."""
    options = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    step = paged_step(rows, device="cuda", window=window, **options)
    backend = backend_on("cuda")
    first = step.run(backend)
    assert_near(first, step.expected())
    for _ in range(300):
        assert_same_bits(step.run(backend), first)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows, longest", [(1, 20000), (8, 3000), (40, 3000)])
def test_splits_add_up_to_the_same_bits_whoever_arrives_last(paged_step, assert_near, backend_on, num_rows, longest):
    """A race of stores and counters would show here, if anywhere: 300 launches, all equal and all right."""
    contexts = [max(1, longest * (i + 1) ** 2 // num_rows**2) for i in range(num_rows)]
    step = paged_step(
        [(1, n) for n in contexts],
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    backend = backend_on("cuda")
    expected = step.run(backend)
    assert_near(expected, step.expected())
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        different += (step.run(backend) != expected).sum()
    assert different.item() == 0


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


@devices
def test_heads_that_lie_2_to_the_31_elements_apart(paged_step, assert_near, backend_on, device):
    """As transformers lays out a step of 262,144 tokens with 64 heads of 128: a head's offset went around in 32 bits.
    The 6 GiB are address space on the CPU."""
    options = {"num_heads": 6, "num_kv_heads": 6, "block_size": 16, "dtype": torch.float16, "device": device}
    step = paged_step([(1, 40), (7, 20)], **options)
    room, apart = torch.empty(6 * 2**29, dtype=torch.float16, device=device), 2**29
    for i, name in enumerate(("q", "k", "v")):
        heads = getattr(step, name)
        strided = room.as_strided(heads.shape, (heads.shape[2], apart, 1), i << 20)
        setattr(step, name, strided.copy_(heads))
    assert_near(step.run(backend_on(device)), step.expected())


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
