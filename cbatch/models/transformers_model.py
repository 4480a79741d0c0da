"""Runs any causal language model of transformers in packed steps. Knows no pages and no request."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbatch.errors import ConfigError, UnsupportedModelError
from cbatch.models import config_facts
from cbatch.models.base import Attend
from cbatch.models.hand_over import answering
from cbatch.models.probe import probe
from cbatch.models.structural_copy import structural_copy, uncompiled
from cbatch.scheduler.kv_spec import KVSpec


class TransformersModel:
    """A caller's causal LM, left unchanged.

    Works on a structural copy: it shares the parameters, so it sees in-place updates by a training loop at once, but
    has its own config, computed buffers and mode (eval). Nothing is moved or cast. The probe at load takes five
    forwards of a few tokens, and touches no random state.

    max_model_len: from the config, by ``config_facts.max_positions``.
    capturable: False if the forward waits for a value from the device (an MoE that loops over the experts hit, or
        dynamic RoPE, which reads the largest position).

    Raises:
        UnsupportedModelError: not a causal LM of transformers, or on several devices, or its packed steps give other
            logits than single sequences.
        ConfigError: ``device`` or ``dtype`` is given, and differs from the module's.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        module = _causal_lm(module)
        self.device = _only_device(module)
        if device is not None and not _same_device(torch.device(device), self.device):
            raise ConfigError(f"device={str(device)!r}, but the module is on {self.device}: move it there yourself")
        if module.dtype == torch.float64:
            raise UnsupportedModelError("the module computes in float64, which the kernels do not: cast it (.float())")
        if dtype is not None and dtype != module.dtype:
            raise ConfigError(f"dtype={dtype}, but the module is {module.dtype}: cast it yourself")
        config: Any = module.config
        name = getattr(config, "name_or_path", "") or type(module).__name__
        facts = config_facts.model_facts(config, getattr(module, "generation_config", None), name)
        self.name, self.max_model_len = facts.name, facts.max_model_len
        self.generation_config, self.eos_token_ids = facts.generation_config, facts.eos_token_ids

        self._module = structural_copy(module)
        _return_only_logits(self._module)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(module.forward).parameters
        with torch.autocast(self.device.type, enabled=False):
            found = probe(
                self._module,
                max_model_len=self.max_model_len,
                takes_logits_to_keep=self._takes_logits_to_keep,
                dtype=module.dtype,
            )
        self.kv_specs: tuple[KVSpec, ...] = tuple(layer.spec for layer in found.layers)
        self.vocab_size = found.vocab_size
        self.dtype = found.layers[0].dtype
        self.capturable = found.capturable
        self._layer_of = {layer.module: i for i, layer in enumerate(found.layers)}

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: Attend) -> Tensor:
        """Run one packed step; shapes as in ``Model.forward``. Copies nothing to the host.

        Any thread may call it, one at a time: families with dynamic RoPE rewrite buffers of the copy.
        """
        layer_of = self._layer_of
        input_ids, positions, sample_rows = input_ids.long(), positions.long(), sample_rows.long()

        def answer(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: Any, extras: dict[str, Any], **options: Any
        ) -> Tensor:  # the probe has checked mask and extras
            return attend(layer_of[module], q, k, v, **options)

        options: dict[str, Any] = {"logits_to_keep": sample_rows} if self._takes_logits_to_keep else {}
        with answering(answer):
            out = self._module(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
            )
        logits: Tensor = out.logits[0, :, : self.vocab_size]
        return logits if self._takes_logits_to_keep else logits[sample_rows]


def _causal_lm(module: nn.Module) -> PreTrainedModel:
    module = uncompiled(module)
    kind = type(module).__name__
    if not isinstance(module, PreTrainedModel):
        raise UnsupportedModelError(
            f"{kind} is not a model of transformers. Unwrap it first (.module of DDP, merge_and_unload() of PEFT)"
        )
    config: Any = module.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; only causal language models can run here")
    if not module.can_generate() or module.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{kind} is not a causal language model: it has no language modelling head")
    signature = inspect.signature(module.forward)
    if "position_ids" not in signature.parameters:
        if "forward" in vars(module):  # it is bound to the caller's module, not to our copy
            raise UnsupportedModelError(
                f"the forward of this {kind} has been replaced by one that takes {signature}, and a copy of the model "
                "cannot be run through it: give the model its own forward back (`del model.forward`)"
            )
        raise UnsupportedModelError(
            f"{kind}.forward takes no position_ids, so the sequences of a packed step cannot be told apart"
        )
    return module


def _only_device(module: nn.Module) -> torch.device:
    device_map: dict[str, Any] = getattr(module, "hf_device_map", None) or {}
    devices = {p.device for p in module.parameters()}
    if {device.type for device in devices} == {"meta"}:
        raise UnsupportedModelError("the model is on the meta device, where it has a shape and no weights: load them")
    if len({str(d) for d in device_map.values()}) > 1 or len(devices) != 1 or next(iter(devices)).type == "meta":
        where = sorted({str(d) for d in device_map.values()} | {str(d) for d in devices})
        raise UnsupportedModelError(f"the model is spread over {', '.join(where)}; it must be on one device")
    return devices.pop()


def _same_device(asked: torch.device, actual: torch.device) -> bool:
    """``cuda`` without a number matches any GPU."""
    return asked.type == actual.type and asked.index in (None, actual.index)


def _return_only_logits(module: nn.Module) -> None:
    """Switch off outputs besides the logits. ``module`` is our copy."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None:
            config.output_attentions = False
            config.output_hidden_states = False
            if hasattr(config, "output_router_logits"):
                config.output_router_logits = False
