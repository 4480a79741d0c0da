"""Configs and tokenizers of transformers without the modelling stack, which takes 5 s to import. Knows no model.

Three things drag it in. Importing a config class writes its docstring, and for that looks into the mapping of all
models, which imports generation, ``torch._dynamo`` and scikit-learn. Validators import the activations, to know their
names, and with them ``torch.distributed.tensor`` and sympy. And they import what reads images and videos, for two
types, and with it torchvision where that is installed, and so ``torch._dynamo`` again. None of it changes what a config
holds.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_removing = threading.Lock()  # look and delete are one: what stands there a moment later may be the module itself
_lock = threading.RLock()  # of two threads whose turns overlap, the second would put back what the first had put there


@contextmanager
def light_imports() -> Iterator[None]:
    """Imports inside the block are faster: config classes keep their source's docstring, some modules load on demand.

    Nothing else changes, and what imports those modules afterwards gets them. With a release of transformers that
    lacks these places, imports are as slow as ever.
    """
    import transformers.utils  # noqa: F401  # so that the module below is there

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
    """Stands for a module until something needs more of it than ``given``, which makes what the name says.

    For the thread of the block alone: another one, which may import a model meanwhile, gets the module.
    """

    def __init__(self, name: str, given: tuple[str, Callable[[], Any]]) -> None:
        super().__init__(name)
        self._given = given
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for some
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
    """The mapping from a name to an activation, whole: a checkpoint's own code may keep it."""

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


_GIVEN: dict[str, tuple[str, Callable[[], Any]]] = {  # what validators import of each
    "transformers.activations": ("ACT2FN", _Names),
    "transformers.image_utils": ("PILImageResampling", _resampling),
    "transformers.video_utils": ("VideoMetadataType", lambda: Any),  # an annotation
}
