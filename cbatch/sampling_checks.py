"""Checks of single parameters: each takes a name and a value, and returns the value to keep.

Owns each kind's range, its plain form (numpy's numbers become Python's, lists tuples), and its error with name, value
and limit. ``sampling_params.py`` maps parameters to checks, and refuses contradictions between parameters;
``limits.py`` refuses what the model or the engine cannot do. Knows no class of parameters.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cbatch.errors import InvalidRequestError, described, short
from cbatch.kernels.slot_layout import MAX_BIASES

_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1  # a signed 64-bit integer, as in torch and vLLM
# Of stop strings together, whose automaton takes 0.2 s and 30 MB; of bad words, which take 0.2 s to tokenise; of a
# schema, a regular expression or a grammar, the worst of which take 1 s to compile.
MAX_CHARS = 100_000
MAX_CHOICE_CHARS = 1_000_000  # together; 0.8 s
MAX_IDS = 500_000  # of a list: 0.2 s; no vocabulary has so many
MAX_PROCESSORS = 1000  # 30 ms to look at their arguments
MAX_BIAS = 100.0  # OpenAI's, which vLLM clamps to

Check = Callable[[str, Any], Any]


def all_fields(params: Any, checks: Mapping[str, Check], prefix: str = "") -> None:
    """Check each field of a frozen dataclass, and keep the checks' results."""
    for name, check in checks.items():
        value = getattr(params, name)
        try:
            object.__setattr__(params, name, check(prefix + name, value))
        except InvalidRequestError:
            raise
        except Exception as error:  # the value's own code fails, in a comparison or its repr
            raise InvalidRequestError(
                f"{prefix}{name} is a {type(value).__name__} that cannot be taken: {described(error)}"
            ) from error


def whole(name: str, value: Any) -> int:
    """A whole number; numpy's are fine, bools and 3.0 are not."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise InvalidRequestError(f"{name}={short(value)} must be an integer, not {type(value).__name__}")
    number = int(value)
    if number.bit_length() > 1024:  # a float's range; Python refuses to print much larger ints
        raise InvalidRequestError(f"{name} is out of range: an integer of {number.bit_length()} bits")
    return number


def real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(f"{name}={short(value)} must be a number, not {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # an int of more than 1,024 bits
        result = math.inf
    if not math.isfinite(result):
        raise InvalidRequestError(f"{name}={result} must be finite")
    return result


def _out_of_range(name: str, value: Any, limits: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={value} is out of range: it must be {limits}")


def in_range(kind: Check, least: float, most: float = math.inf, *, or_none: bool = False) -> Check:
    """The check of a number, ``whole`` or ``real``, from ``least`` to ``most``."""
    limits = f"at least {least}"
    limits += f" and at most {most}" if most < math.inf else ""
    limits += ", or None" if or_none else ""

    def check(name: str, value: Any) -> Any:
        if value is None and or_none:
            return None
        number = kind(name, value)
        if not least <= number <= most:
            raise _out_of_range(name, number, limits)
        return number

    return check


def temperature(name: str, value: Any) -> float:
    number = real(name, value)
    if number < 0:
        raise InvalidRequestError(f"{name}={number} is negative: it must be at least 0 (0 is greedy)")
    return number


def top_k(name: str, value: Any) -> int:
    number = whole(name, value)
    if number < -1:
        raise _out_of_range(name, number, "at least 1, or 0 or -1 for no limit")
    return max(number, 0)


def top_p(name: str, value: Any) -> float:
    number = real(name, value)
    if not 0 < number <= 1:
        raise _out_of_range(name, number, "above 0 and at most 1")
    return number


def factor(name: str, value: Any) -> float:
    number = real(name, value)
    if number <= 0:
        raise _out_of_range(name, number, "above 0 (1 changes nothing)")
    return number


def seed(name: str, value: Any) -> int | None:
    if value is None:
        return None
    number = whole(name, value)
    if not _SEED_MIN <= number <= _SEED_MAX:
        raise InvalidRequestError(
            f"{name}={number} is out of range: it must fit into 64 bits, {_SEED_MIN} to {_SEED_MAX}"
        )
    return None if number == -1 else number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={short(value)} must be True or False")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name}={short(value)} must be a list of token ids, not {type(value).__name__}")
    items = list(itertools.islice(value, MAX_IDS + 1))  # maybe endless
    if len(items) > MAX_IDS:
        raise InvalidRequestError(f"{name} has more than {MAX_IDS} token ids, which is the limit")
    item_name = f"{name} item"
    ids = tuple(whole(item_name, item) for item in items)
    for item in ids:
        if item < 0:
            raise InvalidRequestError(f"{name}={short(items)} holds {item}: a token id is at least 0")
    return ids


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = token_ids(name, value)
    if not ids:
        raise InvalidRequestError(f"{name}=[] allows no token: it must have at least one, or be None for all")
    return tuple(dict.fromkeys(ids))


def texts(limit: int) -> Check:
    """The check of a list of texts, none empty, with so many characters together."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, (tuple, list)):
            raise InvalidRequestError(f"{name}={short(value)} must be a list of strings, not {type(value).__name__}")
        if len(value) > limit:
            raise InvalidRequestError(f"{name} has {len(value)} texts, but the limit is {limit} characters")
        for item in value:
            if not isinstance(item, str):
                raise InvalidRequestError(f"{name}={short(value)} holds {short(item)}: it must hold strings")
            if not item:
                raise InvalidRequestError(f"{name}={short(value)} holds an empty string: each must have a character")
        _limit_chars(name, sum(map(len, value)), limit)
        return tuple(value)

    return check


def stop(name: str, value: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = texts(MAX_CHARS)(name, (value,) if isinstance(value, str) else value)
    return found


def _limit_chars(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} has {count} characters, but the limit is {limit}")


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:  # a dict, or pairs, as SamplingParams keeps them
        items = list(itertools.islice(value.items() if isinstance(value, Mapping) else value, MAX_BIASES + 1))
        biases = dict(items)
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"{name}={short(value)} must be a dict of token ids and numbers, not {type(value).__name__}"
        ) from None
    if len(items) > MAX_BIASES:
        raise InvalidRequestError(f"{name} has more than {MAX_BIASES} tokens, which is the limit")
    pairs = []
    for token, bias in biases.items():
        token, bias = whole(f"{name} token", token), real(f"{name}[{short(token)}]", bias)
        if token < 0:
            raise InvalidRequestError(f"{name} holds token {token}: a token id is at least 0")
        if abs(bias) > MAX_BIAS:
            raise _out_of_range(f"{name}[{token}]", bias, f"at least -{MAX_BIAS:.0f} and at most {MAX_BIAS:.0f}")
        pairs.append((token, bias))
    return tuple(pairs)


def zero(name: str, value: Any) -> float:
    number = real(name, value)
    if number != 0:
        raise _out_of_range(name, number, "0, since beam search does not sample")
    return number


def early_stopping(name: str, value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "never":
        return "never"
    raise InvalidRequestError(f'{name}={short(value)} must be True, False or "never"')


def schema(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        _limit_chars(name, len(text), MAX_CHARS)
        found = json.loads(text)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{name}={short(found)} is no schema: it must be a JSON object")
    return text


def text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{name}={short(value)} must be a string with at least one character, or None")
    _limit_chars(name, len(value or ""), MAX_CHARS)
    return value


def choice(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = texts(MAX_CHOICE_CHARS)(name, value)
    if not items:
        raise InvalidRequestError(f"{name}={short(value)} has no text to choose")
    return tuple(dict.fromkeys(items))


def true(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={short(value)} must be True or None")
    return True if value else None


def processors(name: str, value: Any) -> tuple[Callable[..., Any], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)):
        raise InvalidRequestError(f"{name}={short(value)} must be a list of functions, not {type(value).__name__}")
    if len(value) > MAX_PROCESSORS:
        raise InvalidRequestError(f"{name} has {len(value)} functions, but the limit is {MAX_PROCESSORS}")
    for item in value:
        if not callable(item):
            raise InvalidRequestError(f"{name} holds {short(item)}, which is no function")
        if (count := num_arguments(item)) not in (2, 3):
            raise InvalidRequestError(
                f"{name} holds {short(item)} with {count} arguments: it must take 2 (token ids so far, logits) or 3 "
                "(the prompt's token ids before them)"
            )
    return tuple(value) or None


def num_arguments(processor: Callable[..., Any]) -> int:
    """How many arguments a logits processor takes: 3 if it accepts them, else 2; if neither, its parameters' number."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # a built-in without a signature
        return 2
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return len(signature.parameters)
