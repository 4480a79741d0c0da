"""Rotary tables from a config, equal to those of transformers' rotary modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cbatch.errors import UnsupportedModelError
from cbatch.models.decoder_config import DecoderConfig, not_covered


@torch.no_grad()
def rope_tables(hf_config: Any, config: DecoderConfig, max_len: int, device: torch.device) -> dict[str, Tensor]:
    """A table for each name in ``config.ropes``, [max_len, rotary_dim] float32: cosines, then sines.

    ``max_len`` is at most ``config_facts.max_positions``, up to which the frequencies do not depend on the length.
    Raises UnsupportedModelError for a ``rope_type`` that transformers lacks, and for frequencies of a part of a head in
    a family without partial RoPE: scaled frequencies heed ``partial_rotary_factor`` in every family.
    """
    kinds = dict.fromkeys(kind for kind in config.ropes if kind is not None)
    tables = {}
    for kind in kinds:
        frequencies, scaling = _frequencies(hf_config, config, kind)
        rotary_dim, head_dim = 2 * len(frequencies), config.head_dim
        if rotary_dim > head_dim or (rotary_dim < head_dim and not config.rope_partial):
            raise UnsupportedModelError(
                f"{hf_config.model_type}: the decoder does not turn {rotary_dim} elements of heads of {head_dim}"
            )
        angles = torch.arange(max_len, device=device).float()[:, None] * frequencies.to(device)
        tables[kind] = torch.cat([angles.cos() * scaling, angles.sin() * scaling], dim=1)
    return tables


def _frequencies(hf_config: Any, config: DecoderConfig, kind: str) -> tuple[Tensor, float]:
    """Radians per position, [rotary_dim / 2] float32 on the CPU, and the factor of cosines and sines."""
    rope = hf_config.rope_parameters[kind] if kind else hf_config.rope_parameters
    if (scaling := rope["rope_type"]) != "default":
        if scaling not in ROPE_INIT_FUNCTIONS:
            raise not_covered(hf_config, f"rope_type={scaling!r}")
        layer_type = {"layer_type": kind} if kind else {}
        return ROPE_INIT_FUNCTIONS[scaling](hf_config, torch.device("cpu"), **layer_type)
    part = rope.get("partial_rotary_factor", 1.0) if config.rope_partial else 1.0
    dim = int(config.head_dim * part)
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0
