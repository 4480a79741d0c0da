"""The decoder's weights, fused layer by layer from any ``WeightSource``. Knows names and shapes; knows no forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cbatch.errors import UnsupportedModelError
from cbatch.models.decoder_config import DecoderConfig
from cbatch.models.weight_sources import WeightSource


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True)
class Norm:
    """In float32, with the family's ``norm_offset`` added."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm | None
    qkv: Linear  # queries, keys, values
    head_norms: Tensor | None  # [2, head_dim] float32: over each query head, over each key head
    row_norms: tuple[Tensor, Tensor] | None  # float32: over all queries of a token as one row, over all keys
    o: Linear
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    up: Linear  # with a gate: gate, then up
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


@torch.no_grad()
def load_weights(
    source: WeightSource,
    config: DecoderConfig,
    rope_tables: Mapping[str, Tensor],
    pack: Callable[[Tensor], Tensor] = lambda weight: weight,  # ``Ops.pack``: the layout that products read fastest
) -> Weights:
    """Read the weights, layer by layer, with at most one further tensor of the source in memory.

    Raises UnsupportedModelError, before any weight is taken, if the source's weights are not exactly the config's.
    """
    _expect(source, config)
    names = config.names
    body, read = names.body, _Reader(source, config, pack)
    embed = read.tensor(names.embedding)
    positions = read.tensor(f"{body}.{names.positions}.weight") if names.positions else None
    rotary_dim = max((table.shape[1] for table in rope_tables.values()), default=0)
    layers = tuple(_layer(read, f"{body}.{names.layers}.{i}", config, rotary_dim) for i in range(config.num_layers))
    final_norm = read.norm(f"{body}.{names.final_norm}")
    # A padded head's tokens beyond the embedding could be sampled, but not fed back.
    head = embed if source.tied else read.tensor("lm_head.weight")[: len(embed)]
    return Weights(embed, positions, layers, final_norm, Linear(pack(head), None), dict(rope_tables))


def _expect(source: WeightSource, config: DecoderConfig) -> None:
    there, wanted = dict(source.shapes), config.weight_shapes()
    if source.tied:
        wanted.pop("lm_head.weight")
        there.pop("lm_head.weight", None)
    if missing := sorted(wanted.keys() - there.keys()):
        raise UnsupportedModelError(f"{source.name} misses {missing[0]}")
    if more := sorted(there.keys() - wanted.keys()):
        raise UnsupportedModelError(f"{source.name} has {more[0]}, which the decoder does not know")
    if "lm_head.weight" in wanted and there["lm_head.weight"][0] > config.vocab_size:  # padded
        wanted["lm_head.weight"] = there["lm_head.weight"][0], config.hidden_size
    for name, shape in wanted.items():
        if there[name] != shape:
            raise UnsupportedModelError(
                f"{source.name}: {name} is of shape {there[name]}, but the config tells of {shape}"
            )


def _layer(read: _Reader, at: str, config: DecoderConfig, rotary_dim: int) -> Layer:
    names = config.names

    def norm(name: str | None) -> Norm | None:
        return read.norm(f"{at}.{name}") if name else None

    attn_norm = norm(names.attn_norm)
    reorder = partial(_deinterleave_rope, config=config, rotary_dim=rotary_dim) if config.rope_interleaved else None
    qkv = read.linear(*(f"{at}.{name}" for name in names.qkv), then=reorder)
    qk_norms = None
    if config.qk_norm != "none":
        q_norm, k_norm = (read.norm_weight(f"{at}.{name}") for name in names.qk_norm)
        qk_norms = q_norm, k_norm
    return Layer(
        attn_norm=attn_norm,
        qkv=qkv,
        head_norms=torch.stack(qk_norms) if qk_norms and config.qk_norm == "head" else None,
        row_norms=qk_norms if config.qk_norm == "row" else None,
        o=read.linear(f"{at}.{names.o}"),
        attn_post_norm=norm(names.attn_post_norm),
        mlp_norm=norm(names.mlp_norm),
        up=read.linear(*(f"{at}.{name}" for name in names.up)),
        down=read.linear(f"{at}.{names.down}"),
        mlp_post_norm=norm(names.mlp_post_norm),
    )


class _Reader:
    """Reads weights, and fuses the parts of a matrix."""

    def __init__(self, source: WeightSource, config: DecoderConfig, pack: Callable[[Tensor], Tensor]) -> None:
        self._source, self._config, self._pack = source, config, pack

    def tensor(self, name: str) -> Tensor:
        return self._source.take(name).contiguous()

    def linear(self, *names: str, then: Callable[[Linear], Linear] | None = None) -> Linear:
        """The parts ``names`` fused, with their biases if any; packed, after ``then``."""
        bias = self._join([f"{name}.bias" for name in names]) if f"{names[0]}.bias" in self._source.shapes else None
        linear = Linear(self._join([f"{name}.weight" for name in names]), bias)
        linear = then(linear) if then else linear
        return Linear(self._pack(linear.weight), linear.bias)

    def norm(self, name: str) -> Norm:
        bias = self._source.take(f"{name}.bias").float() if self._config.norm_bias else None
        return Norm(self.norm_weight(name), bias)

    def norm_weight(self, name: str) -> Tensor:
        return self._source.take(f"{name}.weight").float() + self._config.norm_offset

    def _join(self, names: list[str]) -> Tensor:
        """Concatenate tensors along the outputs. Each is read straight into its place."""
        source, transposed = self._source, self._config.transposed
        if len(names) == 1 and not transposed:
            return self.tensor(names[0])
        shapes = [source.shapes[name][::-1] if transposed else source.shapes[name] for name in names]
        num_outputs = [shape[0] for shape in shapes]
        out = torch.empty((sum(num_outputs), *shapes[0][1:]), dtype=source.dtype, device=source.device)
        for name, part in zip(names, out.split(num_outputs), strict=True):
            source.read(name, part.t() if transposed else part)
        return out


def _deinterleave_rope(qkv: Linear, config: DecoderConfig, rotary_dim: int) -> Linear:
    """Reorder the outputs of query and key heads, so that RoPE of neighbours becomes RoPE of halves.

    Queries and keys are reordered alike, so their dot products stay the same.
    """
    order = torch.arange(config.head_dim)
    order[:rotary_dim] = torch.cat([order[:rotary_dim:2], order[1:rotary_dim:2]])
    num_heads = config.num_heads + config.num_kv_heads  # of queries and keys
    rows = torch.arange(qkv.weight.shape[0])
    rows[: num_heads * config.head_dim] = (torch.arange(num_heads)[:, None] * config.head_dim + order).flatten()
    rows = rows.to(qkv.weight.device)
    return Linear(qkv.weight[rows], None if qkv.bias is None else qkv.bias[rows])
