"""One batch on the device: what the next step reads, at fixed addresses, and the step, also as a CUDA graph.

Knows a model of transformers and how tokens are chosen; knows no stream but the ones it captures on.
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
    """For prompts with padding. Transformers omits the mask if there is none, and reads it back from the device to find
    out; with a cache that calls itself compileable it does not look, and always makes the mask."""

    @property
    def is_compileable(self) -> bool:
        return True


def static_cache(config: Any, max_len: int) -> Cache:
    """A ``StaticCache`` whose layers all keep all positions; a sliding window is then in the mask only.

    Transformers' layer for a sliding window counts in Python until the window is full, and from then on shifts it for
    each token: a captured step would neither count nor start to shift.
    """
    layers: list[Any] = StaticCache(config=config, max_cache_len=max_len).layers
    return Cache(
        layers=[
            StaticLayer(max_cache_len=max_len) if getattr(layer, "is_sliding", False) else layer for layer in layers
        ]
    )


def num_embeddings(model: Any) -> int:
    """How many token ids a model knows. A padded head has logits for more, which are never chosen."""
    return int(model.get_input_embeddings().weight.shape[0])


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor  # [num_rows, length] int64; with beams, a row for each
    attention_mask: Tensor  # as input_ids; 0 at padding, which is on the left
    padded: bool  # whether there is any padding
    max_new_tokens: int


class Decoding:
    """The state of a batch: ``load`` it, ``prefill`` it, then ``step``. Each of the latter two chooses a token a row.

    Args:
        forward: the model, or what torch.compile made of it; for steps only.
        max_len: positions that the cache has room for.
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
        # All logits of a prompt would be [tokens, vocab_size].
        accepts = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    def load(self, batch: Batch) -> None:
        """Start a new batch with the same number of rows, on the caller's stream."""
        length = batch.input_ids.shape[1]
        self._prompt = batch.input_ids
        self._mask[:, :length] = batch.attention_mask
        self._mask[:, length:] = 1  # later positions are hidden by the causal mask until they are computed
        self._prompt_positions = (batch.attention_mask.cumsum(-1) - 1).clamp(min=0)
        self._positions.copy_(self._prompt_positions[:, -1:])
        self._masked = batch.padded or self._kind == "static"
        if self._kind == "dynamic":
            self._cache = (_MaskedDynamicCache if batch.padded else DynamicCache)(config=self._model.config)
        else:
            self._cache.reset()  # to zeros: hidden values are multiplied by 0, which leaves NaN as it is
        self.search.reset(batch.max_new_tokens)

    def prefill(self) -> None:
        """Compute the prompt, and choose the first token. May wait for the device."""
        mask = self._mask[:, : self._prompt.shape[1]] if self._masked else None
        inputs = self._inputs(self._prompt, self._prompt_positions, mask, is_first_iteration=True, **self._last_only)
        self._choose(self._model(**inputs).logits)

    def step(self) -> None:
        """Compute the tokens chosen last, and choose the next ones. Waits for nothing."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def capture(self) -> None:
        """Make a CUDA graph of the step, of a loaded prompt. Waits for the device, and until no engine is being built;
        ``load`` again afterwards.

        The whole step is in it: masks, model, choice, bookkeeping; so a replay is all the host launches. The graphs
        that torch.compile makes by itself (``mode="reduce-overhead"``) hold the model alone, and the next replay
        writes over their results, which another stream may still read.

        Raises UnsupportedModelError if the model waits for a value from the device.
        """
        device = self.search.report.device
        with alone(device):  # also while torch.compile tunes kernels, for which it waits for the device
            self.prefill()  # the cache gets its memory
            stream = take_stream(device)
            try:
                self._graph = self._capture_on(stream)
            finally:
                give_back(stream)

    def _capture_on(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        caller = torch.cuda.current_stream(stream.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm-up: kernels are compiled, libraries choose theirs
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
        """Go back to an empty cache, so that warm-up steps stay within the model's positions."""
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
