"""Linear layers: the kernel against its twin in ``reference``, the choice of it, and the table that ships."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cbatch.kernels import reference
from tests.kernels.targets import assert_rounded, random, run_under_the_interpreter, targets

# Far from zero the activations count on 1 / (inf + 1) = 0; numpy, which stands for the GPU here, mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
CARD = torch.device("cuda", 0)
ROWS = (16, 32, 64, 128)  # those that the table has of every shape
SIZES = (16, 32, 64, 80, 96, 128, 144, 160, 192)


def make_config(block_n=64, block_k=64, num_stages=2, split_k=1, num_warps=4):
    from cbatch.kernels.skinny_gemm import Config

    return Config(block_n, block_k, num_stages, split_k, num_warps)


def inputs(num_rows, k, num_weight_rows, device, dtype):
    """x, weight and bias that make results near 1."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the kernel takes 16 bits: float32 is cuBLAS's")
    x = random(num_rows, k, device=device, dtype=dtype, seed=1)
    weight = random(num_weight_rows, k, device=device, dtype=torch.float32, seed=2) / k**0.5
    return x, weight.to(dtype), random(num_weight_rows, device=device, dtype=dtype, seed=3)


def exact(x, weight, bias=None, act=None, gated=False):
    """In float64, rounded once."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if act is not None:
        gate, up = y.chunk(2, dim=1) if gated else (y, 1)
        y = reference.ACTIVATIONS[act](gate) * up
    return y.to(x.dtype)


@targets
@pytest.mark.parametrize(
    ("num_rows", "k", "n", "config"),
    [
        (1, 64, 72, {}),
        (3, 576, 1000, {"split_k": 2}),
        (16, 1536, 64, {"split_k": 4, "block_k": 128}),
        (17, 4104, 72, {"split_k": 3, "block_k": 128}),
        (33, 8, 200, {"block_n": 128}),
        (40, 200, 72, {"split_k": 2}),  # 32 and 16 rows
        (90, 72, 65, {}),  # 64 and 32
        (129, 200, 72, {"split_k": 2}),  # 128 and 16
        (161, 72, 65, {}),  # 128 and 64
        (64, 128, 65, {"split_k": 5}),  # two blocks of K: three parts have none
        (100, 72, 130, {"block_n": 128, "num_warps": 8}),
        (128, 576, 128, {"split_k": 2, "num_stages": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_awkward_shapes(device, dtype, num_rows, k, n, config, has_bias):
    from cbatch.kernels.skinny_gemm import skinny_gemm, sum_partials

    x, weight, bias = inputs(num_rows, k, n, device, dtype)
    bias = bias if has_bias else None
    config = make_config(**config)
    y = skinny_gemm(x, weight, bias, config)
    if config.split_k > 1:
        assert y.shape == (config.split_k, num_rows, n) and y.dtype == torch.float32 and y.is_contiguous()
        y = sum_partials(y, dtype)
    assert_rounded(y, exact(x, weight, bias))


@targets
def test_the_first_part_has_the_bias_and_a_part_of_nothing_is_zeros(device, dtype):
    from cbatch.kernels.skinny_gemm import skinny_gemm

    x, weight, bias = inputs(5, 128, 64, device, dtype)
    parts = skinny_gemm(x, weight, bias, make_config(split_k=4))  # of two blocks of K
    one, two = (x[:, k].float() @ weight[:, k].float().T for k in (slice(64), slice(64, 128)))
    expected = torch.stack([one + bias.float(), two, torch.zeros_like(one), torch.zeros_like(one)])
    torch.testing.assert_close(parts, expected, rtol=2e-5, atol=2e-5)


@targets
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_activations(device, dtype, act, gated):
    from cbatch.kernels.skinny_gemm import skinny_gemm

    many, weight, bias = inputs(40, 200, 2 * 72 if gated else 72, device, dtype)
    for x, b in ((4 * many[:19], bias), (4 * many, None), (4 * many, bias)):
        y = skinny_gemm(x, weight, b, make_config(), act=act, gated=gated)
        assert_rounded(y, exact(x, weight, b, act, gated))


@targets
def test_rows_of_a_wider_tensor(device, dtype):
    from cbatch.kernels.skinny_gemm import skinny_gemm

    wide, weight, _ = inputs(24, 3 * 64, 80, device, dtype)
    x, weight = wide[2:21, 64:128], weight[:, 64:128]
    assert_rounded(skinny_gemm(x, weight, None, make_config()), exact(x, weight))


@targets
@pytest.mark.parametrize("split_k", [1, 2])
def test_linear_is_the_same_in_parts(device, dtype, split_k, monkeypatch):
    from cbatch.kernels import linear

    x, weight, bias = inputs(6, 256, 96, device, dtype)
    monkeypatch.setattr(linear, "_config_for", lambda *_: make_config(split_k=split_k))
    whole, parts = linear.linear(x, weight, bias), linear.linear(x, weight, bias, partial=True)
    assert_rounded(whole, exact(x, weight, bias))
    assert torch.equal(whole, parts if split_k == 1 else (parts[0] + parts[1]).to(dtype))


@targets
@pytest.mark.parametrize("gated", [True, False])
def test_linear_act_is_one_kernel(device, dtype, gated, monkeypatch):
    from cbatch.kernels import linear

    x, weight, bias = inputs(6, 256, 96, device, dtype)
    monkeypatch.setattr(linear, "_config_for", lambda *_: make_config())
    monkeypatch.setattr(linear, "F", None)
    y = linear.linear_act(x, weight, bias, "silu", gated=gated)
    assert_rounded(y, exact(x, weight, bias, "silu", gated))


@targets
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "k"), [(3, 60), (0, 64), (300, 64), (5, 64)], ids=["unaligned K", "none", "many", "few"]
)
def test_linear_takes_any_rows_of_any_device(device, dtype, num_rows, k, partial):
    """What is no matter of the kernel goes to cuBLAS, and on the CPU to torch."""
    from cbatch.kernels import linear

    x = random(num_rows, k, device=device, dtype=dtype)
    weight = random(48, k, device=device, dtype=dtype, seed=2) / 8
    y = linear.linear(x, weight, partial=partial)
    assert_rounded(y.sum(0).to(dtype) if y.dim() == 3 else y, exact(x, weight))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for gated in (True, False):
        y = linear.linear_act(x, weight, None, "silu", gated=gated)
        torch.testing.assert_close(y, exact(x, weight, None, "silu", gated), **tolerance)


@targets
def test_bits_of_a_row_do_not_depend_on_the_batch(device, dtype, monkeypatch):
    from cbatch.kernels.linear import _with_room
    from cbatch.kernels.skinny_gemm import skinny_gemm

    # In the interpreter numpy multiplies tiles, adding up in an order that depends on their size: not so the tensor
    # core's instruction, and not so this.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.add.reduce(a[:, :, None] * b, axis=1, dtype=dtype))
    x, weight, _ = inputs(192, 1536, 64, device, dtype)
    config = make_config(block_k=128, num_stages=4, split_k=2)
    first = skinny_gemm(x[2:3], weight, None, config)
    for num_rows in SIZES:
        rows = skinny_gemm(x[:num_rows], weight, None, _with_room(config, num_rows, "linear"))
        assert torch.equal(rows[:, 2:3], first)


@pytest.mark.gpu
def test_a_weight_beyond_2_to_the_31_elements():
    from cbatch.kernels.skinny_gemm import skinny_gemm

    weight = torch.zeros(2**31 // 8192 + 64, 8192, dtype=torch.bfloat16, device="cuda")
    x, weight[-64:], _ = inputs(4, 8192, 64, "cuda", torch.bfloat16)
    y = skinny_gemm(x, weight, None, make_config(split_k=2))
    assert not y[:, :, :-64].any()
    assert_rounded(y[:, :, -64:].sum(0).bfloat16(), exact(x, weight[-64:]))


@pytest.mark.gpu
def test_in_a_graph_with_new_rows():
    """A captured launch has its descriptors inside: the addresses stay, what lies there may change."""
    from cbatch.kernels import linear

    x, weight, bias = inputs(32, 4096, 6144, "cuda", torch.bfloat16)
    linear.linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear.linear(x, weight, bias)
    x.copy_(x.flip(0))
    graph.replay()
    assert_rounded(y, exact(x, weight, bias))


@pytest.fixture
def card(monkeypatch):
    """``choose`` for a device that is not there."""
    from cbatch.kernels import linear

    def make(name="NVIDIA H200", major=9):
        properties = SimpleNamespace(name=name, major=major, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        linear._choose.cache_clear()
        return linear

    linear._tables.cache_clear()
    yield make
    linear._choose.cache_clear()
    linear._tables.cache_clear()


def test_every_entry_that_ships_is_a_kernel():
    from cbatch.kernels import linear

    tables = linear.read_table(Path(linear.__file__).with_name("gemm_table.json"))
    assert "NVIDIA H200" in tables
    for shape, entries in tables["NVIDIA H200"].items():
        assert set(ROWS) <= set(entries) <= set(linear.ROWS), shape
        for rows, config in entries.items():
            if config is not None:
                assert config.fits(rows, shape.endswith("gated")) and config.shared_bytes(rows, False) <= 227 * 1024


def test_a_product_whose_kernels_did_not_compile_keeps_its_entry(capsys, tmp_path):
    """A process that compiles died, and with it all jobs of the pool: cuBLAS, compared with nothing, won everywhere."""
    from benchmarks import gemm_table as g

    product, config = g.products("llama-8b")[0], g.Config(64, 64, 3, 1, 4)
    done, died = Future(), Future()
    done.set_result(None)
    died.set_exception(RuntimeError("a process of the pool ended"))
    work = [(product, 16, [config]), (product, 32, [config]), (product, 64, [])]
    jobs = {g.Variant.of(product, 16, config): done, g.Variant.of(product, 32, config): died}
    assert g.what_compiled(work, jobs) == [work[0], work[2]]
    said = capsys.readouterr().out
    assert f"{product.key}, 32 rows left out" in said and "a process of the pool ended" in said

    table = tmp_path / "table.json"
    cell = {"shape": product.key, "cublas_us": 9.0, "triton_us": 8.0, "config": asdict(config)}
    g.write(table, "a card", [{**cell, "rows": rows} for rows in (16, 32)])
    g.write(table, "a card", [{"shape": product.key, "rows": 16, "cublas_us": 7.0, "config": None}])
    assert json.loads(table.read_text())["a card"][product.key] == {"16": "cublas", "32": asdict(config)}
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_the_table_has_the_shapes_of_the_benchmarked_models(card):
    from benchmarks.gemm_table import MODELS, products

    linear = card()
    shapes = linear._tables()["NVIDIA H200"]
    assert {product.key for model in MODELS for product in products(model)} <= set(shapes)
    assert linear.choose(4096, 6144, 31, "linear", CARD) == shapes["4096x6144"][32]


def test_unknown_shapes_are_cut_by_rule_on_hopper_and_are_cublas_elsewhere(card):
    for k, n in ((64, 64), (576, 960), (2048, 5120), (5120, 10240), (8192, 8192), (4104, 200000)):
        for kind in ("linear", "act", "gated"):
            linear = card("NVIDIA H100", 9)
            for rows in ROWS[:3]:
                config = linear.choose(k, n, rows, kind, CARD)
                assert config.fits(rows, kind == "gated")
                assert config.split_k == 1 or k // config.split_k >= 16 * rows
            assert linear.choose(k, n, 128, kind, CARD) is None
            assert card("NVIDIA A100", 8).choose(k, n, 16, kind, CARD) is None


def test_a_fixed_order_is_one_for_all_numbers_of_rows(card):
    linear = card()
    for k, n, kind in ((4096, 6144, "linear"), (4096, 14336, "gated"), (768, 3072, "act"), (5120, 5120, "linear")):
        configs = [linear.choose(k, n, rows, kind, CARD, fixed_order=True) for rows in (1, *SIZES)]
        assert len({(config.block_k, config.split_k) for config in configs}) == 1
        assert all(config.fits(rows, kind == "gated") for config, rows in zip(configs, (16, *SIZES), strict=True))


def test_a_table_of_ones_own_comes_first(card, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    own = {"block_n": 64, "block_k": 64, "num_stages": 5, "split_k": 1, "num_warps": 4}
    path.write_text(json.dumps({"NVIDIA H200": {"4096x6144": {"32": own, "16": "cublas"}}, "Other": {}}))
    linear = card()
    before = linear.choose(4096, 4096, 32, "linear", CARD)
    assert linear.choose(4096, 6144, 32, "linear", CARD) != make_config(num_stages=5)
    linear.load_table(path)
    assert linear.choose(4096, 6144, 32, "linear", CARD) == make_config(num_stages=5)
    assert linear.choose(4096, 6144, 16, "linear", CARD) is None
    assert linear.choose(4096, 4096, 32, "linear", CARD) == before

    linear._tables.cache_clear()
    linear._choose.cache_clear()
    monkeypatch.setenv("CBATCH_GEMM_TABLE", str(path))
    assert linear.choose(4096, 6144, 32, "linear", CARD) == make_config(num_stages=5)


@pytest.mark.parametrize(
    "entry",
    [
        "cutlass",
        {"block_n": 64},
        {"block_n": 96, "block_k": 64, "num_stages": 3, "split_k": 1, "num_warps": 4},
        {"block_n": 128, "block_k": 256, "num_stages": 4, "split_k": 1, "num_warps": 4},  # 256 KiB and more
        {"block_n": 64, "block_k": 64, "num_stages": 3, "split_k": 2, "num_warps": 4},  # an activation of a part
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused_by_name(entry, tmp_path):
    from cbatch.kernels import linear

    path = tmp_path / "table.json"
    path.write_text(json.dumps({"Card": {"64x64 gated": {"32": entry}}}))
    with pytest.raises(ValueError, match=r"table\.json is no table .*'64x64 gated', 32 rows"):
        linear.read_table(path)


def test_the_twins_do_what_they_say():
    x, weight, bias = inputs(4, 48, 40, "cpu", torch.float32)
    assert_rounded(reference.linear(x, weight, bias, partial=True), exact(x, weight, bias))
    for gated in (True, False):
        y = reference.linear_act(x, weight, bias, "gelu_tanh", gated=gated)
        assert_rounded(y, exact(x, weight, bias, "gelu_tanh", gated))


def test_under_the_interpreter():
    run_under_the_interpreter(__file__)
