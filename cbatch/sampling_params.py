"""How one request wants its tokens. Names, defaults and ranges are vLLM's. Knows nothing of models, tensors or text.

``python -m cbatch.sampling_params`` prints the table of parameters, which is ``docs/sampling-parameters.md``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from cbatch import sampling_checks as check
from cbatch.errors import InvalidRequestError, short
from cbatch.kernels.slot_layout import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_BIASES

_MAX_N = 16_384  # vLLM's, too
MAX_LOGPROBS = 20  # the most that a step hands out for a token, beside the sampled one

_T = TypeVar("_T")


class RequestOutputKind(enum.Enum):
    """What a streaming consumer gets: everything so far, what is new, or the end only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must be, from its first character to its last. One of the first five; names are vLLM's.

    Needs the extra ``grammar`` (`llguidance <https://github.com/guidance-ai/llguidance>`_), whose ``docs`` say which
    keywords of JSON Schema, which regular expressions and which grammars there are. What it cannot do is refused when
    a request is submitted. Each text has at most 100,000 characters, the texts of a choice 1,000,000 together.

    Args:
        json: a JSON schema, as a dict or as its text; a text is what is kept.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's ``regex``.
        choice: texts, one of which is the answer.
        grammar: a context-free grammar, in Lark's syntax or GBNF.
        json_object: True for a JSON object of any kind.
        whitespace_pattern: with JSON, a regular expression of the space that may stand between tokens of JSON.
        disable_any_whitespace: with JSON, no such space at all.

    Raises:
        InvalidRequestError: none or several of the five, or a value of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        check.all_fields(self, _STRUCTURE_CHECKS, "structured_outputs.")
        given = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}, but must have exactly one of "
                f"{', '.join(_STRUCTURES)}"
            )
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise InvalidRequestError(f"structured_outputs.{name} is for JSON, but the answer is a {given[0]}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidRequestError("structured_outputs has whitespace_pattern beside disable_any_whitespace")


_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")

_STRUCTURE_CHECKS: dict[str, check.Check] = {
    "json": check.schema,
    "regex": check.text,
    "choice": check.choice,
    "grammar": check.text,
    "json_object": check.true,
    "whitespace_pattern": check.text,
    "disable_any_whitespace": check.flag,
}


# Takes the token ids of an answer so far and the logits [vocab_size] behind them, or the prompt's, the answer's and
# the logits; gives back the logits to sample from.
LogitsProcessor = Callable[..., Any]


def _field(default: _T, limits: str, help: str) -> _T:
    """A parameter with its row of the table."""
    return dataclasses.field(default=default, metadata={"limits": limits, "help": help})


def _required(limits: str, help: str) -> Any:
    return dataclasses.field(metadata={"limits": limits, "help": help})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop and what to return. Immutable, so one object may serve many requests.

    ``docs/sampling-parameters.md`` has meaning and range of each field. Lists become tuples, and a dict a tuple of
    pairs. Any other name raises ``TypeError``: nothing is accepted and then ignored.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; the message says which.
    """

    n: int = _field(
        1,
        f"1 to {_MAX_N:,}; 1 at temperature 0",
        "Answers to one prompt, sampled independently: number i, counted from 0, draws as a single request with "
        "`seed + i` would. The sum wraps around from the largest seed to the smallest, and may be -1.",
    )
    temperature: float = _field(
        1.0,
        "at least 0, finite",
        "0 is greedy: always the most likely token. 1 samples from the model's own distribution.",
    )
    top_k: int = _field(
        0,
        "at least 1; 0 or -1 for no limit",
        "Keep the k most likely tokens. More than the vocabulary keeps all; 1 is greedy.",
    )
    top_p: float = _field(
        1.0, "above 0, at most 1", "Keep the most likely tokens whose probabilities add up to it; 1 keeps all."
    )
    min_p: float = _field(
        0.0, "0 to 1", "Keep tokens that have at least this share of the most likely one's probability; 0 keeps all."
    )
    repetition_penalty: float = _field(
        1.0,
        "above 0, finite",
        "Divides the positive and multiplies the negative logits of tokens in prompt or answer; above 1 repeats less.",
    )
    presence_penalty: float = _field(0.0, "-2 to 2", "Subtracted from the logit of each token in the answer.")
    frequency_penalty: float = _field(
        0.0, "-2 to 2", "Subtracted from a token's logit once for each occurrence in the answer."
    )
    seed: int | None = _field(
        None,
        "64 bits, signed; None or -1 for a fresh one",
        "A seed draws the same tokens from the same logits, in any batch, on either schedule and after a preemption. "
        "In 16 bits, logits can differ by rounding between batches of different sizes.",
    )
    max_tokens: int | None = _field(
        16, "at least 1; None for as many as fit", "Most tokens of an answer. `max_model_len` is a limit, too."
    )
    min_tokens: int = _field(
        0,
        "0 to `max_tokens`, and to what `max_model_len` leaves behind the prompt",
        "Tokens that an answer must have before an end of sequence, a stop token or a stop string can end it.",
    )
    ignore_eos: bool = _field(
        False,
        "True, False",
        "Do not stop at the model's end-of-sequence tokens. Those in `stop_token_ids` still stop.",
    )
    stop_token_ids: Sequence[int] = _field(
        (),
        f"a list of token ids, {check.MAX_IDS:,} at most",
        "Further tokens that end an answer. The last token is in `token_ids`, but in `text` only with "
        "`include_stop_str_in_output`.",
    )
    stop: Sequence[str] | str | None = _field(
        (),
        f"a text or a list of them, none empty, {check.MAX_CHARS:,} characters together; needs a tokenizer",
        "Texts that end an answer; they may span tokens, and the prompt does not count. `text` ends before the first "
        "one found, `token_ids` with the token that completed it. A stream holds back text that may become one.",
    )
    include_stop_str_in_output: bool = _field(
        False,
        "True, False",
        "Include the stop string or stop token in `text`. A special token is still left out unless "
        "`skip_special_tokens` is False.",
    )
    bad_words: Sequence[str] = _field(
        (),
        f"a list of texts, none empty; {MAX_BAD_WORDS} token sequences of {MAX_BAD_WORD_LEN} tokens; needs a tokenizer",
        "Texts whose token sequences are forbidden, both as at the start of a text and as behind a space: the last "
        "token is impossible if the answer ends with the others.",
    )
    allowed_token_ids: Sequence[int] | None = _field(
        None,
        f"a list of token ids, not empty, {check.MAX_IDS:,} at most; None for all",
        "All other tokens are impossible.",
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _field(
        (),
        f"token id: -{check.MAX_BIAS:.0f} to {check.MAX_BIAS:.0f}; {MAX_BIASES:,} of them",
        "Added to the logits of these tokens. A dict, kept as pairs.",
    )
    logprobs: int | None = _field(
        None,
        f"0 to {MAX_LOGPROBS}",
        "For each token of an answer, the log-probabilities of the sampled token and of this many most likely ones, "
        "from the model's logits before any parameter changes them.",
    )
    structured_outputs: StructuredOutputsParams | None = _field(  # noqa: RUF009 - the default is None
        None,
        "a StructuredOutputsParams; needs `cbatch[grammar]`, and a fast tokenizer",
        "The answer's form: JSON of a schema, a regular expression, a choice, a grammar. An end of sequence is allowed "
        "only if the answer is complete, and comes if nothing else is allowed, whatever other parameters say; "
        "`min_tokens` delays it until then. `max_tokens`, a stop string or a stop token may cut the answer short. "
        "With `ignore_eos`, ends of sequence follow the answer.",
    )
    logits_processors: Sequence[LogitsProcessor] | None = _field(
        None,
        f"functions of 2 or 3 arguments, {check.MAX_PROCESSORS:,} at most; None for none",
        "Each gets the answer's token ids and the next token's logits, a float32 tensor `[vocab_size]` on the model's "
        "device that it may change in place; with three arguments, the prompt's token ids come first. It returns the "
        "new logits. Processors run before all other parameters, in the engine's threads. One that raises, returns "
        "something else, leaves no token that other parameters allow, or waits for a request of its own engine, ends "
        "its request with an error. NaN gives meaningless tokens.",
    )
    prompt_logprobs: int | None = _field(
        None,
        f"0 to {MAX_LOGPROBS}",
        "The same for each token of the prompt but the first, in `RequestOutput.prompt_logprobs`: for the prompt's "
        "token and this many most likely ones. Computed once for all `n` answers.",
    )
    detokenize: bool = _field(
        True, "True, False", "Make text. False saves the consumer's time if only tokens are wanted."
    )
    skip_special_tokens: bool = _field(True, "True, False", "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = _field(
        True, "True, False", "Put spaces between special tokens in the text, if the tokenizer does."
    )
    output_kind: RequestOutputKind = _field(  # noqa: RUF009 - an enum's member does not change
        RequestOutputKind.CUMULATIVE,
        "a RequestOutputKind",
        "What the outputs of a stream hold: everything so far, what is new (`DELTA`), or only one output with all "
        "(`FINAL_ONLY`).",
    )

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        for name in fields.keys() - _CHECKS.keys():
            near = difflib.get_close_matches(name, _CHECKS, 1)
            hint = _ELSEWHERE.get(name) or (f"did you mean {near[0]}?" if near else "see docs/sampling-parameters.md")
            raise TypeError(f"SamplingParams has no {name}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check.all_fields(self, _CHECKS)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequestError(f"n={self.n} at temperature=0 gives the same answer each time: it must be 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is out of range: it must be at most max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop={short(list(self.stop))} needs text to look in, so detokenize=False is impossible"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_generation_config(cls, generation_config: Any) -> SamplingParams:
        """The parameters of a model's ``generation_config``, for requests without any.

        As in vLLM, fields that it leaves out keep our defaults. A plain ``do_sample=False`` means greedy.

        Raises:
            InvalidRequestError: it asks for something unsupported (beams, n-gram bans ...) or contradicts itself. Pass
                a ``SamplingParams`` instead.
        """

        def given(name: str) -> Any:
            return getattr(generation_config, name, None)

        for name, neutral in ({"num_beams": 1} | NEUTRAL | NEUTRAL_SAMPLING).items():
            if given(name) not in (None, neutral, []):
                raise InvalidRequestError(
                    f"the model's generation_config asks for {name}={given(name)!r}, which is not supported: "
                    "pass SamplingParams to say how to sample"
                )
        # What is called max_tokens here is called max_new_tokens there.
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens")
        fields = {name.replace("new_", ""): value for name in names if (value := given(name)) is not None}
        if given("do_sample") is False:
            fields |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        try:
            return cls(**fields)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"the model's generation_config: {error}: pass SamplingParams to say how to sample"
            ) from None


# Two checks need classes of this file; `sampling_checks.py` knows none.
def _structure(name: str, value: Any) -> StructuredOutputsParams | None:
    if value is not None and not isinstance(value, StructuredOutputsParams):
        raise InvalidRequestError(
            f"{name}={short(value)} must be a StructuredOutputsParams, not {type(value).__name__}"
        )
    return value


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise InvalidRequestError(f"{name}={short(value)} must be a RequestOutputKind")
    return value


_CHECKS: dict[str, check.Check] = {
    "n": check.in_range(check.whole, 1, _MAX_N),
    "temperature": check.temperature,
    "top_k": check.top_k,
    "top_p": check.top_p,
    "min_p": check.in_range(check.real, 0, 1),
    "repetition_penalty": check.factor,
    "presence_penalty": check.in_range(check.real, -2, 2),
    "frequency_penalty": check.in_range(check.real, -2, 2),
    "seed": check.seed,
    "max_tokens": check.in_range(check.whole, 1, or_none=True),
    "min_tokens": check.in_range(check.whole, 0),
    "ignore_eos": check.flag,
    "stop_token_ids": check.token_ids,
    "stop": check.stop,
    "include_stop_str_in_output": check.flag,
    "bad_words": check.texts(check.MAX_CHARS),
    "allowed_token_ids": check.allowed_token_ids,
    "logit_bias": check.logit_bias,
    "logprobs": check.in_range(check.whole, 0, MAX_LOGPROBS, or_none=True),
    "structured_outputs": _structure,
    "logits_processors": check.processors,
    "prompt_logprobs": check.in_range(check.whole, 0, MAX_LOGPROBS, or_none=True),
    "detokenize": check.flag,
    "skip_special_tokens": check.flag,
    "spaces_between_special_tokens": check.flag,
    "output_kind": _output_kind,
}


_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...)) searches with beams"
_STRUCTURE = "use structured_outputs=StructuredOutputsParams(json=...), or regex, choice, grammar, json_object"
_OF_A_REQUEST = "it is an argument of generate and submit"
# Hints for names from earlier releases of vLLM, from OpenAI and from transformers.
_ELSEWHERE = {
    "best_of": "use n with logprobs=0, and take the answers with the largest cumulative_logprob",
    **dict.fromkeys(("use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping"), _BEAMS),
    **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex", "guided_choice"), _STRUCTURE),
    **dict.fromkeys(("guided_grammar", "guided_json_object", "response_format"), _STRUCTURE),
    **dict.fromkeys(("priority", "timeout_s", "cache_salt", "request_id"), _OF_A_REQUEST),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length"), "use max_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "use stop"),
    "truncate_prompt_tokens": "pass the last token ids of the prompt as prompt_token_ids",
    "min_new_tokens": "use min_tokens",
    "num_return_sequences": "use n",
    "do_sample": "temperature=0 is greedy, everything above samples",
    "eos_token_id": "use stop_token_ids, and ignore_eos for the model's own",
    "top_logprobs": "use logprobs",
    "no_repeat_ngram_size": "it can be written as a function for logits_processors",
    "stream": "AsyncLLM.generate streams, and output_kind says what",
}

# Further options of a generation_config that change tokens, with their neutral values. transformers' `generate` heeds
# them, so other values are refused, not ignored.
NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "token_healing": False,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
    "watermarking_config": None,
    "stop_strings": None,
    "num_return_sequences": 1,
}
NEUTRAL_SAMPLING: dict[str, Any] = {  # those that matter only when sampling
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}


@dataclass(frozen=True)
class BeamSearchParams:
    """The parameters of a beam search: vLLM's names with transformers' meaning.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; the message says which.
    """

    beam_width: int = _required(
        f"1 to {MAX_LOGPROBS}, less the number of end-of-sequence tokens",
        "Running beams, and answers returned: transformers' `num_beams`.",
    )
    max_tokens: int = _required("at least 1", "Most tokens of an answer. `max_model_len` is a limit, too.")
    ignore_eos: bool = _field(False, "True, False", "Do not end a beam at the model's end-of-sequence tokens.")
    temperature: float = _field(0.0, "0", "There is nothing to sample.")
    length_penalty: float = _field(
        1.0,
        "finite",
        "A finished beam's score is its log-probability over the length of the answer, with the end-of-sequence token "
        "and without the prompt, to the power of this. Above 0 favours long answers, below 0 short ones.",
    )
    include_stop_str_in_output: bool = _field(
        False, "True, False", "Include the end-of-sequence token, which is always in `token_ids`, in `text`."
    )
    early_stopping: bool | str = _field(
        False,
        '`True`, `False`, `"never"`',
        "When `beam_width` beams have finished: True stops; False goes on while a running beam, at its present length, "
        'scores better than the worst of them; "never" goes on while it may still come to (with a positive '
        "`length_penalty`, at the full length).",
    )

    def __post_init__(self) -> None:
        check.all_fields(self, _BEAM_CHECKS)


_BEAM_CHECKS: dict[str, check.Check] = {
    "beam_width": check.in_range(check.whole, 1, MAX_LOGPROBS),
    "max_tokens": check.in_range(check.whole, 1),
    "ignore_eos": check.flag,
    "temperature": check.zero,
    "length_penalty": check.real,
    "include_stop_str_in_output": check.flag,
    "early_stopping": check.early_stopping,
}


def table() -> str:
    """The parameters as a page of Markdown."""
    return f"{_TABLE_HEAD}{_rows(SamplingParams)}{_BEAM_HEAD}{_rows(BeamSearchParams)}"


def _rows(params: type) -> str:
    return "".join(
        f"| `{field.name}` | {_default(field.default)} | {field.metadata['limits']} | {field.metadata['help']} |\n"
        for field in dataclasses.fields(params)
    )


_TABLE_HEAD = """# Sampling parameters

The fields of `cbatch.SamplingParams`, generated by `python -m cbatch.sampling_params`. A value out of range is refused
by the constructor, or by `submit` if the range depends on the model; the error has name, value and limit.

Logits are changed in this order: `logits_processors`, `structured_outputs`, `allowed_token_ids`, `bad_words`,
`min_tokens`, `logit_bias`, `repetition_penalty`, `presence_penalty` and `frequency_penalty`, `temperature`, `top_k`,
`top_p`, `min_p`.

| parameter | default | range | meaning |
|---|---|---|---|
"""


_BEAM_HEAD = """
## Beam search

The fields of `cbatch.BeamSearchParams`, for `LLM.beam_search`. Scores and rules are those of transformers'
`generate(num_beams=...)`.

| parameter | default | range | meaning |
|---|---|---|---|
"""


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    return f"`{value if isinstance(value, enum.Enum) else repr(value)}`"


if __name__ == "__main__":
    print(table(), end="")
