"""``generate`` for a stock transformers model, with the host's work hidden behind the GPU's.

While token i computes on one stream, the host queues token i+1 on the other; then it waits for token i in pinned
memory, and reads whether that was the last. So the device always has a token to compute. Tokens after the last one are
dropped.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticLayer

from cbatch.errors import (
    CBatchError,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModelError,
    short,
)
from cbatch.interleave.decoding import Batch, CacheKind, Decoding, num_embeddings, static_cache
from cbatch.interleave.lanes import CudaLanes, HostLane, Lanes
from cbatch.interleave.options import Choice, resolve, token_limit
from cbatch.interleave.probe import probe
from cbatch.interleave.search import Beams, Tokens
from cbatch.models.config_facts import max_positions
from cbatch.prompts import encode_prompt
from cbatch.tokenizer import check_tokenizer

_log = logging.getLogger(__name__)
_PAGE = 64  # positions: compiled and captured steps are rounded up to a multiple, so that more prompts fit


class InterleavedGenerator:
    """A causal LM of transformers, one batch at a time.

    Args:
        model: a ``PreTrainedModel`` in evaluation mode, with all weights on one device. It is not changed. A few tokens
            are computed, in steps and at once; a model whose logits differ is refused.
        tokenizer: of transformers, for prompts that are text.
        num_streams: CUDA streams that take turns, at least 1. Two hide the host's work; each further one lets the host
            run one token further ahead, and wastes one more token at a stop. The CPU has one lane; ``num_lanes`` and a
            warning say so.
        compile: launch a step as one CUDA graph. ``"cudagraphs"``: of the model's own kernels; ``True``: of the model
            as torch.compile compiles it, in the first call and perhaps again for other sizes. On the CPU, ``True`` is
            torch.compile alone. The graph and its cache are kept for the next call that they fit.
        cache: ``"static"``: all positions of a call are allocated at its start. ``"dynamic"``: the cache grows.

    After each call, ``num_steps`` is the number of its forward passes, and ``num_wasted_steps`` the number of those
    after the last token: at most ``num_lanes - 1``.

    Raises:
        ConfigError: an option out of range, an invalid tokenizer, or a model in training mode.
        UnsupportedModelError: the model cannot be run in steps; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        num_streams: int = 2,
        compile: bool | Literal["cudagraphs"] = False,
        cache: CacheKind = "static",
    ) -> None:
        self._device = _checked(model)
        _in_evaluation(model)
        if isinstance(num_streams, bool) or not isinstance(num_streams, int) or num_streams < 1:
            raise ConfigError(f"num_streams is {short(num_streams)}, but must be a whole number of at least 1")
        if not (isinstance(compile, bool) or compile == "cudagraphs"):
            raise ConfigError(f"compile is {short(compile)}, but must be True, False or 'cudagraphs'")
        if cache not in ("static", "dynamic"):
            raise ConfigError(f"cache is {short(cache)}, but must be 'static' or 'dynamic'")
        if compile and cache == "dynamic":
            raise ConfigError(
                f"compile={compile!r} needs cache='static': a dynamic cache has another shape at every token"
            )
        on_gpu = self._device.type == "cuda"
        if compile == "cudagraphs" and not on_gpu:
            raise ConfigError(f"compile='cudagraphs' needs a CUDA device, but the model is on {self._device}")
        if isinstance(tokenizer, (str, os.PathLike)):
            raise ConfigError(f"tokenizer is {short(tokenizer)}, but must be the tokenizer itself, not a name")
        check_tokenizer(tokenizer)
        self._model, self.tokenizer = model, tokenizer
        self.num_streams, self.compile, self.cache = num_streams, compile, cache
        self.num_lanes = num_streams if on_gpu else 1
        if self.num_lanes < num_streams:
            _warn_once(f"num_streams={num_streams}: there are no streams on {self._device}, so one lane computes")
        self.num_steps = self.num_wasted_steps = 0
        self._lanes: Lanes = CudaLanes(num_streams, self._device) if on_gpu else HostLane()
        self._forward: Callable[..., Any] = torch.compile(model.__call__) if compile is True else model
        self._captured: tuple[tuple[Any, ...], Decoding] | None = None  # by choice, batch size and weights
        self._busy = threading.Lock()
        probe(model, cache)

    @property
    def model(self) -> PreTrainedModel:
        """The model, which cannot be replaced: compiled and captured steps belong to it."""
        return self._model

    @torch.inference_mode(False)  # a graph captured in the caller's inference mode would fail outside of it
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | str | Sequence[str],
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        *,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Any = None,
    ) -> Tensor | str | list[str]:
        """Continues prompts, as transformers' ``model.generate``.

        An option that is None comes from the model's ``generation_config``, else from transformers' defaults.

        Args:
            input_ids: ``[batch_size, length]`` int64, padded on the left; or, with a tokenizer, one text or several.
            attention_mask: ``[batch_size, length]``, 0 at padding. None: tokens equal to ``pad_token_id`` are padding,
                unless it is a stop token.
            do_sample: True draws each token, False takes the likeliest. None: True if ``temperature``, ``top_k`` or
                ``top_p`` is given. (With False these three are refused.)
            temperature, top_k, top_p: above 0; at least 0, with 0 for all; above 0 and at most 1. transformers' warpers
                apply them in this order.
            num_beams: above 1: beam search, with ``length_penalty`` and ``early_stopping``.
            eos_token_id: one or several; ``[]``: none, so every row has ``max_new_tokens``.
            pad_token_id: fills rows that end before others. None: the first stop token.
            generator: the source of the sampling seed; None: torch's own, which ``torch.manual_seed`` sets.
            streamer: with ``put`` and ``end``, as transformers'. It gets a token while the next one computes.

        Returns:
            ``[batch_size, length + new tokens]`` int64, on the model's device. For text, only the new text: one
            string for one prompt, else a list.

        Raises:
            InvalidRequestError, PromptTooLongError: an option or a prompt that cannot be served.
            ConfigError: the model is in training mode, or torch.autocast on with a static cache.
            UnsupportedModelError: the model's step cannot be captured; see ``compile``.
        """
        _in_evaluation(self.model)
        if self.model.device != self._device:
            raise ConfigError(
                f"the model is on {self.model.device} now, but was on {self._device}: make a new generator"
            )
        if self.cache == "static" and torch.is_autocast_enabled(self._device.type):
            raise ConfigError(
                "torch.autocast is on, which gives keys and values different dtypes, and a static cache has one: use "
                "cache='dynamic', or convert the model"
            )
        choice = resolve(
            self.model.generation_config,
            num_embeddings(self.model),
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        if streamer is not None:
            if choice.num_beams > 1:
                raise InvalidRequestError(f"streamer with num_beams={choice.num_beams}: beams are known at the end")
            if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
                raise InvalidRequestError(f"streamer is {short(streamer)}, but must have put(tokens) and end()")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidRequestError(f"generator is {short(generator)}, but must be a torch.Generator")
        texts = ids = input_ids
        if not isinstance(ids, Tensor):
            rows = [ids] if isinstance(ids, str) else ids
            ids, attention_mask = self._encode(rows, attention_mask, choice.pad_token_id or 0)
        prompt, mask = self._check_prompt(ids, attention_mask, choice)
        length = prompt.shape[1]
        limit = token_limit(self.model.generation_config, max_new_tokens, length)
        if length + limit > (most := max_positions(self.model.config)):
            raise PromptTooLongError(
                f"a prompt of {length} tokens and max_new_tokens={limit}, but the model has {most} positions"
            )
        if self._busy.locked():
            raise CBatchError(
                "generate is running already, in another thread or in a streamer's put; this class computes one batch "
                "at a time"
            )
        with self._busy:  # ``acquire`` and ``try`` would leave it locked after a Ctrl-C between them
            new = self._run(prompt, mask, choice, limit, generator, streamer)
        if isinstance(texts, Tensor):
            return torch.cat((prompt, new), 1)
        decoded = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return decoded[0] if isinstance(texts, str) else decoded

    def _run(
        self, prompt: Tensor, mask: Tensor, choice: Choice, limit: int, generator: torch.Generator | None, streamer: Any
    ) -> Tensor:
        if streamer is not None:
            streamer.put(prompt.cpu())
        padded = not bool(mask.all())
        input_ids, attention_mask = (rows.repeat_interleave(choice.num_beams, 0) for rows in (prompt, mask))
        batch = Batch(input_ids, attention_mask, padded, limit)
        decoding = self._decoding(batch, choice)
        decoding.load(batch)
        if choice.do_sample:  # a captured step needs its own generator, which the caller's seeds
            device = generator.device if generator is not None else "cpu"
            decoding.search.generator.manual_seed(int(torch.randint(2**62, (), generator=generator, device=device)))
        lanes, behind = self._lanes, self._lanes.depth - 1
        lanes.open(decoding.search.report, limit)
        self.num_steps = num_tokens = 0
        try:
            for i in range(limit + behind):
                if i < limit:
                    lanes.launch(i, decoding.step if i else decoding.prefill)
                    self.num_steps += 1
                if i >= behind:
                    goes_on, *tokens = lanes.land(i - behind).tolist()  # the only wait for the device
                    num_tokens += 1
                    if streamer is not None:
                        streamer.put(torch.tensor(tokens, device="cpu"))
                    if not goes_on:
                        break
        finally:
            lanes.close()
            self.num_wasted_steps = self.num_steps - num_tokens
        if streamer is not None:
            streamer.end()
        return decoding.search.result(num_tokens)

    def _decoding(self, batch: Batch, choice: Choice) -> Decoding:
        """The decoding state for this batch. Captures a step, and waits for it, unless the last one fits."""
        num_rows, length = batch.input_ids.shape
        batch_size, limit = num_rows // choice.num_beams, batch.max_new_tokens
        max_len = length + limit
        captured = bool(self.compile) and self._device.type == "cuda" and limit > 1
        if captured:
            key = choice, batch_size, _weights(self.model)
            if self._captured and self._captured[0] == key and self._captured[1].max_len >= max_len:
                return self._captured[1]
            self._captured = None  # frees its memory for the new one
        if self.compile:
            max_len = -(-max_len // _PAGE) * _PAGE
        search_class = Beams if choice.num_beams > 1 else Tokens
        search = search_class(choice, batch_size, max_len if captured else limit, self._device)
        decoding = Decoding(self.model, self._forward, search, max_len, self.cache)
        if captured:
            decoding.load(batch)
            decoding.capture()
            self._captured = key, decoding
        return decoding

    def _check_prompt(self, ids: Tensor, mask: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
        """Prompt and mask on the model's device, int64. Waits for the device to check them."""
        if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            raise InvalidRequestError(
                f"input_ids are {ids.dtype} of shape {list(ids.shape)}, but must be int64 [batch_size, length], and "
                "not empty"
            )
        ids = ids.to(self._device, torch.int64)
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= num_embeddings(self.model):
            wrong = low if low < 0 else high
            raise InvalidRequestError(f"input_ids hold {wrong}, but tokens are 0 to {num_embeddings(self.model) - 1}")
        if mask is None:
            mask = torch.ones_like(ids)
            if choice.pad_token_id is not None and choice.pad_token_id not in choice.eos_token_ids:
                mask = ids.ne(choice.pad_token_id).long()
        elif not isinstance(mask, Tensor) or mask.shape != ids.shape:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise InvalidRequestError(f"attention_mask is {shape}, but must be of shape {list(ids.shape)}")
        given, mask = mask.to(self._device), (mask.to(self._device) != 0).long()
        if not bool((given == mask).all()):
            raise InvalidRequestError(f"attention_mask holds {given[given != mask][0].item()}, but must hold 0 and 1")
        if not bool(mask[:, -1].all()):
            row = int(mask[:, -1].argmin())
            raise InvalidRequestError(f"row {row} ends in padding: prompts are padded on the left here")
        return ids, mask

    def _encode(self, texts: Any, mask: Any, pad: int) -> tuple[Tensor, Tensor]:
        if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(f"input_ids are {short(texts)}, but must be a tensor, a text or a list of texts")
        if mask is not None:
            raise InvalidRequestError("attention_mask with prompts that are text: their padding is known")
        encoded = [encode_prompt(self.tokenizer, text) for text in texts]
        if not all(encoded):
            raise InvalidRequestError(f"prompt {encoded.index([])} has no tokens")
        length = max(map(len, encoded))
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in encoded], device="cpu")
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in encoded], device="cpu")
        return ids, mask


def _checked(model: Any) -> torch.device:
    """The model's device. Raises UnsupportedModelError if the model cannot be run in steps."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}, but must be a PreTrainedModel of transformers (give the model "
            "itself, and compile=True, rather than what torch.compile made of it; of a PeftModel with LoRA what "
            "get_base_model() gives, which has the adapters in it)"
        )
    name = type(model).__name__
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModelError(f"{name} is no decoder that generates text")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no position_ids, so padded prompts could not be told apart")
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if "chunked_attention" in kinds:  # transformers' create_masks_for_generate fails for it
        raise UnsupportedModelError(f"{name} attends within chunks, whose masks cannot be made ahead of a step")
    devices = list({parameter.device for parameter in model.parameters()})
    if len(devices) != 1 or devices[0].type not in ("cuda", "cpu"):
        raise UnsupportedModelError(f"{name} is not on one CUDA device or the CPU, but on {sorted(map(str, devices))}")
    try:
        layers = static_cache(model.config, 1).layers
    except Exception as error:
        raise UnsupportedModelError(f"transformers has no static cache for {name}: {error!r}") from error
    for layer in layers:
        if type(layer) is not StaticLayer:
            raise UnsupportedModelError(f"{name} has layers with a {type(layer).__name__}, which are not attention")
    return devices[0]


def _in_evaluation(model: PreTrainedModel) -> None:
    if model.training:
        raise ConfigError("the model is in training mode: call model.eval() first")


def _weights(model: PreTrainedModel) -> tuple[Any, ...]:
    """The weights' addresses, which a graph reads even after the caller has replaced the weights."""
    return tuple((weight.data_ptr(), weight.dtype) for weight in itertools.chain(model.parameters(), model.buffers()))


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
