"""cbatch: continuous batching for language models; the CPU plans batch N+1 while the GPU computes batch N.

The names below load on first use (PEP 562), so that importing ``cbatch.scheduler`` or asking for the version does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch.async_llm import AsyncLLM
    from cbatch.config import EngineConfig
    from cbatch.engine import Engine
    from cbatch.errors import (
        CBatchError,
        ConfigError,
        DuplicateRequestError,
        EngineClosedError,
        EngineDeadError,
        EngineOverloadedError,
        InvalidRequestError,
        ModelNotFoundError,
        PromptTooLongError,
        UnsupportedModelError,
    )
    from cbatch.llm import LLM
    from cbatch.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from cbatch.request import RequestHandle
    from cbatch.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CBatchError",
    "CompletionOutput",
    "ConfigError",
    "DuplicateRequestError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineOverloadedError",
    "InvalidRequestError",
    "Logprob",
    "ModelNotFoundError",
    "PromptTooLongError",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "cbatch.async_llm": ("AsyncLLM",),
    "cbatch.config": ("EngineConfig",),
    "cbatch.engine": ("Engine",),
    "cbatch.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "cbatch.llm": ("LLM",),
    "cbatch.outputs": ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    "cbatch.request": ("RequestHandle",),
    "cbatch.sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
