"""Imports transformers' configs and tokenizers without the modelling stack, which takes 5 s. Knows no model.

Three imports pull the stack in. A config class writes its docstring, which reads the mapping of all models, and so
imports generation, ``torch._dynamo`` and scikit-learn. Validators import the activations for their names, and so
``torch.distributed.tensor`` and sympy. Validators also import the image and video utilities for two types, and so
torchvision, if installed, and ``torch._dynamo``. None of this changes a config's values.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_removing = threading.Lock()  # look and delete are one step: a moment later the module itself may stand there
_lock = threading.RLock()  # overlapping blocks of two threads would restore each other's stubs


@contextmanager
def light_imports() -> Iterator[None]:
    """Within the block, config classes keep their source's docstring, and some modules are loaded on demand.

    Later imports get the real modules. A release of transformers without these hooks is imported as slowly as usual.
    """
    import transformers.utils  # noqa: F401  # loads the module below

    with _lock:
        docstrings: Any = sys.modules.get("transformers.utils.auto_docstring")
        writer = getattr(docstrings, "auto_class_docstring", None)
        stubs = [_OnDemand(name, given) for name, given in _GIVEN.items() if name not in sys.modules]
        if writer is not None:
            docstrings.auto_class_docstring = lambda cls, *args, **options: cls
        sys.modules.update((stub.__name__, stub) for stub in stubs)
        try:
            yield
        finally:
            if writer is not None:
                docstrings.auto_class_docstring = writer
            for stub in stubs:
                _remove(stub.__name__)


class _OnDemand(ModuleType):
    """A stub of a module: makes the attribute ``given`` itself, and imports the module for any other.

    For the block's own thread alone: another thread, which may import a model meanwhile, gets the module.
    """

    def __init__(self, name: str, given: tuple[str, Callable[[], Any]]) -> None:
        super().__init__(name)
        self._given = given
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        given, make = self._given
        if name == given and threading.get_ident() == self._thread:
            return make()
        return getattr(_real(self.__name__), name)


def _real(name: str) -> Any:
    _remove(name)
    return importlib.import_module(name)


def _remove(name: str) -> None:
    with _removing:
        if isinstance(sys.modules.get(name), _OnDemand):
            del sys.modules[name]


class _Names(MutableMapping[str, Any]):
    """The mapping of names to activations, loaded at the first access; complete, since custom code may keep it."""

    def __len__(self) -> int:
        return len(_activations())

    def __iter__(self) -> Iterator[str]:
        return iter(_activations())

    def __contains__(self, name: object) -> bool:  # looked up, it would be made
        return name in _activations()

    def __getitem__(self, name: str) -> Any:
        return _activations()[name]

    def __setitem__(self, name: str, activation: Any) -> None:
        _activations()[name] = activation

    def __delitem__(self, name: str) -> None:
        del _activations()[name]


def _activations() -> Any:
    return _real("transformers.activations").ACT2FN


def _resampling() -> Any:
    from PIL.Image import Resampling

    return Resampling


_GIVEN: dict[str, tuple[str, Callable[[], Any]]] = {  # module -> the name that validators import, and its value
    "transformers.activations": ("ACT2FN", _Names),
    "transformers.image_utils": ("PILImageResampling", _resampling),
    "transformers.video_utils": ("VideoMetadataType", lambda: Any),  # an annotation
}
