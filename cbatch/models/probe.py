"""Finds a model's attention layers at load, and checks that packed steps give the logits of single sequences.

Takes five short forwards. Knows no cache pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.errors import UnsupportedModelError, described
from cbatch.models import config_facts
from cbatch.models.comparison import DenseAttend, LayerCall, Rows, Rule, logits_in_two_steps, random_tokens
from cbatch.models.hand_over import IMPLEMENTATION, answering


@dataclass(frozen=True)
class Findings:
    """What the probe found."""

    layers: tuple[LayerCall, ...]
    vocab_size: int  # tokens that can be both fed and sampled: a padded head is wider than the embedding
    capturable: bool


class _WaitsForDevice(TorchDispatchMode):
    """Records operators whose result the host must wait for: no CUDA graph can hold them.

    It inspects operators, so it finds the same on the CPU. ``torch.cuda.set_sync_debug_mode`` is process-wide, and
    would affect the caller's other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")):
            # Indexing by booleans counts them first, on the host.
            if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                self.seen.add(name)
        elif torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.seen.add(name)
        elif name in ("aten::_to_copy", "aten::copy_") and isinstance(out, Tensor):
            source = args[0] if name == "aten::_to_copy" else args[1]
            if isinstance(source, Tensor) and source.device != out.device:
                self.seen.add(name)
        return out


def set_attention(module: nn.Module, implementation: str) -> None:
    """Choose the attention implementation of a module and of every config within it."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = implementation


@torch.no_grad()
def probe(module: nn.Module, *, max_model_len: int, takes_logits_to_keep: bool, dtype: torch.dtype) -> Findings:
    """Find the layers of ``module`` and check it. It is a structural copy, and keeps our attention implementation.

    Two sequences of different length run in two packed steps, the second of which mixes a decode with a chunk of a
    prompt; then each runs alone in a plain forward. Raises UnsupportedModelError, with the reason, if layers bypass our
    attention or need what it lacks, or if the logits differ by more than rounding. Touches no random state. Takes five
    forwards of at most a few dozen tokens, and waits for the device.
    """
    steps = _Steps(module, takes_logits_to_keep)
    set_attention(module, IMPLEMENTATION)
    logits = steps.packed([("A", 0, [0, 1])], sample_rows=[0, 1])
    layers, vocab_size = tuple(steps.dense.calls), min(logits.shape[-1], _num_embeddings(module) or logits.shape[-1])
    _check_layers(module, layers, max_model_len)

    experts = any("expert" in name for name, _ in module.named_modules())
    rule = Rule(dtype, experts)
    waits = _WaitsForDevice()
    for attempt in range(rule.attempts):
        a, b = random_tokens([layer.spec for layer in layers], max_model_len, vocab_size, seed=attempt)
        steps.dense = DenseAttend()
        got = logits_in_two_steps(steps.packed, a, b, waits)
        set_attention(module, "eager")  # the reference: sdpa ignores softcap and sinks
        try:
            alone = [_logits(module, input_ids=steps.tensor(ids)[None]) for ids in (a, b)]
        finally:
            set_attention(module, IMPLEMENTATION)
        reason = rule.difference(got, alone)
        if reason is None:
            return Findings(layers, vocab_size, capturable=not waits.seen)
    raise UnsupportedModelError(
        f"{_kind(module)}: a packed step does not give the logits of the model alone: {reason}. {_suspect(layers)}"
    )


class _Steps:
    """Runs packed steps of a module, with ``self.dense`` as its attention."""

    def __init__(self, module: nn.Module, takes_logits_to_keep: bool) -> None:
        self.module, self.takes_logits_to_keep = module, takes_logits_to_keep
        self.device = next(module.parameters()).device
        self.dense = DenseAttend()

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def packed(self, rows: Rows, sample_rows: list[int]) -> Tensor:
        """One step: logits [num_samples, vocab_size]."""
        ids, positions, samples = map(self.tensor, (*self.dense.begin(rows), sample_rows))
        options = {"logits_to_keep": samples} if self.takes_logits_to_keep else {}
        with answering(self.dense):
            logits = _logits(self.module, input_ids=ids[None], position_ids=positions[None], **options)
        return logits if self.takes_logits_to_keep else logits[samples]


def _logits(module: nn.Module, **inputs: Tensor) -> Tensor:
    """One forward: [num_tokens or num_samples, vocab_size]. Its errors become UnsupportedModelError."""
    try:
        out = module(**inputs, use_cache=False, return_dict=True)
    except UnsupportedModelError as error:  # raised by our attention
        raise UnsupportedModelError(f"{_kind(module)}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any type: families fail in many ways
        raise UnsupportedModelError(
            f"{_kind(module)}: a forward over packed tokens failed{_own_attention(module)}: {described(error)}"
        ) from error
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise UnsupportedModelError(f"{_kind(module)}: its forward returns no logits")
    return logits[0]


def _num_embeddings(module: nn.Module) -> int | None:
    try:
        weight = getattr(cast(Any, module).get_input_embeddings(), "weight", None)
    except NotImplementedError:  # transformers does not know where this family has them
        return None
    return len(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _kind(module: nn.Module) -> str:
    return cast(Any, module).config.model_type or type(module).__name__


def _own_attention(module: nn.Module) -> str:
    """A likely reason for a failure, according to transformers."""
    can_set = getattr(module, "_can_set_attn_implementation", None)
    return "" if can_set is None or can_set() else " (this family ignores registered attention implementations)"


def _check_layers(module: nn.Module, layers: tuple[LayerCall, ...], max_model_len: int) -> None:
    config, kind = cast(Any, module).config, _kind(module)
    expected = config_facts.num_layers(config)
    if not layers or len(layers) != expected:
        raise UnsupportedModelError(
            f"{kind}: one forward made {len(layers)} calls of the registered attention, but the config has {expected} "
            f"layers{_own_attention(module)}. Layers that keep another state, or attend by code of their own, would "
            "generate wrong tokens in silence"
        )
    if len({id(layer.module) for layer in layers}) != len(layers):
        raise UnsupportedModelError(f"{kind}: layers share an attention module, so they cannot be told apart")
    reason = config_facts.unserved_attention(
        config, [layer.spec.window for layer in layers], [layer.softcap for layer in layers], max_model_len
    )
    if reason:
        raise UnsupportedModelError(f"{kind}: {reason}, so long contexts would give wrong tokens")


def _suspect(layers: tuple[LayerCall, ...]) -> str:
    if any(getattr(layer.module, "is_causal", True) is False for layer in layers):
        return "Its layers say that they are not causal"
    return "Its attention has a part that is not handed over, such as a bias or a state"
