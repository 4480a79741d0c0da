"""Sources of the decoder's weights: a module of transformers, random numbers, or a checkpoint (``checkpoint.py``)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from cbatch.errors import UnsupportedModelError
from cbatch.models.decoder_config import DecoderConfig


class WeightSource(Protocol):
    """Tensors with transformers' names and layout. Each is taken or read once."""

    name: str
    """For errors."""
    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    """Of all tensors; known before any is read."""
    tied: bool
    """Whether the embedding is the head; then ``lm_head.weight`` is not read."""

    def take(self, name: str) -> Tensor:
        """The tensor on the source's device and in its dtype, with any strides. It belongs to the caller."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy the tensor into ``out``, of its shape, with any strides, on the source's device and in its dtype.

        No second tensor of this size stays allocated."""
        ...


class ModuleSource:
    """The weights of a module: copies, or with ``take`` the tensors themselves, which leaves the module empty ones."""

    def __init__(self, module: nn.Module, *, take: bool) -> None:
        """Raises UnsupportedModelError if the weights have several dtypes."""
        self._module, self._take = module, take
        self._tensors: dict[str, Tensor] = module.state_dict()
        parameter = next(module.parameters())
        self.name, self.device, self.dtype = type(module).__name__, parameter.device, parameter.dtype
        for name, tensor in self._tensors.items():
            if tensor.dtype != self.dtype:
                raise UnsupportedModelError(f"weights of more than one dtype: {name}")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        pointers = [tensor.data_ptr() for tensor in self._tensors.values()]
        head = self._tensors.get("lm_head.weight")
        self.tied = head is not None and pointers.count(head.data_ptr()) > 1

    def take(self, name: str) -> Tensor:
        tensor = self._pop(name)
        return tensor if self._take else tensor.clone()

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._pop(name))

    def _pop(self, name: str) -> Tensor:
        tensor = self._tensors.pop(name)
        if self._take:
            part, _, attribute = name.rpartition(".")
            getattr(self._module.get_submodule(part), attribute).data = tensor.new_empty(0)
        return tensor


class RandomSource:
    """Random weights, made on the device: normal matrices, norms of one, biases of zero.

    A seed gives the same weights again on the same kind of device. Touches no other random state.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.name, self.device, self.dtype, self.tied = "the config", device, dtype, config.tied
        self.shapes = config.weight_shapes()
        self._std, self._unit = config.init_std, 1.0 - config.norm_offset
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str) -> Tensor:
        out = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
        self.read(name, out)
        return out

    def read(self, name: str, out: Tensor) -> None:
        if out.dim() > 1:
            out.normal_(0.0, self._std, generator=self._generator)
        else:
            out.fill_(0.0 if name.endswith(".bias") else self._unit)
