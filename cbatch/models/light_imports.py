"""Configs and tokenizers of transformers without the modelling stack, which takes 5 s to import. Knows no model.

Two things drag it in. Importing a config class writes its docstring, and for that looks into the mapping of all models,
which imports generation, ``torch._dynamo`` and scikit-learn. And validators import the activations, to know their
names, and with them ``torch.distributed.tensor`` and sympy. Neither changes what a config holds.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ACTIVATIONS = "transformers.activations"
_lock = threading.RLock()  # of two threads whose turns overlap, the second would put back what the first had put there


@contextmanager
def light_imports() -> Iterator[None]:
    """Imports inside the block are faster: config classes keep their source's docstring, activations load on demand.

    Nothing else changes, and what imports the activations afterwards gets them. With a release of transformers that
    lacks the two places, imports are as slow as ever.
    """
    import transformers.utils  # noqa: F401  # so that the module below is there

    with _lock:
        docstrings: Any = sys.modules.get("transformers.utils.auto_docstring")
        writer = getattr(docstrings, "auto_class_docstring", None)
        stub = None if _ACTIVATIONS in sys.modules else _Activations(_ACTIVATIONS)
        if writer is not None:
            docstrings.auto_class_docstring = lambda cls, *args, **options: cls
        if stub is not None:
            sys.modules[_ACTIVATIONS] = stub
        try:
            yield
        finally:
            if writer is not None:
                docstrings.auto_class_docstring = writer
            if stub is not None and sys.modules.get(_ACTIVATIONS) is stub:
                del sys.modules[_ACTIVATIONS]


class _Activations(ModuleType):
    """Stands for the module until something needs more of it than the name ``ACT2FN``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for some
            raise AttributeError(name)
        return _Names() if name == "ACT2FN" else getattr(_real_activations(), name)


class _Names:
    """The mapping from a name to an activation, as far as validators ask: what is in it."""

    def __len__(self) -> int:
        return len(_real_activations().ACT2FN)

    def __contains__(self, name: object) -> bool:
        return name in _real_activations().ACT2FN

    def __getitem__(self, name: str) -> Any:
        return _real_activations().ACT2FN[name]

    def keys(self) -> Any:
        return _real_activations().ACT2FN.keys()


def _real_activations() -> Any:
    if isinstance(sys.modules.get(_ACTIVATIONS), _Activations):
        del sys.modules[_ACTIVATIONS]
    return importlib.import_module(_ACTIVATIONS)
