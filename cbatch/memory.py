"""Sizes the KV cache: the memory that is free now, less what the largest step takes. Knows no request."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from cbatch.buffers import Landing
from cbatch.config import EngineConfig
from cbatch.errors import ConfigError
from cbatch.kv_cache import page_bytes
from cbatch.models.base import Model
from cbatch.prompt_logprobs import MAX_PROMPT_LOGITS
from cbatch.sampler import NUM_PARAMS, make_step_ops
from cbatch.scheduler.kv_spec import KVGroup
from cbatch.slot_state import SlotState, slot_state_bytes

_HOST_BYTES = 100  # of host memory for each block, about
_MAX_BLOCKS = 1 << 18  # of a pool that exceeds what the slots can use, for the prefix cache
_GRAPH_BYTES = 1 << 30  # the driver's memory for the graphs themselves


def num_blocks(config: EngineConfig, model: Model, groups: tuple[KVGroup, ...]) -> int:
    """Blocks of the pool: ``config.num_blocks``, or what fits; without prefix cache at most what all slots can use.

    Raises ConfigError if not even one block fits, or not ``config.num_blocks``.
    """
    assert config.max_model_len and config.max_num_batched_tokens
    page = page_bytes(groups, config.block_size, model.dtype)
    if config.num_blocks is not None:
        on_host = _HOST_BYTES + (page if model.device.type == "cpu" else 0)
        needed, room = config.num_blocks * on_host, available_memory_bytes()
        if needed > room:  # Linux would overcommit, and kill the process at first use
            raise ConfigError(
                f"num_blocks is {config.num_blocks}, but a KV pool of so many does not fit: it takes "
                f"{needed / 2**30:.1f} GiB of this machine's memory, and {room / 2**30:.1f} are available"
            )
        return config.num_blocks
    blocks_per_seq = -(-config.max_model_len // config.block_size) * len(groups)
    useful = config.max_num_seqs * blocks_per_seq + 1
    if config.enable_prefix_caching:  # blocks beyond the slots' needs serve as cache
        useful = max(useful, _MAX_BLOCKS)
    useful = min(useful, (2**31 - 1) // config.block_size)  # slot numbers have 32 bits
    if model.device.type == "cuda":
        with torch.cuda.device(model.device):  # Triton launches on the current device
            peak = measure_peak_bytes(model, config.max_num_batched_tokens, config.max_num_seqs)
        if not config.enforce_eager:
            peak = 2 * peak + _GRAPH_BYTES  # the graphs' pool, beside the warm-up runs before each capture
        free, total = torch.cuda.mem_get_info(model.device)
        room = int(total * config.gpu_memory_utilization) - (total - free) - peak
        room -= slot_state_bytes(config.max_num_seqs, model.vocab_size)  # on the CPU, untouched rows take no memory
    else:
        room = int(available_memory_bytes() * 0.25 * config.gpu_memory_utilization)
    fitting = room // page
    if fitting < 2:
        raise ConfigError(
            f"no room for the KV cache: {max(room, 0) / 2**30:.2f} GiB is left at gpu_memory_utilization="
            f"{config.gpu_memory_utilization}, and a block takes {page / 2**20:.2f} MiB"
        )
    return min(useful, fitting)


@torch.inference_mode()
def measure_peak_bytes(model: Model, num_tokens: int, num_samples: int) -> int:
    """Peak memory of the largest step beyond what is allocated now. CUDA only. Runs the step once, and waits."""
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device) % model.max_model_len
    num_rows = num_samples + min(num_tokens, MAX_PROMPT_LOGITS)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device) % num_tokens
    logits, prompts = model.forward(ids, positions, rows, attend).tensor_split([num_samples])
    rows = rows[:num_samples]
    params = torch.zeros(num_samples, NUM_PARAMS, dtype=torch.int32, device=device)
    ops, state = make_step_ops(device), SlotState(0, logits.shape[1], device)
    where = positions, rows, torch.zeros_like(rows)  # one slot serves them all
    processed = ops.process_logits(logits, params, state.counts, state.lists, *where)
    landing = Landing(num_samples, device)
    kept = {"counts": state.counts, "lists": state.lists}
    ops.draw(processed, params, *where, rows.clone(), landing.sampled, filtered=True, **kept)
    ops.logprobs(logits, landing.sampled, landing.records)
    records = torch.empty(len(prompts), landing.records.shape[1], dtype=torch.int32, device=device)
    ops.logprobs(prompts, torch.zeros_like(records[:, 0]), records)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del logits, prompts, processed
    torch.cuda.empty_cache()
    return peak


def ran_out(error: BaseException) -> bool:
    """Whether the device was out of memory. CUDA, cuBLAS, Triton and torch's CPU have no exception class for it."""
    messages = "out of memory", "ALLOC_FAILED", "can't allocate memory"
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def available_memory_bytes() -> int:
    """Host memory available to this process, within the container's limit if there is one."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the free pages count
    try:
        cgroup = "/sys/fs/cgroup/memory"
        with open(f"{cgroup}.max") as limit, open(f"{cgroup}.current") as current, open(f"{cgroup}.stat") as stat:
            if (text := limit.read().strip()) != "max":
                facts = dict(line.split() for line in stat)
                # The page cache, such as weights that were read, can be reclaimed.
                cached = int(facts.get("active_file", 0)) + int(facts.get("inactive_file", 0))
                available = min(available, int(text) - int(current.read()) + cached)
    except OSError:
        pass  # no visible cgroup limit
    return max(available, 0)
