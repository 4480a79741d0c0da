"""The engine's options: checks them, and ``resolve`` fills in the defaults that depend on model and device."""

from __future__ import annotations

import numbers
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cbatch.errors import ConfigError, short
from cbatch.kernels.attention import BACKENDS
from cbatch.scheduler.scheduler import POLICIES, Policy

_CHOICES = {
    "schedule": ("async", "sync"),
    "attention": BACKENDS,
    "model_impl": ("auto", "transformers", "decoder"),
    "load_format": ("auto", "dummy"),
    "scheduling_policy": POLICIES,
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The torch dtype of a name or dtype; None for ``"auto"``, which depends on the model.

    Raises:
        ConfigError: any other name or dtype.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return None
    name = str(dtype) if isinstance(dtype, (str, torch.dtype)) else ""
    parsed = _DTYPES.get(name.removeprefix("torch."))
    if parsed is None:
        raise ConfigError(f"dtype is {short(dtype)}, but must be one of auto, {', '.join(_DTYPES)}")
    return parsed


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device of a name. ``find_device`` checks that it exists.

    Raises:
        ConfigError: not the name of a device, or of a kind that cbatch does not run on.
    """
    if isinstance(device, (str, torch.device)):
        with suppress(RuntimeError):
            parsed = torch.device(device)
            if str(parsed) == "cpu" or parsed.type == "cuda":
                return parsed
    shown = short(str(device) if isinstance(device, torch.device) else device)
    raise ConfigError(f"device is {shown}, but must be cpu, cuda, or cuda:N for one of several GPUs")


def find_device(device: str | torch.device | None) -> torch.device:
    """The device to load a model on; None: the GPU if there is one, else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    num_gpus = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda" if num_gpus else "cpu")
    parsed = parse_device(device)
    if parsed.type == "cuda" and (parsed.index or 0) >= num_gpus:
        there = f"torch finds {num_gpus} of them, counted from 0" if num_gpus else "torch finds no CUDA device here"
        raise ConfigError(f"device is {str(device)!r}, but {there}")
    return parsed


# Least and most of each count. The most is beyond any use, and turns a typing error into a one-line error instead of an
# allocation that ends the process.
_RANGES = {
    "max_model_len": (2, 2**31 - 1),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "block_size": (1, 2**16),
    "num_blocks": (2, 2**31 - 1),
    "max_queue_size": (1, 2**31 - 1),
    "depth": (1, 64),
}


def _is_a(kind: type, value: object) -> bool:
    """Whether it is a number of the kind. numpy's numbers are, a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine, with vLLM's names where it has them.

    Args:
        max_model_len: longest sequence, prompt and output together; None: the model's limit.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of one step, over all requests; at least ``max_num_seqs``. None: 8192 on a
            GPU, on the CPU 256, so that no step takes seconds.
        block_size: tokens of one KV block.
        num_blocks: blocks of the KV pool, one of them the dummy; None: as many as ``gpu_memory_utilization`` allows.
        gpu_memory_utilization: share of the card's total memory for weights, activations and KV together. On the CPU:
            share of a quarter of the free memory, for KV.
        schedule: ``"async"`` plans the next step while one computes; ``"sync"`` waits for each.
        enable_prefix_caching: keep the keys and values of past requests while their blocks are not needed, and reuse
            them for prompts that begin with the same tokens. None: yes, unless you pass the model as a module, whose
            weights you may change (``Engine.reset_prefix_cache`` drops what old weights computed).
        max_queue_size: most answers that may wait to start; further requests are refused with
            ``EngineOverloadedError``. None: any number.
        swap_space: GiB of host memory, pinned with a GPU, for the KV of preempted requests, which is copied there and
            back if that is faster than to compute it again. 0: none.
        itl_target_ms: target time of a step while requests decode: prompt chunks, of at least 32 tokens, are sized for
            it from the times of earlier steps. None: they are as large as ``max_num_batched_tokens`` allows.
        scheduling_policy: the order in which requests start: ``"fcfs"``, by arrival; ``"priority"``, the smaller
            ``priority`` first, which may preempt others; ``"longest_prefix"``, of the next 64 the one with the most
            cached tokens.
        depth: steps in flight, 2 or more with ``"async"``; None: 2, and 1 with ``"sync"``.
        attention: kernels; ``"auto"`` is Triton on CUDA and torch elsewhere. An explicit choice never falls back.
        model_impl: ``"decoder"`` is our own, with fused copies of the weights; ``"transformers"`` the model's own code
            around shared weights. ``"auto"``: the decoder for a model given by name if it covers it, else transformers.
        enforce_eager: launch each kernel from Python instead of replaying CUDA graphs. Steps run eagerly in any case on
            the CPU, with ``attention="torch"``, and for a model whose forward waits for values from the device.
        seed: seeds requests that have no seed.
        device, dtype, load_format, trust_remote_code: how a model given by name is loaded. ``device`` is ``"cpu"``,
            ``"cuda"`` or ``"cuda:N"``; None: the GPU if there is one.
        skip_tokenizer_init: load no tokenizer with it: prompts and answers are token ids.

    Raises:
        ConfigError: an option is out of range, or two contradict each other.
    """

    device: str | None = None
    dtype: str | torch.dtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 64
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    schedule: Literal["async", "sync"] = "async"
    enable_prefix_caching: bool | None = None
    scheduling_policy: Policy = "fcfs"
    max_queue_size: int | None = None
    itl_target_ms: float | None = None
    swap_space: float = 0.0
    depth: int | None = None
    attention: Literal["auto", "torch", "triton"] = "auto"
    model_impl: Literal["auto", "transformers", "decoder"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    seed: int = 0
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{name} is {short(value)}, but must be one of {', '.join(choices)}")
        if self.device is not None:
            object.__setattr__(self, "device", str(parse_device(self.device)))  # a torch.device becomes its name
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "block_size"):
                continue
            if not _is_a(numbers.Integral, value) or not least <= value <= most:
                raise ConfigError(f"{name} is {short(value)}, but must be an integer from {least} to {most}")
            object.__setattr__(self, name, int(value))
        if self.num_blocks is not None and self.num_blocks * self.block_size >= 2**31:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but a pool of so many blocks of {self.block_size} tokens does not "
                "fit into 32-bit slot numbers"
            )
        for name in ("enforce_eager", "trust_remote_code", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {short(getattr(self, name))}, but must be True or False")
        caching = self.enable_prefix_caching
        if caching is not None and not isinstance(caching, bool):
            raise ConfigError(f"enable_prefix_caching is {short(caching)}, but must be True, False or None")
        if self.scheduling_policy == "longest_prefix" and caching is False:
            raise ConfigError('scheduling_policy is "longest_prefix", but enable_prefix_caching is False')
        parse_dtype(self.dtype)
        utilization = self.gpu_memory_utilization
        if not _is_a(numbers.Real, utilization) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {short(utilization)}, but must be above 0 and at most 1")
        space = self.swap_space
        if not _is_a(numbers.Real, space) or not 0 <= space <= 2**20:
            raise ConfigError(f"swap_space is {short(space)}, but must be a number of GiB, from 0 to {2**20}")
        target = self.itl_target_ms
        if target is not None and not (_is_a(numbers.Real, target) and 0 < target < 1e9):
            raise ConfigError(
                f"itl_target_ms is {short(target)}, but must be a positive number of milliseconds, or None"
            )
        for name in ("gpu_memory_utilization", "swap_space", "itl_target_ms"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value))
        if not _is_a(numbers.Integral, self.seed) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {short(self.seed)}, but must be an integer from 0 to 2**64 - 1")
        object.__setattr__(self, "seed", int(self.seed))
        if self.schedule == "sync" and self.depth not in (None, 1):
            raise ConfigError(f'depth is {self.depth}, but schedule="sync" has one step in flight: leave it out')
        if self.schedule == "async" and self.depth is not None and self.depth < 2:
            raise ConfigError(f'depth is {self.depth}, but schedule="async" needs at least 2 (or take schedule="sync")')

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """``EngineConfig(**options)``, with a ConfigError that lists the known names for an unknown one."""
        unknown = options.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(cls.__dataclass_fields__))}"
            )
        return cls(**options)

    def resolve(self, model_max_len: int, device: torch.device) -> EngineConfig:
        """Fill in what depends on the model and the device, all but ``num_blocks``.

        Raises ConfigError if an option exceeds the model's limit, or a step's.
        """
        if self.max_model_len is not None and self.max_model_len > model_max_len:
            raise ConfigError(f"max_model_len is {self.max_model_len}, but the model takes at most {model_max_len}")
        max_num_batched_tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(8192 if device.type == "cuda" else 256, self.max_num_seqs)
        if max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, but max_num_seqs is {self.max_num_seqs}: "
                "every running request needs one token a step"
            )
        return replace(
            self,
            device=str(device),
            max_model_len=self.max_model_len or model_max_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching is not False,
            depth=self.depth or (2 if self.schedule == "async" else 1),
        )
