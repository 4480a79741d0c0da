"""The decoder's weights, taken from a module of transformers: what belongs together in one matrix, layer by layer.

Knows names and shapes; knows nothing of a forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cbatch.errors import UnsupportedModelError
from cbatch.models.decoder_config import DecoderConfig

_TABLE_CHUNK = 16384  # positions that the rotary module computes at once


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True)
class Norm:
    """In float32, with the family's offset added: whoever normalises just multiplies."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm | None
    qkv: Linear  # queries, keys, values
    head_norms: Tensor | None  # [2, head_dim] float32: of each query head and of each key head
    row_norms: tuple[Tensor, Tensor] | None  # float32: of all queries of a token as one row, and of all keys
    o: Linear
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    up: Linear  # gate and up, where there is a gate
    down: Linear
    mlp_post_norm: Norm | None


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [vocab_size, hidden_size]
    positions: Tensor | None  # [max_len, hidden_size]
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    rope_tables: dict[str, Tensor]  # [max_len, rotary_dim] float32: cosines, then sines


def load_weights(module: nn.Module, config: DecoderConfig, max_model_len: int, *, take: bool) -> Weights:
    """Copy the weights of ``module``, or take them: then it is left empty, layer by layer, and only what is fused is
    ever there twice.

    Raises UnsupportedModelError where the module does not have exactly the weights that the config stands for; nothing
    has been taken then.
    """
    names, source = config.names, _Source(module, take)
    source.expect(config)
    kinds = dict.fromkeys(kind for kind in config.ropes if kind is not None)
    tables = {kind: _rope_table(module, config, kind, max_model_len) for kind in kinds}
    body = names.body
    tied = source.same(f"{body}.{names.embed}.weight", "lm_head.weight")
    embed = source.tensor(f"{body}.{names.embed}.weight")
    head = source.linear("lm_head")
    if len(head.weight) > len(embed):  # padded: the tokens beyond could be sampled, but not fed
        head = Linear(head.weight[: len(embed)], None if head.bias is None else head.bias[: len(embed)])
    return Weights(
        embed=embed,
        positions=source.tensor(f"{body}.{names.positions}.weight") if names.positions else None,
        layers=tuple(
            _layer(source, f"{body}.{names.layers}.{layer}", config, tables) for layer in range(config.num_layers)
        ),
        final_norm=_norm(source, f"{body}.{names.final_norm}", config),
        head=Linear(embed, head.bias) if tied else head,
        rope_tables=tables,
    )


def _layer(source: _Source, at: str, config: DecoderConfig, tables: dict[str, Tensor]) -> Layer:
    names = config.names

    def norm(name: str | None) -> Norm | None:
        return _norm(source, f"{at}.{name}", config) if name else None

    qkv = source.linear(*(f"{at}.{name}" for name in names.qkv))
    if config.rope_interleaved:
        qkv = _halves_of_neighbours(qkv, config, rotary_dim=next(iter(tables.values())).shape[1])
    qk_norms = None
    if config.qk_norm != "none":
        q_norm, k_norm = (_norm(source, f"{at}.{name}", config).weight for name in names.qk_norm)
        qk_norms = q_norm, k_norm
    return Layer(
        attn_norm=norm(names.attn_norm),
        qkv=qkv,
        head_norms=torch.stack(qk_norms) if qk_norms and config.qk_norm == "head" else None,
        row_norms=qk_norms if config.qk_norm == "row" else None,
        o=source.linear(f"{at}.{names.o}"),
        attn_post_norm=norm(names.attn_post_norm),
        mlp_norm=norm(names.mlp_norm),
        up=source.linear(*(f"{at}.{name}" for name in names.up)),
        down=source.linear(f"{at}.{names.down}"),
        mlp_post_norm=norm(names.mlp_post_norm),
    )


def _norm(source: _Source, name: str, config: DecoderConfig) -> Norm:
    part = source.linear(name)
    bias = part.bias.float() if part.bias is not None else None
    return Norm(part.weight.float() + config.norm_offset, bias)


def _halves_of_neighbours(qkv: Linear, config: DecoderConfig, rotary_dim: int) -> Linear:
    """Reorder the outputs of the query and key heads, so that what turned with its neighbour turns with the other half.

    Queries and keys are reordered alike, so their products stay.
    """
    order = torch.arange(config.head_dim)
    order[:rotary_dim] = torch.cat([order[:rotary_dim:2], order[1:rotary_dim:2]])
    num_turned = config.num_heads + config.num_kv_heads
    rows = torch.arange(qkv.weight.shape[0])
    rows[: num_turned * config.head_dim] = (torch.arange(num_turned)[:, None] * config.head_dim + order).flatten()
    rows = rows.to(qkv.weight.device)
    return Linear(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])


@torch.no_grad()
def _rope_table(module: nn.Module, config: DecoderConfig, kind: str, max_model_len: int) -> Tensor:
    """What transformers' own rotary module says of every position, [max_model_len, rotary_dim] float32."""
    rotary: Any = copy.deepcopy(module.get_submodule(f"{config.names.body}.rotary_emb"))  # some rewrite their buffers
    device = next(module.parameters()).device
    like = torch.empty(0, dtype=torch.float32, device=device)
    pieces = []
    for start in range(0, max_model_len, _TABLE_CHUNK):
        positions = torch.arange(start, min(start + _TABLE_CHUNK, max_model_len), device=device)[None]
        cos, sin = rotary(like, positions, kind) if kind else rotary(like, positions)
        half = cos.shape[-1] // 2  # both come twice, once for each half of a head
        pieces.append(torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float())
    return torch.cat(pieces)


class _Source:
    """The tensors of a module by name; each is handed out once, copied or taken away."""

    def __init__(self, module: nn.Module, take: bool) -> None:
        self._module, self._take = module, take
        self._tensors: dict[str, Tensor] = module.state_dict()

    def expect(self, config: DecoderConfig) -> None:
        """Raise UnsupportedModelError unless the names are exactly those of the config, and the shapes fit."""
        wanted = set(_weight_names(config))
        missing = wanted - self._tensors.keys()
        more = self._tensors.keys() - wanted - {name.removesuffix("weight") + "bias" for name in wanted}
        if missing or more:
            what = (
                f"misses {sorted(missing)[0]}" if missing else f"has {sorted(more)[0]}, which the decoder does not know"
            )
            raise UnsupportedModelError(f"{type(self._module).__name__} {what}")
        odd = {name for name, tensor in self._tensors.items() if tensor.dtype != self._module.dtype}
        if odd:
            raise UnsupportedModelError(f"weights of more than one dtype: {sorted(odd)[0]}")
        at = f"{config.names.body}.{config.names.layers}.0"
        num_outputs = sum(self._num_outputs(f"{at}.{name}") for name in config.names.qkv)
        if num_outputs != (config.num_heads + 2 * config.num_kv_heads) * config.head_dim:
            raise UnsupportedModelError(
                f"{num_outputs} queries, keys and values are not those that the config tells of"
            )

    def _num_outputs(self, name: str) -> int:
        return self._tensors[f"{name}.weight"].shape[1 if self._is_transposed(name) else 0]

    def _is_transposed(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name), Conv1D)

    def same(self, one: str, other: str) -> bool:
        return self._tensors[one].data_ptr() == self._tensors[other].data_ptr()

    def linear(self, *names: str) -> Linear:
        """One matrix of the parts called names, with the biases that they have."""
        weights = [self._pop(f"{name}.weight") for name in names]
        if self._is_transposed(names[0]):
            weights = [weight.t() for weight in weights]
        biases = [self._pop(f"{name}.bias") for name in names if f"{name}.bias" in self._tensors]
        return Linear(self._own(weights), self._own(biases) if biases else None)

    def tensor(self, name: str) -> Tensor:
        return self._own([self._pop(name)])

    def _own(self, parts: list[Tensor]) -> Tensor:
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].contiguous() if self._take else parts[0].clone(memory_format=torch.contiguous_format)

    def _pop(self, name: str) -> Tensor:
        tensor = self._tensors.pop(name)
        if self._take:
            part, _, attribute = name.rpartition(".")
            getattr(self._module.get_submodule(part), attribute).data = tensor.new_empty(0)
        return tensor


def _weight_names(config: DecoderConfig) -> Iterator[str]:
    names = config.names
    yield f"{names.body}.{names.embed}.weight"
    if names.positions:
        yield f"{names.body}.{names.positions}.weight"
    yield f"{names.body}.{names.final_norm}.weight"
    yield "lm_head.weight"
    norms = [names.attn_norm, names.attn_post_norm, names.mlp_norm, names.mlp_post_norm]
    parts = [*names.qkv, names.o, *names.up, names.down, *(name for name in norms if name)]
    parts += names.qk_norm if config.qk_norm != "none" else ()
    for layer in range(config.num_layers):
        yield from (f"{names.body}.{names.layers}.{layer}.{part}.weight" for part in parts)
