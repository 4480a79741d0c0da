"""Reads safetensors of a folder or hub repository, one tensor at a time, straight to the device. Knows no model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_files

from cbatch.errors import ModelNotFoundError, UnsupportedModelError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
COMPUTED = tuple(_DTYPES.values())


class Checkpoint:
    """A ``WeightSource`` over open files; a context manager that closes them.

    Tensors are cast to ``dtype``; None: to their own, which must be one for all.

    Raises:
        ModelNotFoundError: a file of the checkpoint is missing or broken; the message names it.
        UnsupportedModelError: tensors that are not floats of 16 or 32 bits, or of another framework.
    """

    def __init__(
        self,
        path: str,
        *,
        local_only: bool,
        device: torch.device,
        dtype: torch.dtype | None,
        tied_to: str | None,  # the embedding, if the config ties the head to it
    ) -> None:
        self.name, self.device = path, device
        self._files: dict[str, Any] = {}  # by the name of the tensor
        dtypes = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as stack:
            for file, names in _files(path, local_only).items():
                opened = _open(file, stack, device)
                for name in opened.keys() if names is None else names:  # not a dict
                    if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints; transformers ignores them too
                        continue
                    try:
                        facts = opened.get_slice(name)
                    except SafetensorError as error:
                        raise ModelNotFoundError(f"{file} has no {name}, which {INDEX} says it has") from error
                    if facts.get_dtype() not in _DTYPES:
                        raise UnsupportedModelError(f"{name} is stored as {facts.get_dtype()}")
                    dtypes.add(facts.get_dtype())
                    self.shapes[name] = tuple(facts.get_shape())
                    self._files[name] = opened
            if dtype is None and len(dtypes) != 1:
                raise UnsupportedModelError(f"tensors of {len(dtypes)} dtypes, and the config names none")
            self.dtype = dtype or _DTYPES[dtypes.pop()]
            self.tied = tied_to is not None and not self._has_another_head(tied_to)
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def _has_another_head(self, embedding: str) -> bool:
        """Whether the stored head differs from the embedding; like transformers, we then use it, whatever the config
        says. Both are in memory for the comparison, before anything else is."""
        head = "lm_head.weight"
        if head not in self.shapes or embedding not in self.shapes:
            return False
        return not torch.equal(*(self._files[name].get_tensor(name) for name in (embedding, head)))

    def take(self, name: str) -> Tensor:
        tensor = self._files[name].get_tensor(name)
        # On the CPU a tensor is a view of the file, which another program may change.
        return tensor.to(self.dtype, copy=self.device.type == "cpu")

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._files[name].get_tensor(name))


def find_files(path: str, names: list[str], local_only: bool) -> dict[str, Path]:
    """The existing files of these names in a folder or hub repository; a repository's are downloaded or cached.

    Waits for the network unless ``local_only``. Raises OSError if the repository cannot be reached.
    """
    found = cached_files(path, names, local_files_only=local_only, _raise_exceptions_for_missing_entries=False)
    files = [Path(file) for file in found or ()]
    return {name: file for file in files for name in names if file.as_posix().endswith(f"/{name}")}  # a/b.safetensors


def refuse_scaled(path: str, local_only: bool) -> None:
    """Raise UnsupportedModelError if a weight's type needs a scale: integers, or floats of 8 bits.

    Reads only the files' headers. Missing weights are left to transformers; a broken file raises SafetensorError.
    """
    try:
        files = _files(path, local_only)
    except UnsupportedModelError:
        return
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                stored = opened.get_slice(name).get_dtype()
                if name.endswith(".weight") and stored not in {"F64", *_DTYPES}:
                    raise UnsupportedModelError(
                        f"{path!r}: {name} is stored as {stored}, and the config names no quantisation, which would "
                        "say what it stands for"
                    )


def _files(path: str, local_only: bool) -> dict[Path, list[str] | None]:
    """The checkpoint's files, and the names of the tensors to read from each; None: all."""
    index: Path | None = None
    try:
        if file := find_files(path, [ONE_FILE], local_only).get(ONE_FILE):
            return {file: None}
        index = find_files(path, [INDEX], local_only).get(INDEX)
        if index is None:
            raise UnsupportedModelError(f"no {ONE_FILE} and no {INDEX} at {path!r}")
        files_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = sorted({*files_of.values()})
        found = find_files(path, shards, local_only)
    except OSError as error:
        raise UnsupportedModelError(f"no safetensors at {path!r}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFoundError(f"{index} is no index of safetensors: {error!r}") from error
    if missing := [shard for shard in shards if shard not in found]:
        raise ModelNotFoundError(f"{index} names {missing[0]}, which is not there")
    return {found[shard]: [name for name, file in files_of.items() if file == shard] for shard in shards}


def _open(file: Path, stack: ExitStack, device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    where = f"cuda:{index}" if device.type == "cuda" else device.type
    try:
        opened: Any = stack.enter_context(safe_open(file, framework="pt", device=where))
    except (SafetensorError, OSError) as error:
        raise ModelNotFoundError(f"{file} is not a whole safetensors file: {error}") from error
    kind = (opened.metadata() or {}).get("format")
    if kind != "pt":
        raise UnsupportedModelError(f"{file} was written for {kind!r}, not for torch")
    return opened
