"""Checks the arguments of ``generate``. Knows the model's generation config; knows no tensor of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cbatch.errors import InvalidRequestError, PromptTooLongError
from cbatch.sampling_checks import in_range, real, whole
from cbatch.sampling_checks import top_p as check_top_p
from cbatch.sampling_params import NEUTRAL, NEUTRAL_SAMPLING

_NEUTRAL = NEUTRAL | {
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "max_time": None,
}
_NEUTRAL_SAMPLING = NEUTRAL_SAMPLING | {"min_p": 0.0}
_NEW_TOKENS, _TOP_K = 20, 50  # transformers' defaults, if neither the call nor the model sets them
_MIN_TEMPERATURE = 1e-30  # a logit divided by less may overflow float32, and then every token is token 0


@dataclass(frozen=True)
class Choice:
    """How the next tokens are chosen. A captured step is specific to it."""

    do_sample: bool
    temperature: float
    top_k: int  # 0: all
    top_p: float
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None  # None: no end of sequence, so nothing is padded


def resolve(generation_config: Any, vocab_size: int, **given: Any) -> Choice:
    """The choice of a call's options, ``given`` as to ``generate``; None: from the model's ``generation_config``.

    Raises InvalidRequestError with the value and the limit.
    """

    def setting(name: str, default: Any) -> tuple[str, Any]:
        """The option's name for an error, with its origin, and its value."""
        value = given.get(name)
        if value is None and (value := getattr(generation_config, name, None)) is not None:
            return f"{name} of the model's generation_config", value
        return name, default if value is None else value

    num_beams = in_range(whole, 1)(*setting("num_beams", 1))

    asked = {name: given[name] for name in ("temperature", "top_k", "top_p") if given.get(name) is not None}
    do_sample = given.get("do_sample")
    if do_sample is None:
        do_sample = bool(asked) or bool(setting("do_sample", False)[1])
    elif not isinstance(do_sample, bool):
        raise InvalidRequestError(f"do_sample is {do_sample!r}, but must be True, False or None")
    if asked and not do_sample:
        wish = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise InvalidRequestError(f"{wish} with do_sample=False: without sampling it would change nothing")
    temperature, top_k, top_p = 1.0, 0, 1.0
    if do_sample:
        name, value = setting("temperature", 1.0)
        if (temperature := real(name, value)) <= _MIN_TEMPERATURE:
            raise InvalidRequestError(f"{name}={value!r} must be above {_MIN_TEMPERATURE:g}; do_sample=False is greedy")
        top_k = in_range(whole, 0)(*setting("top_k", _TOP_K))
        top_p = check_top_p(*setting("top_p", 1.0))
    for name, neutral in (_NEUTRAL | _NEUTRAL_SAMPLING if do_sample else _NEUTRAL).items():
        value = getattr(generation_config, name, None)
        if value not in (None, neutral, []):
            raise InvalidRequestError(
                f"the model's generation_config asks for {name}={value!r}, which is not supported here: set it to "
                f"{neutral!r} in model.generation_config"
            )

    length_penalty = real(*setting("length_penalty", 1.0))
    name, early_stopping = setting("early_stopping", False)
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise InvalidRequestError(f"{name} is {early_stopping!r}, but must be True, False or 'never'")

    name, eos = setting("eos_token_id", ())
    eos = eos if isinstance(eos, Sequence) and not isinstance(eos, (str, bytes)) else [eos]
    in_vocabulary = in_range(whole, 0, vocab_size - 1)
    eos_ids = tuple(dict.fromkeys(in_vocabulary(name, token) for token in eos))
    name, pad = setting("pad_token_id", eos_ids[0] if eos_ids else None)
    pad_token_id = None if pad is None else in_vocabulary(name, pad)
    if num_beams > 1 and vocab_size < max(2, 1 + len(eos_ids)):
        raise InvalidRequestError(f"num_beams={num_beams} with {len(eos_ids)} stop tokens of {vocab_size} tokens")
    return Choice(
        do_sample, temperature, top_k, top_p, num_beams, length_penalty, early_stopping, eos_ids, pad_token_id
    )


def token_limit(generation_config: Any, max_new_tokens: int | None, prompt_len: int) -> int:
    """The number of new tokens: the call's, else the config's, else what its ``max_length`` leaves, else 20.

    Raises InvalidRequestError, and PromptTooLongError if ``max_length`` leaves none.
    """
    name = "max_new_tokens"
    if max_new_tokens is None:
        max_new_tokens = getattr(generation_config, name, None)
        name = f"{name} of the model's generation_config"
    max_length = getattr(generation_config, "max_length", None)
    if max_new_tokens is None and max_length is not None:
        max_length = in_range(whole, 1)("max_length of the model's generation_config", max_length)
        if prompt_len >= max_length:
            raise PromptTooLongError(
                f"a prompt of {prompt_len} tokens, but the model's generation_config has max_length={max_length}: "
                "give max_new_tokens"
            )
        return max_length - prompt_len
    return int(in_range(whole, 1)(name, _NEW_TOKENS if max_new_tokens is None else max_new_tokens))
