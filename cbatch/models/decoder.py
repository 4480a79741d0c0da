"""One decoder, with fused weights and kernels, for all families whose differences ``DecoderConfig`` can express.

Weights come through ``decoder_weights``, kernels through ``Ops``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.errors import UnsupportedModelError
from cbatch.kernels.ops import make_ops
from cbatch.models.base import Attend, PagedAttend
from cbatch.models.comparison import Rule, packed_logits
from cbatch.models.config_facts import ModelFacts
from cbatch.models.decoder_config import DecoderConfig, decoder_config
from cbatch.models.decoder_weights import Layer, Linear, Norm, Weights, load_weights
from cbatch.models.rope_table import rope_tables
from cbatch.models.weight_sources import ModuleSource, WeightSource

if TYPE_CHECKING:
    from cbatch.models.transformers_model import TransformersModel


class Decoder:
    """A causal language model with weights of its own: it sees no later training. Implements ``Model``."""

    capturable = True

    def __init__(self, config: DecoderConfig, weights: Weights, facts: ModelFacts) -> None:
        self.config, self.weights = config, weights
        self.kv_specs = config.kv_specs
        self.vocab_size = weights.head.weight.shape[0]
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self.max_model_len, self.name = facts.max_model_len, facts.name
        self.eos_token_ids, self.generation_config = facts.eos_token_ids, facts.generation_config
        self._ops = make_ops(self.device)
        # The norm behind each layer's last sum: the next layer's first norm, or the final norm.
        self._norms_after = [layer.attn_norm for layer in weights.layers[1:]] + [weights.final_norm]

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: Attend | PagedAttend
    ) -> Tensor:
        """Run one packed step; shapes as in ``Model.forward``. Waits for nothing.

        ``residual`` is the residual stream [num_tokens, hidden_size]; ``x`` is a block's input or output.
        """
        config, weights = self.config, self.weights
        residual = F.embedding(input_ids, weights.embed)
        if config.embed_scale != 1.0:
            residual = residual * config.embed_scale
        if weights.positions is not None:
            residual = residual + F.embedding(positions, weights.positions)

        x = self._norm(residual, weights.layers[0].attn_norm)
        for i, layer in enumerate(weights.layers):
            x = self._attention(i, layer, x, positions, attend)
            x, residual = self._add_and_norm(x, residual, layer.attn_post_norm, layer.mlp_norm)
            x = self._mlp(layer, x)
            rows = sample_rows if i == config.num_layers - 1 else None  # the only rows with logits
            x, residual = self._add_and_norm(x, residual, layer.mlp_post_norm, self._norms_after[i], rows)

        logits = self._linear(x, weights.head)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.logit_softcap:
            logits = logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits

    def _attention(self, i: int, layer: Layer, x: Tensor, positions: Tensor, attend: Attend | PagedAttend) -> Tensor:
        config, ops = self.config, self._ops
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        table = None if (rope := config.ropes[i]) is None else self.weights.rope_tables[rope]
        paged = attend if isinstance(attend, PagedAttend) else None
        pages = paged.pages(i) if paged is not None else None
        how: dict[str, Any] = {
            "scale": config.attn_scale,
            "window": config.windows[i],
            "softcap": config.attn_softcap,
            "sinks": None,
        }
        qkv = self._linear(x, layer.qkv, partial=pages is not None and layer.row_norms is None)
        if layer.row_norms is not None:
            q, k, _ = qkv.split([n * config.head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], 1)
            for row, weight in zip((q, k), layer.row_norms, strict=True):
                ops.rms_norm(row, weight, config.norm_eps, out=row)
        if paged is not None and pages is not None:
            q = ops.rope_and_store(
                qkv, num_heads, num_kv_heads, positions, table, layer.head_norms, config.norm_eps, *pages
            )
            attended = paged(i, q, None, None, **how)
        else:
            heads = qkv.view(len(qkv), -1, config.head_dim)
            turned = heads[:, : num_heads + num_kv_heads]
            ops.qk_norm_rope(turned, num_heads, positions, table, layer.head_norms, config.norm_eps)
            attended = attend(i, *heads.split([num_heads, num_kv_heads, num_kv_heads], 1), **how)
        return self._linear(attended.flatten(1), layer.o, partial=True)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        up = self._ops.linear_act(x, layer.up.weight, layer.up.bias, self.config.act, gated=self.config.gated)
        return self._linear(up, layer.down, partial=True)

    def _linear(self, x: Tensor, linear: Linear, *, partial: bool = False) -> Tensor:
        """[num_tokens, num_outputs]; with ``partial``, perhaps partial sums, which the next operator adds up."""
        return self._ops.linear(x, linear.weight, linear.bias, partial=partial)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if self.config.norm == "layer":
            return self._ops.layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)
        return self._ops.rms_norm(x, norm.weight, self.config.norm_eps)

    def _add_and_norm(
        self, x: Tensor, residual: Tensor, post_norm: Norm | None, norm: Norm | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Between two blocks: (the next block's input, the residual stream), only of ``rows`` if given."""
        config = self.config
        if config.norm == "layer":
            assert norm is not None and post_norm is None
            return self._ops.add_layer_norm(
                x, residual, norm.weight, norm.bias, config.norm_eps, scale=config.residual_scale, rows=rows
            )
        return self._ops.add_rms_norm(
            x,
            residual,
            norm.weight if norm else None,
            config.norm_eps,
            scale=config.residual_scale,
            post_weight=post_norm.weight if post_norm else None,
            rows=rows,
        )

    def products(self, num_rows: int, attend: PagedAttend) -> list[Callable[[], object]]:
        """Each matrix product of a step of ``num_rows`` rows, on zeros, with the kernels that add up its parts."""
        layer, head = self.weights.layers[0], self.weights.head
        some = torch.zeros(num_rows, dtype=torch.int32, device=self.device)

        def rows(linear: Linear) -> Tensor:
            return torch.zeros(num_rows, linear.weight.shape[1], dtype=self.dtype, device=self.device)

        def attention() -> None:
            x = self.rehearse_attention(0, num_rows, attend)
            residual = x.new_zeros(x.shape[-2:], dtype=self.dtype)
            self._add_and_norm(x, residual, layer.attn_post_norm, layer.mlp_norm)

        def down() -> None:
            x = self._linear(rows(layer.down), layer.down, partial=True)
            residual = x.new_zeros(x.shape[-2:], dtype=self.dtype)
            self._add_and_norm(x, residual, layer.mlp_post_norm, self._norms_after[0])
            self._add_and_norm(x, residual, layer.mlp_post_norm, self._norms_after[-1], some)

        return [attention, down, lambda: self._mlp(layer, rows(layer.up)), lambda: self._linear(rows(head), head)]

    def rehearse_attention(self, layer: int, num_tokens: int, attend: PagedAttend) -> Tensor:
        """One layer's attention on zeros, over the step that ``attend`` was prepared for."""
        weights = self.weights.layers[layer]
        x = torch.zeros(num_tokens, weights.qkv.weight.shape[1], dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        return self._attention(layer, weights, x, positions, attend)

    def shallow(self) -> Decoder:
        """The first layers as a decoder, over the same weights: as many as launch every kernel that all of them do."""
        config = self.config
        kinds = list(zip(config.windows, config.ropes, strict=True))
        # One more than has every kind: behind the last layer, the norm is another kernel.
        depth = min(max(map(kinds.index, kinds)) + 2, config.num_layers)
        fewer = replace(config, num_layers=depth, windows=config.windows[:depth], ropes=config.ropes[:depth])
        facts = ModelFacts(self.name, self.max_model_len, self.eos_token_ids, self.generation_config)
        return Decoder(fewer, replace(self.weights, layers=self.weights.layers[:depth]), facts)

    @classmethod
    def from_source(cls, config: DecoderConfig, hf_config: Any, source: WeightSource, facts: ModelFacts) -> Decoder:
        """Make a decoder of weights in transformers' layout.

        Raises UnsupportedModelError, before any weight is taken, if they are not exactly those of the config.
        """
        tables = rope_tables(hf_config, config, facts.max_model_len, source.device)
        return cls(config, load_weights(source, config, tables, make_ops(source.device).pack), facts)

    @classmethod
    def from_transformers(cls, like: TransformersModel, *, take_weights: bool) -> Decoder:
        """Make a decoder of a model's weights, and compare the two over a few tokens.

        With ``take_weights`` the module of ``like`` loses its weights, so that at most one layer's matrices exist
        twice; else the decoder copies them, and ``like`` stays usable.

        Raises:
            DecoderMismatch: the logits differ by more than rounding; weights that were taken are lost.
            UnsupportedModelError: the model is not covered, for the reason given; no weight was taken.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        module = like._module
        if type(module) is not MODEL_FOR_CAUSAL_LM_MAPPING.get(type(module.config), None):
            raise UnsupportedModelError(
                f"the decoder does not cover {type(module).__name__}, which is no class of transformers"
            )
        config = decoder_config(module.config, like.dtype)
        if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
            raise UnsupportedModelError("the decoder does not call the hooks that the model has")
        if config.kv_specs != like.kv_specs:
            raise UnsupportedModelError(f"{module.config.model_type}: layers attend otherwise than the decoder's would")
        with torch.autocast(like.device.type, enabled=False):
            expected = packed_logits(like)
            facts = ModelFacts(like.name, like.max_model_len, like.eos_token_ids, like.generation_config)
            decoder = cls.from_source(config, module.config, ModuleSource(module, take=take_weights), facts)
            reason = Rule(like.dtype, experts=False).difference(packed_logits(decoder), expected)
        if reason:
            raise DecoderMismatch(
                f"{module.config.model_type}: the decoder gives other logits than transformers: {reason}"
            )
        return decoder

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all matrices but the embedding, unless it is the head too."""
        parts = [x for layer in self.weights.layers for x in (layer.qkv, layer.o, layer.up, layer.down)]
        return sum(part.weight.nbytes for part in [*parts, self.weights.head])


class DecoderMismatch(UnsupportedModelError):
    """The decoder's logits differ from those of transformers."""
