"""What a call of ``generate`` may ask for, checked. Knows the model's config; knows no tensor of a step."""

from __future__ import annotations

import math
import numbers
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

    def said(name: str, value: Any, default: Any) -> tuple[str, Any]:
        """A value, behind its name and where it comes from, for an error."""
        if value is None and (value := getattr(generation_config, name, None)) is not None:
            return f"{name} of the model's generation_config", value
        return name, default if value is None else value

    num_beams = _integer(*said("num_beams", num_beams, 1), 1)

    asked = {
        name: value
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
        if value is not None
    }
    if do_sample is None:
        do_sample = bool(asked) or bool(said("do_sample", None, False)[1])
    elif not isinstance(do_sample, bool):
        raise InvalidRequestError(f"do_sample is {do_sample!r}, but must be True, False or None")
    if asked and not do_sample:
        wish = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise InvalidRequestError(f"{wish} with do_sample=False: without sampling it would change nothing")
    if do_sample:
        hint = "; do_sample=False is greedy"
        temperature = _number(*said("temperature", temperature, 1.0), above=_COLDEST, hint=hint)
        top_k = _integer(*said("top_k", top_k, _TOP_K), 0)
        top_p = _number(*said("top_p", top_p, 1.0), above=0.0, most=1.0)
    else:
        temperature, top_k, top_p = 1.0, 0, 1.0
    for name, neutral in (_NEUTRAL | _NEUTRAL_SAMPLING if do_sample else _NEUTRAL).items():
        value = getattr(generation_config, name, None)
        if value is not None and value != neutral:
            raise InvalidRequestError(
                f"the model's generation_config asks for {name}={value!r}, which is not supported here: set it to "
                f"{neutral!r} in model.generation_config"
            )

    length_penalty = _number(*said("length_penalty", length_penalty, 1.0))
    name, early_stopping = said("early_stopping", early_stopping, False)
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise InvalidRequestError(f"{name} is {early_stopping!r}, but must be True, False or 'never'")

    name, eos = said("eos_token_id", eos_token_id, ())
    eos = eos if isinstance(eos, Sequence) and not isinstance(eos, (str, bytes)) else [eos]
    eos_ids = tuple(dict.fromkeys(_token(name, token, vocab_size) for token in eos))
    name, pad = said("pad_token_id", pad_token_id, eos_ids[0] if eos_ids else None)
    pad_token_id = None if pad is None else _token(name, pad, vocab_size)
    if num_beams > 1 and vocab_size < max(2, 1 + len(eos_ids)):
        raise InvalidRequestError(f"num_beams={num_beams} with {len(eos_ids)} stop tokens of {vocab_size} tokens")
    return Choice(
        do_sample,
        temperature,
        top_k,
        top_p,
        num_beams,
        length_penalty,
        early_stopping,
        eos_ids,
        pad_token_id,
    )


def token_limit(generation_config: Any, max_new_tokens: int | None, prompt_len: int) -> int:
    """How many new tokens: the call's word, else the config's, else what its ``max_length`` leaves, else 20.

    Raises InvalidRequestError, and PromptTooLongError where ``max_length`` leaves none.
    """
    name = "max_new_tokens"
    if max_new_tokens is None:
        max_new_tokens = getattr(generation_config, name, None)
        name = f"{name} of the model's generation_config"
    max_length = getattr(generation_config, "max_length", None)
    if max_new_tokens is None and max_length is not None:
        max_length = _integer("max_length of the model's generation_config", max_length, 1)
        if prompt_len >= max_length:
            raise PromptTooLongError(
                f"a prompt of {prompt_len} tokens, but the model's generation_config has max_length={max_length}: "
                "give max_new_tokens"
            )
        return max_length - prompt_len
    return _integer(name, _NEW_TOKENS if max_new_tokens is None else max_new_tokens, 1)


# ---- one check a kind: takes a name and a value, gives back a plain number; numpy's are fine, as in SamplingParams


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise InvalidRequestError(f"{name} is {value!r}, but must be a whole number of at least {least}")
    return int(value)


def _number(name: str, value: Any, *, above: float = -math.inf, most: float = math.inf, hint: str = "") -> float:
    try:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        number = float(value) if real else math.nan
    except OverflowError:  # a whole number that no float holds
        number = math.inf
    if not (math.isfinite(number) and above < number <= most):
        limits = [f"above {above:g}"] if above > -math.inf else []
        limits += [f"at most {most:g}"] if most < math.inf else []
        limit = " and ".join(limits) or "finite"
        raise InvalidRequestError(f"{name} is {value!r}, but must be a number, {limit}{hint}")
    return number


def _token(name: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < vocab_size:
        raise InvalidRequestError(f"{name} is {value!r}, but tokens are whole numbers from 0 to {vocab_size - 1}")
    return int(value)
