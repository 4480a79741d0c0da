"""The decoder's weights: what belongs together in one matrix, layer by layer, out of any ``WeightSource``.

Knows names and shapes; knows nothing of a forward.
"""

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
    """In float32, with the family's offset added, so that normalising just multiplies."""

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


@torch.no_grad()
def load_weights(
    source: WeightSource,
    config: DecoderConfig,
    rope_tables: Mapping[str, Tensor],
    pack: Callable[[Tensor], Tensor] = lambda weight: weight,  # as ``Ops.pack``: how products read a matrix fastest
) -> Weights:
    """Read the weights, layer by layer. Beside them, no more than one tensor of the source is ever in memory.

    Raises UnsupportedModelError where the source does not have exactly the weights that the config stands for; nothing
    has been taken from it then.
    """
    _expect(source, config)
    names = config.names
    body, read = names.body, _Reader(source, config, pack)
    embed = read.tensor(names.embedding)
    positions = read.tensor(f"{body}.{names.positions}.weight") if names.positions else None
    turned = max((table.shape[1] for table in rope_tables.values()), default=0)
    layers = tuple(_layer(read, f"{body}.{names.layers}.{i}", config, turned) for i in range(config.num_layers))
    final_norm = read.norm(f"{body}.{names.final_norm}")
    # Of a padded head, the tokens beyond the embedding could be sampled, but not fed.
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
    turn = partial(_halves_of_neighbours, config=config, rotary_dim=rotary_dim) if config.rope_interleaved else None
    qkv = read.linear(*(f"{at}.{name}" for name in names.qkv), then=turn)
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
    """Puts together what the decoder holds as one."""

    def __init__(self, source: WeightSource, config: DecoderConfig, pack: Callable[[Tensor], Tensor]) -> None:
        self._source, self._config, self._pack = source, config, pack

    def tensor(self, name: str) -> Tensor:
        return self._source.take(name).contiguous()

    def linear(self, *names: str, then: Callable[[Linear], Linear] | None = None) -> Linear:
        """One matrix of the parts called names, with the biases that they have; packed, after ``then``."""
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
        """Tensors side by side along the outputs: written where they belong, so that none is ever there twice."""
        source, transposed = self._source, self._config.transposed
        if len(names) == 1 and not transposed:
            return self.tensor(names[0])
        shapes = [source.shapes[name][::-1] if transposed else source.shapes[name] for name in names]
        num_outputs = [shape[0] for shape in shapes]
        out = torch.empty((sum(num_outputs), *shapes[0][1:]), dtype=source.dtype, device=source.device)
        for name, part in zip(names, out.split(num_outputs), strict=True):
            source.read(name, part.t() if transposed else part)
        return out


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
