"""How one request wants its tokens. Names, defaults and ranges are vLLM's. Knows nothing of models, tensors or text.

Only what works stands here: a parameter of vLLM's that cbatch has not learned (``n``, ``min_p``, ``logprobs`` ...) is
no field, so passing it is a ``TypeError`` that names it. Nothing is accepted and then ignored.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cbatch.errors import InvalidRequestError

_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1  # a signed 64-bit integer, as in torch and vLLM


class RequestOutputKind(enum.Enum):
    """What a streaming consumer gets: everything so far, what is new, or the end only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop and what to hand out. Immutable, so one object may serve many requests.

    Args:
        temperature: 0 is greedy; 1 samples from the model's own distribution; finite, at least 0.
        top_k: keep the k most likely tokens; 0 or -1 keep all. More than the vocabulary keeps all too.
        top_p: keep the most likely tokens whose probabilities add up to it; in (0, 1], 1 keeps all.
        seed: signed 64 bits. The same seed gives the same tokens in any batch. None (or -1, as in vLLM): a fresh one.
        max_tokens: most tokens to generate, at least 1. None: as many as ``max_model_len`` leaves room for.
        ignore_eos: do not stop at the model's end-of-sequence tokens (``stop_token_ids`` still stop).
        stop_token_ids: further tokens that end the answer. The one that did is in ``token_ids``, not in the text.
        stop: texts that end the answer, each at least one character; one text or a list. They are looked for in the
            answer only, across tokens. The text ends where the one that came first begins; ``token_ids`` end with the
            token that completed it. A stream holds back what may still become one. Needs a tokenizer.
        include_stop_str_in_output: let the text end with the stop string instead of before it.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all. False saves the consumer's time when only tokens are wanted.
        output_kind: what the outputs of a stream hold.

    Raises:
        InvalidRequestError: a value of the wrong type or out of its range; the message says which.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] | list[str] | str | None = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # frozen for users; here numpy scalars become plain numbers, lists tuples

        temperature = _real("temperature", self.temperature)
        if temperature < 0:
            raise InvalidRequestError(f"temperature={temperature} is negative: it must be at least 0 (0 is greedy)")
        set_field(self, "temperature", temperature)

        top_k = _integer("top_k", self.top_k)
        if top_k < -1:
            raise InvalidRequestError(f"top_k={top_k} is out of range: it must be at least 1, or 0 or -1 for no limit")
        set_field(self, "top_k", max(top_k, 0))

        top_p = _real("top_p", self.top_p)
        if not 0 < top_p <= 1:
            raise InvalidRequestError(f"top_p={top_p} is out of range: it must be above 0 and at most 1")
        set_field(self, "top_p", top_p)

        if self.seed is not None:
            seed = _integer("seed", self.seed)
            if not _SEED_MIN <= seed <= _SEED_MAX:
                raise InvalidRequestError(
                    f"seed={seed} is out of range: it must fit into 64 bits, {_SEED_MIN} to {_SEED_MAX}"
                )
            set_field(self, "seed", None if seed == -1 else seed)

        if self.max_tokens is not None:
            max_tokens = _integer("max_tokens", self.max_tokens)
            if max_tokens < 1:
                raise InvalidRequestError(f"max_tokens={max_tokens} is out of range: it must be at least 1, or None")
            set_field(self, "max_tokens", max_tokens)

        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} must be True or False")

        set_field(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

        stop = _stop(self.stop)
        if stop and not self.detokenize:
            raise InvalidRequestError(f"stop={list(stop)} needs text to look in, so detokenize=False is impossible")
        set_field(self, "stop", stop)

        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_generation_config(cls, generation_config: Any) -> SamplingParams:
        """What a model's ``generation_config`` asks for: the parameters of a request that brings none.

        Read as vLLM reads it: what it leaves out keeps our default. A plain ``do_sample=False`` means greedy.

        Raises:
            InvalidRequestError: it asks for something that cbatch cannot do yet (a repetition penalty, beams ...).
                Pass a ``SamplingParams`` to say what you want instead.
        """
        config = generation_config

        def given(name: str) -> Any:
            return getattr(config, name, None)

        for name, neutral in _NOT_YET.items():
            if given(name) not in (None, neutral):
                raise InvalidRequestError(
                    f"the model's generation_config asks for {name}={given(name)!r}, which is not supported: "
                    "pass SamplingParams to say how to sample"
                )
        fields: dict[str, Any] = {
            ours: given(theirs)
            for ours, theirs in (
                ("temperature", "temperature"),
                ("top_k", "top_k"),
                ("top_p", "top_p"),
                ("max_tokens", "max_new_tokens"),
            )
            if given(theirs) is not None
        }
        if given("do_sample") is False:
            fields |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
        return cls(**fields)


# What else a generation_config may say about which tokens come, with the value that says nothing.
_NOT_YET = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
}


def _integer(name: str, value: Any) -> int:
    """A whole number; numpy's are fine, bools and 3.0 are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # an int of more than 1,024 bits
        result = math.inf
    if not math.isfinite(result):
        raise InvalidRequestError(f"{name}={result} must be finite")
    return result


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"stop_token_ids={value!r} must be a list of token ids, not {type(value).__name__}")
    ids = tuple(_integer("stop_token_ids item", item) for item in value)
    for item in ids:
        if item < 0:
            raise InvalidRequestError(f"stop_token_ids={list(ids)} holds {item}: a token id is at least 0")
    return ids


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        raise InvalidRequestError(f"stop={value!r} must be a string or a list of them, not {type(value).__name__}")
    for item in value:
        if not isinstance(item, str):
            raise InvalidRequestError(f"stop={list(value)!r} holds {item!r}: a stop string must be a string")
        if not item:
            raise InvalidRequestError(f"stop={list(value)!r} holds an empty string: a stop string has a character")
    return tuple(value)
