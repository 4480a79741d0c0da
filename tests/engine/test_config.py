"""Options that no engine can be built with are refused with their value, before anything is loaded or taken."""

import numpy as np
import pytest
import torch

from cbatch import LLM, SamplingParams
from cbatch.config import EngineConfig, find_device
from cbatch.errors import ConfigError
from tests.counting import CountingModel


@pytest.mark.parametrize(
    "device", ["foo", "gpu", "", 5, True, "cuda:x", "cuda:-1", "cpu:1", "meta", torch.device("mps")]
)
def test_what_is_no_device_is_refused(device):
    for build in (EngineConfig, lambda device: LLM("no-such-model", device=device)):
        shown = repr(str(device) if isinstance(device, torch.device) else device)
        with pytest.raises(ConfigError, match=f"device is {shown}, but must be cpu, cuda, or cuda:N"):
            build(device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3", torch.device("cpu"), torch.device("cuda", 3)])
def test_a_device_is_kept_by_its_name(device):
    assert EngineConfig(device=device).device == str(device)


@pytest.mark.parametrize(
    ("num_gpus", "device", "says"),
    [(0, "cuda", "finds no CUDA device"), (0, "cuda:1", "finds no CUDA device"), (2, "cuda:2", "finds 2 of them")],
)
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, num_gpus, device, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=f"device is '{device}', but torch {says}"):
        find_device(device)
    with pytest.raises(ConfigError, match=f"device is '{device}', but torch {says}"):
        LLM("llama-1b", device=device, load_format="dummy")


def test_the_gpu_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(find_device(device)) for device in (None, "cpu", "cuda:1")] == ["cuda", "cpu", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [str(find_device(device)) for device in (None, "cpu")] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1000000000, but must be an integer from 1 to 65536"),
        ({"block_size": 10**9}, "block_size is 1000000000, but must be an integer from 1 to 65536"),
        ({"num_blocks": 10**10}, "num_blocks is 10000000000, but must be"),
        ({"num_blocks": 10**9}, "num_blocks is 1000000000, but a pool of so many blocks of 64 tokens does not fit"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens is 1000000000, but must be"),
        ({"depth": 10**9}, "depth is 1000000000, but must be an integer from 1 to 64"),
    ],
)
def test_a_slip_of_the_finger_is_an_error_and_no_allocation(options, says):
    """A billion sequences used to end the process: no exception comes of memory that runs out."""
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_the_largest_number_of_sequences_still_builds():
    with LLM(CountingModel(), max_num_seqs=2**16, num_blocks=10, block_size=4) as llm:
        output = llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=2))[0]
        assert output.outputs[0].token_ids == [2, 3]


def test_tables_that_outgrow_32_bit_indices_are_refused():
    """They were an assertion, though any user can ask for them."""
    with pytest.raises(
        ConfigError, match="tables of max_num_seqs=65536 rows for max_model_len=131072 tokens do not fit"
    ):
        LLM(CountingModel(max_model_len=2**17), max_num_seqs=2**16, num_blocks=10, block_size=1)


def test_numpys_numbers_are_numbers():
    """As in SamplingParams. "max_num_seqs is np.int64(4), but must be an integer from 1 to 65536" helped nobody."""
    counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "max_queue_size")
    config = EngineConfig(
        **dict.fromkeys(counts, np.int64(4)),
        **dict.fromkeys(("gpu_memory_utilization", "swap_space", "itl_target_ms"), np.float32(0.5)),
        seed=np.uint64(2**63),
        depth=np.int8(2),
    )
    assert {type(getattr(config, name)) for name in (*counts, "seed", "depth")} == {int}
    assert type(config.itl_target_ms) is float and config.seed == 2**63


class Speechless:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("value", [10**5000, [10**5000], Speechless()], ids=["long", "list", "speechless"])
@pytest.mark.parametrize("name", EngineConfig.__dataclass_fields__)
def test_what_cannot_be_written_out_is_refused_by_name(name, value):
    """Python writes no int of more than 4,300 digits, and its ValueError about that named no option."""
    with pytest.raises(ConfigError, match=f"{name} is .* but must be"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["schedule", "attention", "model_impl", "scheduling_policy", "dtype", "max_num_seqs"])
@pytest.mark.parametrize("value", [np.array([1, 2]), np.bool_(True), torch.tensor([1, 2]), float("nan")], ids=str)
def test_what_cannot_even_be_compared_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .* but must be"):
        EngineConfig(**{name: value})
