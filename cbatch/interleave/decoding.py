"""One batch's state on the device, at fixed addresses, and the step over it, eager or as a CUDA graph.

Knows a model of transformers and a ``Search``; knows no stream but the one it captures on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from cbatch.errors import UnsupportedModelError
from cbatch.graphs import capturing
from cbatch.interleave.search import Search
from cbatch.memory import ran_out
from cbatch.streams import give_back, take_stream
from cbatch.turns import alone

CacheKind = Literal["static", "dynamic"]


class _MaskedDynamicCache(DynamicCache):
    """For padded prompts. Transformers reads the mask from the device to see whether it can omit it, unless the cache
    calls itself compileable; then it always uses the mask."""

    @property
    def is_compileable(self) -> bool:
        return True


def static_cache(config: Any, max_len: int) -> Cache:
    """A ``StaticCache`` whose layers all keep all positions; only the mask has a sliding window.

    Transformers' sliding-window layer counts tokens in Python, and shifts the window once it is full: a captured step
    would do neither.
    """
    layers: list[Any] = StaticCache(config=config, max_cache_len=max_len).layers
    return Cache(
        layers=[
            StaticLayer(max_cache_len=max_len) if getattr(layer, "is_sliding", False) else layer for layer in layers
        ]
    )


def num_embeddings(model: Any) -> int:
    """The number of token ids. A padded head has more logits, which are never chosen."""
    return int(model.get_input_embeddings().weight.shape[0])


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [num_rows, length] int64; a row per beam
    attention_mask: Tensor  # as input_ids; 0 at padding, which is on the left
    padded: bool  # whether any row has padding
    max_new_tokens: int


class Decoding:
    """The state of a batch: ``load``, ``prefill``, then ``step``. The latter two choose a token per row.

    Args:
        forward: the model, compiled or not; for steps only.
        max_len: positions of the cache.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], search: Search, max_len: int, cache: CacheKind) -> None:
        device, num_rows = search.report.device, search.num_rows
        self.search, self.max_len = search, max_len
        self._model, self._forward, self._kind, self._vocab_size = model, forward, cache, num_embeddings(model)
        self._tokens = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self._mask = torch.ones(num_rows, max_len, dtype=torch.int64, device=device)
        self._cache: Any = static_cache(model.config, max_len) if cache == "static" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        # Without it, a prompt's logits are [tokens, vocab_size].
        accepts = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    def load(self, batch: Batch) -> None:
        """Start a new batch with the same number of rows, on the caller's stream."""
        length = batch.input_ids.shape[1]
        self._prompt = batch.input_ids
        self._mask[:, :length] = batch.attention_mask
        self._mask[:, length:] = 1  # the causal mask hides later positions until they are computed
        self._prompt_positions = (batch.attention_mask.cumsum(-1) - 1).clamp(min=0)
        self._positions.copy_(self._prompt_positions[:, -1:])
        self._masked = batch.padded or self._kind == "static"
        if self._kind == "dynamic":
            self._cache = (_MaskedDynamicCache if batch.padded else DynamicCache)(config=self._model.config)
        else:
            self._cache.reset()  # to zeros: masked values are multiplied by 0, and 0 * NaN is NaN
        self.search.reset(batch.max_new_tokens)

    def prefill(self) -> None:
        """Compute the prompt, and choose the first token. May wait for the device."""
        mask = self._mask[:, : self._prompt.shape[1]] if self._masked else None
        inputs = self._inputs(self._prompt, self._prompt_positions, mask, is_first_iteration=True, **self._last_only)
        self._choose(self._model(**inputs).logits)

    def step(self) -> None:
        """Compute the last tokens, and choose the next ones. Waits for nothing."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def capture(self) -> None:
        """Capture the step as a CUDA graph, with a loaded prompt; ``load`` again afterwards.

        Waits for the device, and for engines that are being built. The graph holds the whole step (masks, model,
        choice, bookkeeping), so the host launches nothing else. torch.compile's own graphs (``mode="reduce-overhead"``)
        hold the model alone, and a replay overwrites their results, which another stream may still read.

        Raises UnsupportedModelError if the model waits for a value from the device.
        """
        device = self.search.report.device
        with alone(device):  # torch.compile's autotuning waits for the whole device
            self.prefill()  # allocates the cache
            stream = take_stream(device)
            try:
                self._graph = self._capture_on(stream)
            finally:
                give_back(stream)

    def _capture_on(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        caller = torch.cuda.current_stream(stream.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm-up: compiles kernels, and lets libraries choose theirs
                self._rewind()
                self._step()
            self._rewind()
        caller.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self.search.draws:
            graph.register_generator_state(self.search.generator)
        try:
            with torch.cuda.stream(stream), capturing(graph, torch.cuda.graph_pool_handle()):
                self._step()
        except RuntimeError as error:
            if ran_out(error):
                raise
            raise UnsupportedModelError(
                f"a step of {type(self._model).__name__} cannot be captured as a CUDA graph, use compile=False: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return graph

    def _rewind(self) -> None:
        """Empty the cache, so that warm-up steps stay within the model's positions."""
        self._mask.fill_(1)
        self._positions.fill_(0)
        self._cache.reset()
        self.search.reset(self.max_len)

    def _step(self) -> None:
        self._positions.add_(1)
        mask = self._mask if self._masked else None
        inputs = self._inputs(self._tokens, self._positions, mask, is_first_iteration=False)
        self._choose(self._forward(**inputs).logits)

    def _inputs(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, **more: Any) -> dict[str, Any]:
        return self._model.prepare_inputs_for_generation(
            tokens,
            past_key_values=self._cache,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **more,
        )

    def _choose(self, logits: Tensor) -> None:
        tokens, parents = self.search.choose(logits[:, -1, : self._vocab_size].to(torch.float32, copy=True))
        self._tokens.copy_(tokens[:, None])
        if parents is None:
            return
        if self._kind == "dynamic":
            self._cache.reorder_cache(parents)
            return
        for layer in self._cache.layers:  # in place, which ``reorder_cache`` is not
            layer.keys.copy_(layer.keys.index_select(0, parents))
            layer.values.copy_(layer.values.index_select(0, parents))
