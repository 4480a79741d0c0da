"""Finds out at load what a model's attention layers are, and whether packed steps give the tokens of the model alone.

Five short forwards in all. Knows no cache pages: it keeps the keys and values of two sequences in plain tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.errors import UnsupportedModelError
from cbatch.models import config_facts
from cbatch.models.hand_over import IMPLEMENTATION, answering
from cbatch.scheduler.kv_spec import KVSpec

_HARMLESS_EXTRAS = {"position_ids", "cache_position", "position_embeddings"}
"""Tensors that families pass along to every attention implementation and that need no answer."""

LARGEST_PROBED_WINDOW = 64  # positions; probing beyond a larger window would make the probe slow


@dataclass
class LayerCall:
    """What one layer asked for."""

    module: nn.Module
    spec: KVSpec
    dtype: torch.dtype
    softcap: float


@dataclass(frozen=True)
class Findings:
    """What the probe learned of a model."""

    layers: tuple[LayerCall, ...]
    vocab_size: int  # tokens that can be fed and sampled: a head may be wider than the embedding, padded
    capturable: bool


@dataclass
class DenseAttend:
    """Answers attention calls over a few sequences, step after step, without pages. Slow and obvious."""

    calls: list[LayerCall] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)  # (sequence, number of new tokens), packed in this order
    keys: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    values: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)

    def begin(self, rows: list[tuple[str, int]]) -> None:
        self.rows, self.calls = rows, []

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        mask: Any,
        extras: dict[str, Any],
    ) -> Tensor:
        _refuse_what_we_would_ignore(q, k, v, sinks, mask, extras)
        self.calls.append(LayerCall(module, KVSpec(k.shape[1], k.shape[2], v.shape[2], window), k.dtype, softcap))
        out, start = [], 0
        for sequence, length in self.rows:
            at, new = (module, sequence), slice(start, start + length)
            keys = self.keys[at] = torch.cat([self.keys[at], k[new]]) if at in self.keys else k[new]
            values = self.values[at] = torch.cat([self.values[at], v[new]]) if at in self.values else v[new]
            out.append(_attend_one(q[new], keys, values, scale, window, softcap, sinks))
            start += length
        return torch.cat(out)


def _attend_one(
    q: Tensor,  # [length, num_heads, k_head_dim], the last queries of the sequence
    keys: Tensor,  # [context, num_kv_heads, k_head_dim]
    values: Tensor,  # [context, num_kv_heads, v_head_dim]
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1).float() for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None] - torch.arange(
        len(keys), device=q.device
    )
    visible = (distance >= 0) & (distance < window) if window else distance >= 0
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _refuse_what_we_would_ignore(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Any, extras: dict[str, Any]
) -> None:
    if not (len(q) == len(k) == len(v)) or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise UnsupportedModelError(
            f"attention was called with shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            "which are not one query, key and value a token"
        )
    if mask is not None:
        raise UnsupportedModelError("the model builds attention masks of its own, which a packed step cannot honour")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise UnsupportedModelError(f"attention sinks of shape {tuple(sinks.shape)} for {q.shape[1]} heads")
    if extras.get("is_causal") is False:
        raise UnsupportedModelError("the model attends to future tokens: it is not a causal language model")
    for name, value in extras.items():
        if isinstance(value, Tensor) and name not in _HARMLESS_EXTRAS:
            raise UnsupportedModelError(f"attention was handed a tensor {name!r}, which cannot be honoured here")


class _WaitsForDevice(TorchDispatchMode):
    """Notices operators whose result the host needs before it can go on: no CUDA graph can hold them.

    Looks at operators rather than at the device, so it sees the same on the CPU and leaves no process-wide debug mode
    switched on, as ``torch.cuda.set_sync_debug_mode`` would for the caller's other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")):
            # An index by booleans counts them first; one by integers does not.
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
    """Learn the layers of ``module`` (a structural copy; its attention implementation is left on ours) and check it.

    Two ragged sequences go through two packed steps, the second of which mixes a decoded token with a chunk of a
    prompt; then each goes alone through a plain forward. Raises UnsupportedModelError, with the reason, where layers
    do not reach us, ask for what we cannot do, or where the logits differ by more than rounding. Touches no random
    state. Costs five forwards of at most a few dozen tokens, and waits for the device.
    """
    steps = _Steps(module, takes_logits_to_keep)
    set_attention(module, IMPLEMENTATION)
    logits = steps.packed([("A", 0, [0, 1])], sample_rows=[0, 1])
    layers, vocab_size = tuple(steps.dense.calls), min(logits.shape[-1], _num_embeddings(module) or logits.shape[-1])
    _check_layers(module, layers, max_model_len)

    windows = [layer.spec.window for layer in layers if 0 < layer.spec.window <= LARGEST_PROBED_WINDOW]
    lengths = [min(length, max_model_len) for length in (max([7, *(w + 5 for w in windows)]), 5)]
    experts = any("expert" in name for name, _ in module.named_modules())
    rule = Rule(dtype, experts)
    waits = _WaitsForDevice()
    for attempt in range(rule.attempts):
        dice = random.Random(attempt)  # our own: the global state is the caller's
        a, b = ([dice.randrange(vocab_size) for _ in range(length)] for length in lengths)
        got = steps.together(a, b, waits)
        set_attention(module, "eager")  # the definition: sdpa ignores softcap and sinks
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
    """Runs packed steps of a module whose layers are answered by ``self.dense``."""

    def __init__(self, module: nn.Module, takes_logits_to_keep: bool) -> None:
        self.module, self.takes_logits_to_keep = module, takes_logits_to_keep
        self.device = next(module.parameters()).device
        self.dense = DenseAttend()

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def packed(self, rows: list[tuple[str, int, list[int]]], sample_rows: list[int]) -> Tensor:
        """One step over rows of (sequence, first position, tokens): logits [num_samples, vocab_size]."""
        self.dense.begin([(sequence, len(tokens)) for sequence, _, tokens in rows])
        ids = self.tensor([token for _, _, tokens in rows for token in tokens])
        positions = self.tensor([first + i for _, first, tokens in rows for i in range(len(tokens))])
        samples = self.tensor(sample_rows)
        options = {"logits_to_keep": samples} if self.takes_logits_to_keep else {}
        with answering(self.dense):
            logits = _logits(self.module, input_ids=ids[None], position_ids=positions[None], **options)
        return logits if self.takes_logits_to_keep else logits[samples]

    def together(self, a: list[int], b: list[int], waits: _WaitsForDevice) -> list[Tensor]:
        """The logits of all tokens of two sequences, [len(a), vocab_size] and [len(b), vocab_size], in two steps."""
        self.dense = DenseAttend()
        head_a, head_b = len(a) - 1, len(b) - 2
        one = self.packed([("A", 0, a[:-1]), ("B", 0, b[:-2])], sample_rows=[*range(head_a + head_b)])
        with waits:  # not in the first step, which may fill caches
            two = self.packed(
                [("A", head_a, a[-1:]), ("B", head_b, b[-2:])],
                sample_rows=[2, 0, 1],  # out of order, so that a model which drops or sorts them is noticed
            )
        return [torch.cat([one[:head_a], two[1:2]]), torch.cat([one[head_a:], two[2:3], two[:1]])]


def _logits(module: nn.Module, **inputs: Tensor) -> Tensor:
    """One forward: [num_tokens or num_samples, vocab_size]. What a family raises there becomes a refusal."""
    try:
        out = module(**inputs, use_cache=False, return_dict=True)
    except UnsupportedModelError as error:  # raised by the attention that we answer
        raise UnsupportedModelError(f"{_kind(module)}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # anything: families differ in what they cannot do without, and how they say so
        raise UnsupportedModelError(
            f"{_kind(module)}: a forward over packed tokens failed{_own_attention(module)}: "
            f"{type(error).__name__}: {error}"
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
    """A likely reason for a failure, in transformers' own judgement."""
    can_set = getattr(module, "_can_set_attn_implementation", None)
    return "" if can_set is None or can_set() else " (this family ignores registered attention implementations)"


def _check_layers(module: nn.Module, layers: tuple[LayerCall, ...], max_model_len: int) -> None:
    config, kind = cast(Any, module).config, _kind(module)
    expected = config_facts.num_layers(config)
    if len(layers) != expected:
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


class Rule:
    """When two computations of the same logits are equal up to rounding.

    Row by row: the distance of the two rows over the spread of the plain one. In the tiny models of 60 families this
    is up to 3e-6 in float32, 0.005 in float16 and 0.04 in bfloat16; a wrong position, mask or neighbour makes it about
    1. The bound 2 * sqrt(eps) lies between: 7e-4, 0.06, 0.18 (also for float32 that the caller lets run in less).
    In 16 bits a near-tie may send a token to another expert, which changes its row and, through attention, later ones.
    So with experts half of the rows of a sequence may differ, and there are three attempts with other tokens: what is
    wrong by construction is wrong in all rows of a sequence, every time.
    """

    def __init__(self, dtype: torch.dtype, experts: bool) -> None:
        self.dtype = dtype
        eps = torch.finfo(torch.bfloat16 if dtype == torch.float32 and _float32_is_rounded() else dtype).eps
        self.bound = 2 * eps**0.5
        lenient = experts and eps > 1e-4
        self.attempts, self.allowed = (3, 0.5) if lenient else (1, 0.0)

    def difference(self, got: list[Tensor], alone: list[Tensor]) -> str | None:
        """Compare each sequence's logits [num_tokens, vocab_size]; None if they are equal. Waits for the device."""
        for mine, plain in zip(got, alone, strict=True):
            mine, plain = mine.float(), plain.float()
            spread = (plain - plain.mean(dim=-1, keepdim=True)).norm(dim=-1)
            error = (mine - plain).norm(dim=-1) / spread.clamp_min(torch.finfo(torch.float32).tiny)
            wrong = float((~(error <= self.bound)).float().mean())  # "not <=" counts NaN as wrong
            if wrong > self.allowed:
                return (
                    f"{wrong:.0%} of the rows differ, by up to {float(error.max()):.2g} of their spread "
                    f"(rounding in {self.dtype} explains {self.bound:.2g})"
                )
        return None


def _float32_is_rounded() -> bool:
    """Whether the caller lets products of float32 run in TF32 or bfloat16."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # a precision was set for one backend, and torch will not name it for all of them
        return True
