"""The offline API: a list of prompts in, a list of outputs back, in order. Knows no device or batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cbatch.engine import Engine
from cbatch.errors import InvalidRequestError
from cbatch.outputs import RequestOutput
from cbatch.progress import stderr_is_terminal, watch
from cbatch.prompts import PromptLike, encode_chat
from cbatch.request import RequestHandle
from cbatch.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Encoded = tuple[str | None, list[int]]  # a prompt's text, if it has one, and its token ids
_BAR_AFTER_S = 1.0  # shorter work shows no progress bar


class LLM:
    """A model that answers many prompts at once.

    Args:
        model: an alias (``"smollm2-135m"``), a folder, a hub name, or a causal LM of transformers in memory.
        tokenizer: a folder, a hub name or a tokenizer. None: the model's own.
        engine_options: the fields of ``EngineConfig`` (``max_num_seqs=...``, ``device=...``, ``schedule=...``).

    Safe to use from many threads at once; their requests run in the same batches. ``close()``, leaving the ``with``
    block, or dropping the last reference ends the engine and gives its memory back.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: the engine cannot be built; the message says why.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **engine_options: Any) -> None:
        self.engine = Engine.from_model(model, tokenizer, **engine_options)
        weakref.finalize(self, Engine.close_soon, self.engine)  # at `del`, and at exit at the latest

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt; the outputs stand in the order of the prompts.

        Args:
            prompts: one prompt or a list of them, each a text, a list of token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``. A flat list of ids is one prompt; ``[]`` gives ``[]``. A dict may have a
                ``"cache_salt"``: cached prefixes are shared with prompts of the same salt only.
            sampling_params: one for all prompts or one for each. None: the model's generation_config.
            priority: one for all or one for each; with ``scheduling_policy="priority"`` the smaller goes first.
            timeout_s: requests that still run after this time end with the ``finish_reason`` ``"timeout"``.
            use_tqdm: show a progress bar. None: if stderr is a terminal and the call takes more than a second.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; the message has its number in the list,
                counted from 0.
            EngineOverloadedError: more prompts than ``max_queue_size`` lets wait.
            CBatchError: a logits processor or the tokenizer failed, or the parameters left no token to go on with.
            EngineDeadError, EngineClosedError: the engine ended before the answers were complete.
            KeyboardInterrupt: from Ctrl-C, at once.

        An error aborts all requests of this call.
        """
        taken = _each("prompt", _listed(prompts), PromptLike)
        params = _one_each(sampling_params, len(taken))
        tokenizer, limit = self.engine.tokenizer, self.engine.config.max_model_len
        encoded = _each("prompt", taken, lambda prompt: (prompt.text, prompt.encode(tokenizer, limit)))
        salts = [prompt.cache_salt for prompt in taken]
        requests = _requests(self.engine.submit, encoded, params, priority, salts, timeout_s)
        return self._run("prompt", encoded, requests, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Searches for the most likely answers of every prompt, in the order of the prompts.

        Each output has ``beam_width`` answers, the best ``score`` first. Other requests run on in the same batches.

        Args:
            prompts: as for ``generate``.
            params: the search's parameters, the same for all prompts.
            priority, timeout_s: as for ``generate``.

        Raises: as ``generate``.
        """
        taken = _each("prompt", _listed(prompts), PromptLike)
        tokenizer, limit = self.engine.tokenizer, self.engine.config.max_model_len
        encoded = _each("prompt", taken, lambda prompt: (prompt.text, prompt.encode(tokenizer, limit)))
        salts = [prompt.cache_salt for prompt in taken]
        submit = self.engine.submit_beam_search
        requests = _requests(submit, encoded, [params] * len(taken), priority, salts, timeout_s)
        return self._run("prompt", encoded, requests, False)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for conversations, written out by the model's chat template.

        Args:
            messages: one conversation, a list of ``{"role": ..., "content": ...}``; or a list of conversations.
            chat_template: a Jinja template instead of the tokenizer's own.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message instead, which the answer then continues (with
                ``add_generation_prompt=False``).
            tools: JSON schemas, or Python functions of which transformers makes schemas.
            chat_template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``.
            priority, cache_salt, timeout_s: as for ``generate``; one salt for all conversations.

        Raises:
            InvalidRequestError: also if there is no chat template, or it uses no tools or no variable of such a name.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidRequestError(
                f"messages must be a conversation, which is a list of dicts, or a list of them, not "
                f"{type(messages).__name__}"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        params = _one_each(sampling_params, len(conversations))
        tokenizer, limit = self.engine.tokenizer, self.engine.config.max_model_len
        encode = partial(
            encode_chat,
            tokenizer,
            max_model_len=limit,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        encoded = _each("conversation", conversations, encode)
        salts = [cache_salt] * len(encoded)
        requests = _requests(self.engine.submit, encoded, params, priority, salts, timeout_s)
        return self._run("conversation", encoded, requests, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, as when weights have changed; see ``Engine.reset_prefix_cache``."""
        self.engine.reset_prefix_cache()

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of prompts and answers, or None."""
        tokenizer: PreTrainedTokenizerBase | None = self.engine.tokenizer
        return tokenizer

    def close(self) -> None:
        """Ends the engine: running requests raise, and its memory is freed. Waits; may be called again."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, kind: str, encoded: Sequence[_Encoded], requests: list[Callable[[], RequestHandle]], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        handles: list[RequestHandle] = []
        try:
            _each(kind, requests, lambda submit: handles.append(submit()))
            if use_tqdm or (use_tqdm is None and stderr_is_terminal()):
                answers = [child for handle in handles for child in handle.children]
                watch(answers, after_s=0.0 if use_tqdm else _BAR_AFTER_S)
            outputs = [handle.result() for handle in handles]
        except BaseException:  # Ctrl-C too
            for handle in handles:
                handle.abort()
            raise
        for output, (text, _) in zip(outputs, encoded, strict=True):
            output.prompt = text
        return outputs


def _each(kind: str, items: Sequence[_Item], function: Callable[[_Item], _Result]) -> list[_Result]:
    """``map`` as a list; if the function refuses one of several items, the error has its number."""
    results = []
    for number, item in enumerate(items):
        try:
            results.append(function(item))
        except InvalidRequestError as error:
            if len(items) > 1:
                error.args = (f"{kind} {number}: {str(error).removeprefix('request: ')}",)
            raise
    return results


def _requests(
    submit: Callable[..., RequestHandle],
    encoded: Sequence[_Encoded],
    params: Sequence[SamplingParams | BeamSearchParams | None],
    priority: int | Sequence[int],
    salts: list[Any],
    timeout_s: float | None,
) -> list[Callable[[], RequestHandle]]:
    """For each prompt the call that submits it."""
    each = list(priority) if isinstance(priority, Sequence) else [priority] * len(salts)
    if len(each) != len(salts):
        raise InvalidRequestError(f"{len(salts)} prompts, but {len(each)} priorities: one each is needed")
    return [
        partial(submit, ids, one, priority=rank, cache_salt=salt, timeout_s=timeout_s)
        for (_, ids), one, rank, salt in zip(encoded, params, each, salts, strict=True)
    ]


def _listed(prompts: Any) -> list[Any]:
    """One prompt or many -> many."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor: one row, or a row a prompt
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    if prompts and not isinstance(prompts[0], (str, Mapping, Sequence)) and not getattr(prompts[0], "ndim", 0):
        return [prompts]  # a flat list of ids; the engine checks them
    return list(prompts)


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence) or any(not isinstance(p, SamplingParams) for p in sampling_params):
        raise InvalidRequestError("sampling_params must be SamplingParams, a list of them, or None")
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts, but {len(sampling_params)} sampling_params: one each is needed"
        )
    return list(sampling_params)
