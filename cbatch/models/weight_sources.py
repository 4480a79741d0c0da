"""Where the decoder's weights come from: a module of transformers, a checkpoint (``checkpoint.py``), or dice."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from cbatch.errors import UnsupportedModelError
from cbatch.models.decoder_config import DecoderConfig


class WeightSource(Protocol):
    """Tensors by the names and in the layout of transformers. Each is asked for once, by one of the two methods."""

    name: str
    """For messages."""
    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    """Of all there is; known before anything is read."""
    tied: bool
    """Whether the embedding is the head; ``lm_head.weight`` is not asked for then."""

    def take(self, name: str) -> Tensor:
        """The tensor on the device and in the dtype of the source, the caller's to keep, with any strides."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor into ``out`` of its shape, with any strides, on the device and in the dtype of the source.

        Nothing else of its size stays allocated."""
        ...


class ModuleSource:
    """The weights of a module: copied, or taken away; then the module is left with empty tensors."""

    def __init__(self, module: nn.Module, *, take: bool) -> None:
        """Raises UnsupportedModelError where the weights are of several dtypes."""
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
    """Weights of a seed, made where they will live: matrices normal, norms one, biases zero.

    The same seed gives the same weights on a device; the random state of others is left alone.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.name, self.device, self.dtype, self.tied = "the config", device, dtype, config.tied
        self.shapes = config.weight_shapes()
        self._std, self._unit = config.init_std, 1.0 - config.norm_offset
        self._dice = torch.Generator(device).manual_seed(seed)

    def take(self, name: str) -> Tensor:
        out = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)
        self.read(name, out)
        return out

    def read(self, name: str, out: Tensor) -> None:
        if out.dim() > 1:
            out.normal_(0.0, self._std, generator=self._dice)
        else:
            out.fill_(0.0 if name.endswith(".bias") else self._unit)
