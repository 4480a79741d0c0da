"""The shape of a layer's keys and values, and the groups of layers that share a block table. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVSpec:
    """What one layer stores for one token: ``num_kv_heads`` keys of ``k_head_dim`` and values of ``v_head_dim``.

    ``window`` is the number of most recent positions the layer attends to, the current one included; 0 means all.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int = 0

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)


@dataclass(frozen=True)
class KVGroup:
    """Layers of one ``KVSpec`` that share one block table: a page of the pool holds one block of all of them."""

    spec: KVSpec
    layers: tuple[int, ...]

    def elements_per_page(self, block_size: int) -> int:
        return len(self.layers) * block_size * self.spec.elements_per_token


def group_layers(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Partition layers so that every group has the same spec within and about the same page size across.

    One kind of layer gives one group of all layers. With several kinds, a group takes as many layers as the rarest
    kind has: 5 local layers to 1 global one (Gemma 3) become five local groups and one global group, whose pages
    have equal size, so that one pool serves all of them and nothing is wasted on the larger kind.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    if not kinds:
        raise ValueError("a model needs at least one layer with a KVSpec")
    width = min(len(layers) for layers in kinds.values())
    return tuple(
        KVGroup(spec, tuple(layers[start : start + width]))
        for spec, layers in kinds.items()
        for start in range(0, len(layers), width)
    )
