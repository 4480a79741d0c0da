"""What a call of ``generate`` may ask for, checked. Knows the model's config; knows no tensor of a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.errors import InvalidRequestError, PromptTooLongError
from cbatch.sampling_params import NEUTRAL, NEUTRAL_SAMPLING

_NEUTRAL = NEUTRAL | {
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "max_time": None,
}
_NEUTRAL_SAMPLING = NEUTRAL_SAMPLING | {"min_p": None}
_NEW_TOKENS, _TOP_K = 20, 50  # where neither the call nor the model says: transformers' own defaults
_COLDEST = 1e-30  # a logit divided by less may be no float32 any more, and then every token is token 0


@dataclass(frozen=True)
class Choice:
    """How the next tokens are chosen. A captured step has all of this baked in."""

    do_sample: bool
    temperature: float
    top_k: int  # 0: all
    top_p: float
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None  # None: no end of sequence, so nothing is padded


def resolve(
    generation_config: Any,
    vocab_size: int,
    *,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> Choice:
    """What a call asks for. None anywhere: what the model's ``generation_config`` says.

    Raises InvalidRequestError with the value and the limit.
    """

    def given(name: str, default: Any) -> Any:
        value = getattr(generation_config, name, None)
        return default if value is None else value

    num_beams = given("num_beams", 1) if num_beams is None else num_beams
    _integer("num_beams", num_beams, 1)

    asked = {
        name: value
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
        if value is not None
    }
    if do_sample is None:
        do_sample = bool(asked) or bool(given("do_sample", False))
    elif not isinstance(do_sample, bool):
        raise InvalidRequestError(f"do_sample is {do_sample!r}, but must be True, False or None")
    if asked and not do_sample:
        wish = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise InvalidRequestError(f"{wish} with do_sample=False: without sampling it would change nothing")
    temperature = given("temperature", 1.0) if temperature is None else temperature
    top_k = given("top_k", _TOP_K) if top_k is None else top_k
    top_p = given("top_p", 1.0) if top_p is None else top_p
    if do_sample:
        _number("temperature", temperature, above=_COLDEST, hint="; do_sample=False is greedy")
        _integer("top_k", top_k, 0)
        _number("top_p", top_p, above=0.0, most=1.0)
    for name, neutral in (_NEUTRAL | _NEUTRAL_SAMPLING if do_sample else _NEUTRAL).items():
        value = getattr(generation_config, name, None)
        if value is not None and value != neutral:
            raise InvalidRequestError(
                f"the model's generation_config asks for {name}={value!r}, which is not supported here: set it to "
                f"{neutral!r} in model.generation_config"
            )

    length_penalty = given("length_penalty", 1.0) if length_penalty is None else length_penalty
    _number("length_penalty", length_penalty)
    early_stopping = given("early_stopping", False) if early_stopping is None else early_stopping
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise InvalidRequestError(f"early_stopping is {early_stopping!r}, but must be True, False or 'never'")

    eos = given("eos_token_id", ()) if eos_token_id is None else eos_token_id
    eos = eos if isinstance(eos, Sequence) and not isinstance(eos, (str, bytes)) else [eos]
    for token in eos:
        _token("eos_token_id", token, vocab_size)
    eos_ids = tuple(dict.fromkeys(eos))
    if pad_token_id is None:
        pad_token_id = given("pad_token_id", None)
    if pad_token_id is None and eos_ids:
        pad_token_id = eos_ids[0]
    if pad_token_id is not None:
        _token("pad_token_id", pad_token_id, vocab_size)
    if num_beams > 1 and vocab_size < max(2, 1 + len(eos_ids)):
        raise InvalidRequestError(f"num_beams={num_beams} with {len(eos_ids)} stop tokens of {vocab_size} tokens")
    return Choice(
        do_sample,
        float(temperature) if do_sample else 1.0,
        top_k if do_sample else 0,
        float(top_p) if do_sample else 1.0,
        num_beams,
        float(length_penalty),
        early_stopping,
        eos_ids,
        pad_token_id,
    )


def token_limit(generation_config: Any, max_new_tokens: int | None, prompt_len: int) -> int:
    """How many new tokens: the call's word, else the config's, else what its ``max_length`` leaves, else 20.

    Raises InvalidRequestError, and PromptTooLongError where ``max_length`` leaves none.
    """
    if max_new_tokens is None:
        max_new_tokens = getattr(generation_config, "max_new_tokens", None)
    max_length = getattr(generation_config, "max_length", None)
    if max_new_tokens is None and max_length is not None:
        _integer("max_length of the model's generation_config", max_length, 1)
        if prompt_len >= max_length:
            raise PromptTooLongError(
                f"a prompt of {prompt_len} tokens, but the model's generation_config has max_length={max_length}: "
                "give max_new_tokens"
            )
        return max_length - prompt_len
    max_new_tokens = _NEW_TOKENS if max_new_tokens is None else max_new_tokens
    _integer("max_new_tokens", max_new_tokens, 1)
    return max_new_tokens


def _integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name} is {value!r}, but must be a whole number of at least {least}")


def _number(name: str, value: Any, *, above: float = -math.inf, most: float = math.inf, hint: str = "") -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not real or not above < value <= most:
        limits = [f"above {above:g}"] if above > -math.inf else []
        limits += [f"at most {most:g}"] if most < math.inf else []
        limit = " and ".join(limits) or "finite"
        raise InvalidRequestError(f"{name} is {value!r}, but must be a number, {limit}{hint}")


def _token(name: str, value: Any, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise InvalidRequestError(f"{name} is {value!r}, but tokens are whole numbers from 0 to {vocab_size - 1}")
