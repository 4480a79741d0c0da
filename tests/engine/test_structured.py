"""Answers under a grammar: the tokens of a plain loop, valid whatever happens beside them, and neighbours as alone."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import CBatchError, InvalidRequestError
from cbatch.grammar import Grammars
from cbatch.kernels.reference import gumbel
from cbatch.llm import LLM
from cbatch.request import RequestHandle
from cbatch.sampling_params import SamplingParams, StructuredOutputsParams
from tests.api.tiny import byte_level, sentencepiece_like
from tests.counting import CountingModel, counted

llguidance = pytest.importorskip("llguidance", reason="the extra grammar is not installed")

VOCAB_SIZE = 357  # more than the tokenizer has, and no multiple of 32
EOS = 1
SCHEDULES = [{"schedule": "sync"}, {"schedule": "async"}, {"schedule": "async", "depth": 4}]
everywhere = pytest.mark.parametrize("options", SCHEDULES, ids=["sync", "async", "deep"])
TIGHT = {"num_blocks": 40}
PROMPTS = [[3, 1, 4], [100, 200, 30, 40, 50, 60, 70, 80, 90], [7] * 5]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'start: item ("," item)*\nitem: /[a-z]{1,3}/ | "(" start ")"'
GBNF = 'root ::= "(" root ")" | [0-9]+'


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountingModel, "default_device", request.param)
        patch.setenv("CBATCH_DEBUG", "1")  # counts blocks and slots after every step
        yield request.param


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level()


@pytest.fixture(scope="module")
def model(device: str) -> nn.Module:
    return tiny(VOCAB_SIZE).to(device)  # type: ignore[arg-type]


def tiny(vocab_size: int) -> LlamaForCausalLM:
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


def start(model: nn.Module, tokenizer: Any, **options: Any) -> Engine:
    defaults = {"max_num_seqs": 16, "block_size": 4, "num_blocks": 1200, "max_num_batched_tokens": 64}
    return Engine.from_model(model, tokenizer, **{**defaults, "model_impl": "transformers", **options})


def answer(handle: RequestHandle) -> Any:
    return handle.result(120).outputs[0]


def validate(text: str, schema: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema").validate(json.loads(text), schema)


def tokens(handle: RequestHandle) -> list[int]:
    return answer(handle).token_ids


# ---- the oracle: a plain loop over forwards, the library's mask, and the parameters in vLLM's order


class Loop:
    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerFast, eos: int = EOS) -> None:
        self.model, self.eos = model, eos
        self.tokens = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[eos])

    def run(self, prompt: list[int], params: SamplingParams, grammar: str | None) -> list[int]:
        matcher = grammar and llguidance.LLMatcher(self.tokens, grammar)
        known, device = list(prompt), next(self.model.parameters()).device
        assert params.max_tokens is not None
        while len(known) < len(prompt) + params.max_tokens:
            with torch.no_grad():
                logits = self.model(torch.tensor([known], device=device)).logits[0, -1].float()
            known.append(self.draw(logits, known, len(prompt), params, matcher))
            if known[-1] == self.eos and not params.ignore_eos:
                break
            if matcher:
                assert matcher.consume_token(known[-1])
        return known[len(prompt) :]

    def draw(self, logits: Tensor, known: list[int], prompt_len: int, params: SamplingParams, matcher: Any) -> int:
        out = known[prompt_len:]
        if matcher:
            allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(allowed, bitorder="little")[: len(logits)]
            if len(out) < params.min_tokens and bits.sum() > 1:
                bits = np.where(np.arange(len(bits)) == self.eos, 0, bits)
            logits[torch.from_numpy(bits == 0).to(logits.device)] = -torch.inf
        for keep in [params.allowed_token_ids] if params.allowed_token_ids is not None else []:
            others = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            others[list(keep)] = False
            logits[others] = -torch.inf
        for token, bias in params.logit_bias:
            logits[token] += bias
        seen, times = sorted(set(known)), torch.bincount(torch.tensor(out, dtype=torch.long), minlength=len(logits))
        repeated = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(repeated > 0, repeated / factor, repeated * factor)
        times = times.to(logits.device)
        logits = logits - (times * params.frequency_penalty + (times > 0) * params.presence_penalty)
        if params.temperature == 0:
            return int(logits.argmax())
        assert params.seed is not None and not params.top_k and params.top_p == 1 and not params.min_p
        seed = torch.from_numpy(np.array([[params.seed]], np.uint64).view(np.int32))
        noise = gumbel(seed, torch.tensor([len(known)], dtype=torch.int32), len(logits))[0].to(logits.device)
        return int((noise * params.temperature + logits).argmax())


def grammar_of(asked: StructuredOutputsParams) -> str:
    if asked.json is not None:
        flexible = {"whitespace_flexible": not asked.disable_any_whitespace}
        text = "start: %json " + json.dumps({**json.loads(str(asked.json)), "x-guidance": flexible})
    elif asked.regex is not None:
        text = f"start: /{asked.regex}/"
    else:
        text = llguidance.grammar_from("choice", asked.choice) if asked.choice else LIST
    return f'{text}\n%llguidance {{"no_forcing": true}}'


@pytest.fixture(scope="module")
def expected(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts with parameters, and what the loop makes of them; every third has no grammar."""
    loop = Loop(model, tokenizer)
    tight = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    kinds: list[tuple[StructuredOutputsParams | None, dict[str, Any]]] = [
        (tight, {"temperature": 0.0}),
        (StructuredOutputsParams(json=PERSON), {"seed": 4}),
        (None, {"temperature": 0.0, "ignore_eos": True}),
        (tight, {"seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
        (StructuredOutputsParams(regex="[a-f]+"), {"temperature": 0.0, "min_tokens": 9, "logit_bias": {EOS: 50.0}}),
        (None, {"seed": 6, "presence_penalty": 1.0}),
        (StructuredOutputsParams(regex="[a-f]+[0-9]?"), {"seed": 7, "allowed_token_ids": [EOS, *range(64, 80)]}),
        (StructuredOutputsParams(choice=["red", "green", "greenish"]), {"seed": 8, "temperature": 2.0}),
        (None, {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True}),
        (StructuredOutputsParams(grammar=LIST), {"seed": 9, "temperature": 1.5}),
        (StructuredOutputsParams(choice=["ab"]), {"seed": 1, "min_tokens": 20}),  # ends where nothing else can come
    ]
    cases = []
    for prompt in PROMPTS:
        for asked, more in kinds:
            params = SamplingParams(max_tokens=28, structured_outputs=asked, **more)
            cases.append((prompt, params, loop.run(prompt, params, asked and grammar_of(asked))))
    assert len({len(wanted) for _, _, wanted in cases}) > 5
    return cases


@pytest.mark.parametrize("pool", [{}, TIGHT], ids=["roomy", "preempting"])
@everywhere
def test_tokens_are_those_of_a_plain_loop(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    expected: list[tuple[list[int], SamplingParams, list[int]]],
    options: dict[str, Any],
    pool: dict[str, Any],
) -> None:
    """All in one batch: the mask of each token depends on the one before, which is in flight when its step is launched;
    and rows without a grammar stand beside, in the same steps."""
    with start(model, tokenizer, **options, **pool) as engine:
        handles = [engine.submit(prompt, params) for prompt, params, _ in expected]
        for handle, (prompt, params, wanted) in zip(handles, expected, strict=True):
            assert tokens(handle) == wanted, (prompt, params)
        assert bool(engine.stats()["num_preemptions"]) == bool(pool)
        assert engine.stats()["activity_pct"] > 0


# ---- many schemas


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One whose every answer is short, so that none is cut off by length."""
    kinds = ["string", "pattern", "integer", "boolean", "enum", "const", "null", "date"]
    kind = rng.choice([*kinds, "object", "object", "array", "anyOf"] if depth < 2 else kinds)
    if depth == 0:
        kind = rng.choice(["object", "object", "array"])
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice([r"^[a-z]{1,4}$", r"^\d{3}-\d{2}$", r"^(foo|bar)[xyz]?$"])}
    if kind == "integer":
        low = rng.randint(-200, 100)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "Straße", "日本", 'quo"te', 1, 2.5, None, True, "a b"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, False, "line\nbreak"])}
    if kind == "date":
        return {"type": "string", "format": "date"}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "name", "größe", "x y", "list", "k1"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def test_two_hundred_random_schemas_are_kept_to_beside_neighbours_and_preemptions(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(200)]
    plain = [
        SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=25, ignore_eos=True) for i in range(9)
    ]
    prompts = [[rng.randrange(2, 300) for _ in range(rng.randint(1, 12))] for _ in range(9)]
    with start(model, tokenizer) as engine:
        alone = [tokens(engine.submit(prompt, params)) for prompt, params in zip(prompts, plain, strict=True)]
    with start(model, tokenizer, num_blocks=90) as engine:
        handles, neighbours = [], []
        for i, schema in enumerate(schemas):
            asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            greedy = {"temperature": 0.0} if i % 4 == 0 else {"top_p": 0.9} if i % 4 == 1 else {"temperature": 1.7}
            params = SamplingParams(max_tokens=250, seed=i, structured_outputs=asked, **greedy)  # type: ignore[arg-type]
            handles.append(engine.submit([5, 6, 7, i], params))
            if i % 4 == 0:
                neighbours.append((i // 4 % 9, engine.submit(prompts[i // 4 % 9], plain[i // 4 % 9])))
        for handle, schema in zip(handles, schemas, strict=True):
            found = answer(handle)
            assert found.finish_reason == "stop" and found.token_ids[-1] == EOS
            validate(found.text, schema)
        for number, neighbour in neighbours:
            assert tokens(neighbour) == alone[number]
        assert engine.stats()["num_preemptions"] > 10


# ---- mixtures


@pytest.fixture(scope="module")
def both(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as stack:
        sync = stack.enter_context(start(model, tokenizer, schedule="sync"))
        yield sync, stack.enter_context(start(model, tokenizer, num_blocks=30, depth=3))


def turn(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits.roll(len(token_ids))


letters = st.sampled_from([EOS, *range(64, 96)])
mixtures = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "structured_outputs": st.sampled_from(
            [
                StructuredOutputsParams(json=PERSON),
                StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
                StructuredOutputsParams(regex="[a-z]{2,5}( [a-z]+)*"),
                StructuredOutputsParams(choice=["yes", "no", "yesterday"]),
                StructuredOutputsParams(grammar=LIST),
            ]
        ),
        "logits_processors": st.just([turn]),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([0.1, 0.8, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "frequency_penalty": st.floats(-2, 2),
        "min_tokens": st.integers(0, 14),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(letters, max_size=3),
        "stop": st.lists(st.sampled_from(["a", "es", '"']), max_size=2),
        "bad_words": st.lists(st.sampled_from(["a", "yes", "no", "ab", "{", "x"]), max_size=4),
        "allowed_token_ids": st.lists(letters, min_size=8, max_size=30, unique=True),
        "logit_bias": st.dictionaries(letters, st.floats(-100, 100), max_size=8),
        "logprobs": st.integers(0, 3),
        "n": st.integers(1, 2),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), mixtures), min_size=1, max_size=7))
def test_any_mixture_of_parameters_is_the_same_on_both_schedules(
    both: tuple[Engine, Engine], drawn: list[tuple[list[int], dict[str, Any]]]
) -> None:
    """Errors, too: a request whose parameters leave no token fails at the same token of the same rows."""
    results: list[list[Any]] = [[], []]
    for engine, found in zip(both, results, strict=True):
        handles = []
        for prompt, fields in drawn:
            fields = {**fields, "min_tokens": min(fields.get("min_tokens", 0), fields["max_tokens"])}
            if fields.get("temperature") == 0:
                fields["n"] = 1
            try:
                handles.append(engine.submit(prompt, SamplingParams(**fields)))
            except InvalidRequestError as error:
                assert "forbid all" in str(error)
        for child in (child for handle in handles for child in handle.children):
            try:
                one = answer(child)
                found.append((one.token_ids, one.text, one.finish_reason, one.stop_reason))
            except CBatchError as error:
                found.append(str(error).partition(": ")[2])
                assert "no token that the grammar allows here is left" in found[-1]
        assert engine.is_healthy
    assert results[0] == results[1]


# ---- what there is to ask for


@pytest.mark.parametrize(
    "texts", [["a\x7fb", "\x00", "\u2028"], [f"option {i}" for i in range(3000)]], ids=["controls", "many"]
)
def test_choice_of_any_texts(model: nn.Module, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    """One with a DEL was refused as bad grammar, and of 2,000 or more each request failed at its first token: they
    were so many rules of a parser, whose rows hold 2,000."""
    asked = StructuredOutputsParams(choice=texts)
    with start(model, tokenizer) as engine:
        params = [SamplingParams(structured_outputs=asked, seed=seed, temperature=2.0) for seed in range(6)]
        found = {answer(handle).text for handle in [engine.submit([5, 6], each) for each in params]}
    assert len(found) > 1 and found <= set(texts)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (StructuredOutputsParams(choice=["a<|end|>b"]), "a<|end|>b"),
        (StructuredOutputsParams(choice=["<|start|>"]), "<|start|>"),
        (StructuredOutputsParams(regex=r"x{2}<\|end\|>"), "xx<|end|>"),
        (StructuredOutputsParams(json={"const": "<|end|>"}), '"<|end|>"'),
        (StructuredOutputsParams(grammar='start: "(" /<\\|end\\|>/ ")"'), "(<|end|>)"),
        (StructuredOutputsParams(grammar='start: "(" <|start|> ")"'), "(<|start|>)"),  # the token itself
    ],
    ids=["choice", "whole", "regex", "json", "grammar", "token"],
)
def test_text_of_a_special_token_is_spelled_out(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, asked: StructuredOutputsParams, text: str
) -> None:
    """Where nothing else could come, llguidance had the tokenizer encode what must come, and allowed the special token
    alone: an end of sequence ended "a<|end|>b" behind the a, and any other failed the request as not in the grammar.
    Nothing is forced now."""
    params = SamplingParams(structured_outputs=asked, temperature=0.0, max_tokens=40, skip_special_tokens=False)
    with start(model, tokenizer) as engine:
        found = answer(engine.submit([5, 6], params))
    assert (found.text, found.finish_reason, found.token_ids.count(EOS)) == (text, "stop", 1)
    assert found.token_ids.count(0) == (asked.grammar is not None and "<|start|>" in asked.grammar)


LONG = "".join(random.Random(1).choices("abcdefgh ", k=90_000))


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": [LONG, "b"]},
        {"choice": [LONG]},
        {"regex": LONG},
        {"json": {"const": LONG}},
        {"json": {"enum": [LONG, "b"]}},
    ],
    ids=["choice", "one choice", "regex", "const", "enum"],
)
def test_mask_of_a_long_text_costs_no_more_than_that_of_a_short_one(
    tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any]
) -> None:
    """At each token llguidance collected all the text that must follow and had the tokenizer encode it: a choice of
    100,000 characters took 25 to 450 ms a token, on the engine's thread, and so of every other request's tokens too."""
    grammars = Grammars(tokenizer, VOCAB_SIZE, [EOS])
    matcher = grammars.matcher(StructuredOutputsParams(**fields)).deep_copy()
    mask = np.empty((1, grammars.num_words), np.int32)
    times = []
    for token in tokenizer.encode('"' * ("json" in fields) + LONG[:200], add_special_tokens=False):
        begin = time.perf_counter()
        grammars.fill([(matcher, 0)], mask)
        times.append(time.perf_counter() - begin)
        assert mask[0, token // 32] >> token % 32 & 1 and matcher.consume_token(token)
    assert len(times) > 50 and statistics.median(times) < 0.002  # 0.01 ms


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_regex_choice_and_grammars_hold(make: Any, device: str) -> None:
    tokenizer = make()
    model = tiny(512).to(device)  # type: ignore[arg-type]
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    choices = ["yes", "no", "not at all", "日本 😀", 'a "quoted"\\one']
    nested = re.compile(r"\(*[0-9]+\)*")
    with start(model, tokenizer) as engine:
        for seed in range(12):
            common: dict[str, Any] = {"seed": seed, "temperature": 1.5, "max_tokens": 120}
            asked = [
                (
                    StructuredOutputsParams(regex=r"[A-Z][a-z]{0,5} [0-9]{2}:[0-9]{2}"),
                    re.compile(r"[A-Z][a-z]{0,5} [0-9]{2}:[0-9]{2}"),
                ),
                (StructuredOutputsParams(regex="é{2}|(日本)*x"), re.compile("é{2}|(日本)*x")),
                (StructuredOutputsParams(choice=choices), re.compile("|".join(map(re.escape, choices)))),
                (StructuredOutputsParams(grammar=GBNF), nested),
            ]
            handles = [
                (engine.submit([5, 6, 7], SamplingParams(structured_outputs=one, **common)), pattern)
                for one, pattern in asked
            ]
            for handle, pattern in handles:
                found = answer(handle)
                if found.finish_reason == "stop":
                    assert pattern.fullmatch(found.text), found.text
                    assert pattern is not nested or found.text.count("(") == found.text.count(")")
                else:  # a long number, or many brackets
                    assert pattern is nested or found.text.startswith("日本")
        whole = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
        params = SamplingParams(temperature=0.0, max_tokens=500, structured_outputs=whole, logit_bias={5: 1.0})
        found = answer(engine.submit([5, 6, 7], params))
        assert found.text.startswith("{") and (
            found.finish_reason == "length" or isinstance(json.loads(found.text), dict)
        )
        spaced = StructuredOutputsParams(json={"const": [1, 2]}, whitespace_pattern=" ")
        found = answer(engine.submit([5], SamplingParams(max_tokens=50, structured_outputs=spaced)))
        assert re.fullmatch(r"\[ ?1 ?, ?2 ?\]", found.text)


def test_end_of_sequence_comes_where_the_grammar_may_end_and_is_forced_where_it_must(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    def run(engine: Engine, **more: Any) -> tuple[str, str | None]:
        found = answer(engine.submit([5], SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **more})))
        return found.text, found.finish_reason

    letters = StructuredOutputsParams(regex="[ab]{2,4}")
    a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    eager, never = {a: 50.0, EOS: 99.0}, {a: 99.0, EOS: -99.0, **dict.fromkeys(range(90, 324), -90.0)}
    with start(model, tokenizer) as engine:
        assert run(engine, structured_outputs=letters, logit_bias=eager) == ("aa", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=never) == ("aaaa", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=eager, min_tokens=3) == ("aaa", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=eager, min_tokens=9) == ("aaaa", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=eager, allowed_token_ids=[a]) == ("aaaa", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=never, max_tokens=3) == ("aaa", "length")
        assert run(engine, structured_outputs=letters, logit_bias=never, stop=["aa"]) == ("", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=never, stop_token_ids=[a]) == ("", "stop")
        assert run(engine, structured_outputs=letters, logit_bias=never, bad_words=["aaa"])[0].startswith(
            ("aab", "aaba")
        )
        # The device, which cannot know that nothing else may come, once banned it, and drew from a row of -inf.
        for word in (tokenizer.eos_token, "aaaa" + tokenizer.eos_token):
            assert run(engine, structured_outputs=letters, logit_bias=never, bad_words=[word]) == ("aaaa", "stop")
        found = answer(engine.submit([5], SamplingParams(ignore_eos=True, max_tokens=7, structured_outputs=letters)))
        text = [token for token in found.token_ids if token != EOS]
        assert found.token_ids == text + [EOS] * (7 - len(text)) and 0 < len(text) <= 4
        assert (found.finish_reason, set(found.text)) == ("length", set(found.text) & set("ab"))
        assert b not in (tokens(engine.submit([5], SamplingParams(structured_outputs=letters, logit_bias={b: -99.0}))))


@everywhere
def test_parameters_that_leave_no_token_end_their_request_alone(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any]
) -> None:
    """Found out in the middle of an answer, when its neighbours have tokens in flight. A row of nothing but -inf would
    have been drawn from all the same."""
    a = tokenizer.convert_tokens_to_ids("a")
    with start(model, tokenizer, **options) as engine:
        common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
        neighbours = [
            engine.submit([9, 8], SamplingParams(**common, ignore_eos=True)),
            engine.submit([9, 8], SamplingParams(**common, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))),
        ]
        letters = StructuredOutputsParams(regex="aaab")
        bad = [
            engine.submit([5], SamplingParams(**common, structured_outputs=letters, allowed_token_ids=[a])),
            engine.submit([5], SamplingParams(**common, structured_outputs=letters, bad_words=["b"])),
            engine.submit([5], SamplingParams(**common, structured_outputs=letters, bad_words=["aaab"])),
        ]
        for handle in bad:
            with pytest.raises(CBatchError, match=f"request {handle.request_id}: structured_outputs: no token that"):
                handle.result(60)
        found = [tokens(handle) for handle in neighbours]
        assert engine.is_healthy
    with start(model, tokenizer, schedule="sync") as engine:
        assert found == [tokens(engine.submit([9, 8], handle.params)) for handle in neighbours]


@everywhere
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"min_tokens": 3}, {"logprobs": 1}])
@pytest.mark.parametrize("eos", [0, 1])
def test_function_that_leaves_what_the_grammar_forbids_ends_its_request_alone(
    tokenizer: PreTrainedTokenizerFast, options: dict[str, Any], more: dict[str, Any], eos: int, device: str
) -> None:
    """Nothing is left then, of which the device makes token 0. Where that is the end of sequence, the answer ended with
    it and said "stop", although the grammar allows no end there."""
    letters = StructuredOutputsParams(regex="[a-f]{2,}")
    a, z = tokenizer.convert_tokens_to_ids(["a", "z"])

    def only(token: int, count: int) -> Callable[[list[int], Tensor], Tensor]:
        def processor(token_ids: list[int], logits: Tensor) -> Tensor:
            if len(token_ids) >= count:
                kept = logits[token].clone()
                logits.fill_(-torch.inf)[token] = kept
            return logits

        return processor

    model = CountingModel(VOCAB_SIZE, eos=(eos,), device=device)
    with start(model, tokenizer, model_impl="auto", **options) as engine:
        neighbours = [
            engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),
            engine.submit([9, a - 1], SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=letters)),
        ]
        fields: dict[str, Any] = {"temperature": 0.0, "structured_outputs": letters, **more}
        for count in range(3):
            bad = engine.submit([5], SamplingParams(**fields, logits_processors=[only(z, count)]))
            with pytest.raises(CBatchError, match="logits_processors left no token that the grammar allows here"):
                bad.result(60)
        good = SamplingParams(**fields, max_tokens=4, logits_processors=[only(a, 0)])
        assert tokens(engine.submit([5], good)) == [a] * 4
        assert [tokens(handle) for handle in neighbours] == [counted(41, 30, VOCAB_SIZE), counted(a - 1, 6)]
    engine.scheduler.check()


@pytest.mark.parametrize("eos", [0, 1])
def test_model_that_rules_out_what_the_grammar_allows_ends_its_request_alone(
    tokenizer: PreTrainedTokenizerFast, eos: int
) -> None:
    """Its own logits of all that are -inf. Of the token 0 that came, an error of llguidance's told, or, where it is the
    end of sequence, nothing: the answer ended with it, although the grammar allows no end there."""
    a = tokenizer.convert_tokens_to_ids("a")

    class Padded(CountingModel):
        def forward(self, input_ids: Tensor, *rest: Any) -> Tensor:
            logits = super().forward(input_ids, *rest)
            logits[:, a:] = -torch.inf
            return logits

    with start(Padded(VOCAB_SIZE, eos=(eos,)), tokenizer, model_impl="auto") as engine:  # type: ignore[arg-type]
        neighbour = engine.submit([5, 6], SamplingParams(temperature=0.0, max_tokens=9))
        fields: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}, {"temperature": 0.0, "ignore_eos": True}]
        for more in fields:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]{2,}"), **more)
            with pytest.raises(CBatchError, match="the model left no token that the grammar allows here"):
                engine.submit([5], params).result(60)
        assert tokens(neighbour) == counted(6, 9)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "a(b"}, r"structured_outputs.regex=a\(b: .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex"),
        ({"json": {"type": "frog"}}, 'structured_outputs.json={"type": "frog"}: .*frog'),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {}, "whitespace_pattern": "("}, r"json={} with whitespace_pattern=\(: .*unclosed group"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json"),
        ({"json": {"type": "string", "format": "frog"}}, "Unknown format: frog"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
    ],
)
def test_bad_grammar_is_refused_at_submission_alone(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, asked: dict[str, Any], message: str
) -> None:
    with start(model, tokenizer) as engine:
        neighbour = engine.submit([9, 8], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))
        with pytest.raises(InvalidRequestError, match=f"(?s)request x: .*{message}"):
            engine.submit([5], params, request_id="x")
        assert len(tokens(neighbour)) == 20


@pytest.mark.parametrize("first", ["", '%llguidance {"no_forcing": false}\n'], ids=["plain", "asked to force"])
@pytest.mark.parametrize("rest", ["", "  // the end"], ids=["", "comment"])
def test_rule_that_no_text_satisfies_goes_on_to_the_full_length(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, first: str, rest: str
) -> None:
    """Of an `a: /x+/ a`, llguidance collected all the x that must come, in a thread that burned a core and took 10 MiB
    a second until the process ended. Nothing is forced now: a mask looks one token ahead, and the request ends by its
    length."""
    threads = set(threading.enumerate())
    with start(model, tokenizer) as engine:
        asked = StructuredOutputsParams(grammar=f'{first}start: a b\na: /x+/ a\nb: "c"{rest}')
        neighbour = engine.submit([9, 8], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        (answer,) = engine.submit([5], SamplingParams(structured_outputs=asked, max_tokens=9)).result(60).outputs
        assert set(answer.text) == {"x"} and answer.finish_reason == "length"
        assert len(tokens(neighbour)) == 20
    assert set(threading.enumerate()) == threads


def chain(kind: str, length: int) -> StructuredOutputsParams:
    """Definitions, or rules, each of which leads to the next."""
    if kind == "grammar":
        rules = [f'r{i}:r{i + 1} "b"' for i in range(length)]
        return StructuredOutputsParams(grammar="\n".join(["start: r0", *rules, f'r{length}: "a"']))
    nested: dict[str, Any] = {"$ref": "#/$defs/0"}
    defs: dict[str, Any] = {}
    for i in range(length // 100):
        defs[str(i)] = {"$ref": f"#/$defs/{i + 1}"}
        for _ in range(100):
            defs[str(i)] = {"items": defs[str(i)]}
    return StructuredOutputsParams(json={"$defs": {**defs, str(length // 100): {}}, **nested})


@pytest.mark.parametrize(("kind", "length"), [("json", 3000), ("json", 7000), ("grammar", 6200)])
def test_chain_of_definitions_does_not_end_the_process(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, kind: str, length: int
) -> None:
    """llguidance's compiler calls itself for each, and 900 of them overran the stack of 8 MiB: a schema of 60,000
    characters from one client was the end of everybody's engine, without a word."""
    params = SamplingParams(structured_outputs=chain(kind, length), max_tokens=3)
    sizes = threading.stack_size()
    with start(model, tokenizer) as engine:
        if length == 7000:
            with pytest.raises(InvalidRequestError, match="schema too large"):
                engine.submit([5], params)
        else:
            assert len(tokens(engine.submit([5], params))) > 0
    assert threading.stack_size() == sizes


def test_message_of_a_grammar_is_short(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """llguidance quotes the line that is wrong, and a line may be a megabyte."""
    deep = "start: " + 5000 * "(" + '"a"' + 5000 * ")"
    with start(model, tokenizer) as engine:
        for grammar in (deep, "start: start"):
            params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
            with pytest.raises(
                InvalidRequestError, match=r"too deeply nested|there is no text that it allows"
            ) as error:
                engine.submit([5], params)
            assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing, but must have exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice"),
        ({"json_object": False}, "has nothing"),
        ({"json": "{"}, "structured_outputs.json is no JSON"),
        ({"json": "3"}, "structured_outputs.json=3 is no schema"),
        ({"json": {"const": {1}}}, "structured_outputs.json is no JSON"),
        ({"json": [1]}, "is no schema"),
        ({"regex": ""}, "structured_outputs.regex='' must be a string with at least one character"),
        ({"regex": 5}, "structured_outputs.regex=5"),
        ({"choice": []}, "has no text to choose"),
        ({"choice": "ab"}, "structured_outputs.choice='ab' must be a list"),
        ({"choice": ["a", ""]}, "empty string"),
        ({"grammar": 5}, "structured_outputs.grammar=5"),
        ({"json": {"const": "x" * 99_990}}, "structured_outputs.json has 100003 characters, but the limit is 100000"),
        ({"json": "{" * 100_001}, "structured_outputs.json has 100001 characters, but the limit is 100000"),
        ({"regex": "x" * 100_001}, "structured_outputs.regex has 100001 characters, but the limit is 100000"),
        ({"grammar": "x" * 100_001}, "structured_outputs.grammar has 100001 characters, but the limit is 100000"),
        (
            {"choice": ["x" * 999_999, "yy"]},
            "structured_outputs.choice has 1000001 characters, but the limit is 1000000",
        ),
        ({"json_object": 3}, "structured_outputs.json_object=3"),
        ({"json_object": 1}, "structured_outputs.json_object=1 must be True or None"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "disable_any_whitespace is for JSON, but the answer is a regex",
        ),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern beside"),
    ],
)
def test_parameters_that_say_no_structure(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**fields)


def test_structures_are_compared_by_what_they_say() -> None:
    one = StructuredOutputsParams(json={"type": "object"})
    assert one == StructuredOutputsParams(json='{"type": "object"}') != StructuredOutputsParams(json_object=True)
    assert len({SamplingParams(structured_outputs=one), SamplingParams(structured_outputs=one)}) == 1
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutputsParams, not dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_what_a_model_or_tokenizer_lacks_is_refused(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow:
        all_special_ids = ()

        def encode(self, text: str, **_: object) -> list[int]:
            return []

        def decode(self, ids: list[int], **_: object) -> str:
            return ""

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    for with_tokenizer, eos, message in (
        (None, (5,), "needs a fast tokenizer, but there is none"),
        (Slow(), (5,), "needs a fast tokenizer, but this is a Slow"),
        (tokenizer, (), "needs an end-of-sequence token"),
    ):
        with (
            Engine(CountingModel(vocab_size=400, eos=eos), config, with_tokenizer) as engine,
            pytest.raises(InvalidRequestError, match=message),
        ):
            engine.submit([1], params)


def test_without_the_extra_the_error_says_what_to_install(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with start(model, tokenizer) as engine:
        with pytest.raises(InvalidRequestError, match=r"request x: .*pip install cbatch\[grammar\]"):
            engine.submit([5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), request_id="x")
        assert len(tokens(engine.submit([5], SamplingParams(max_tokens=3, ignore_eos=True)))) == 3


def test_ctrl_c_while_the_vocabulary_is_read_spoils_no_later_grammar(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept as read, without what belongs to it: each later grammar of the engine failed for the lack of that."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["cat"]))
    with start(model, tokenizer) as engine:
        for part in ("LLTokenizer", "LLExecutor", "LLParserLimits"):
            with monkeypatch.context() as patch:
                patch.setattr(llguidance, part, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.submit([3], params)
        assert answer(engine.submit([3], params)).text == "cat"


def test_model_with_fewer_tokens_than_its_tokenizer(tokenizer: PreTrainedTokenizerFast, device: str) -> None:
    """llguidance's masks are then longer than the model's."""
    assert len(tokenizer) == 324
    with start(tiny(300).to(device), tokenizer) as engine:  # type: ignore[arg-type]
        for seed in range(4):
            asked = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
            handles = [
                engine.submit([5, i], SamplingParams(seed=seed, max_tokens=200, structured_outputs=asked))
                for i in range(2, 5)
            ]
            for handle in handles:
                validate(answer(handle).text, PERSON)


# ---- with others


def test_answers_of_one_prompt_stand_in_their_grammar_each_by_itself(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    with start(model, tokenizer) as engine:
        params = SamplingParams(n=5, seed=11, max_tokens=200, structured_outputs=asked)
        answers = engine.submit([5, 6], params).result(120).outputs
        single = [
            tokens(engine.submit([5, 6], SamplingParams(seed=11 + i, max_tokens=200, structured_outputs=asked)))
            for i in range(5)
        ]
    assert [found.token_ids for found in answers] == single
    for found in answers:
        validate(found.text, PERSON)


def test_cache_of_grammars_is_limited_by_their_size(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 of them were kept, however large: of choices of a million characters, 15 GB."""
    monkeypatch.setattr("cbatch.grammar._MAX_CACHED_CHARS", 1000)
    grammars = Grammars(tokenizer, VOCAB_SIZE, [EOS])
    asked = [StructuredOutputsParams(choice=[letter * 200, letter * 199]) for letter in "abcd"]
    for one in [*asked, asked[2], StructuredOutputsParams(json={"const": "x" * 300})]:
        grammars.matcher(one)
    assert [one.choice and one.choice[0][0] for one in grammars._cache] == ["c", None]  # the last that were asked for


def test_answers_that_wait_or_have_ended_hold_no_state_of_a_grammar(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a choice of 20,000 texts each takes 370 KiB: 4,096 answers to one prompt took 1.5 GB before one had begun."""
    asked = StructuredOutputsParams(choice=[f"option {i}" for i in range(2000)])
    model = CountingModel(VOCAB_SIZE, eos=(EOS,))
    model.gate.clear()
    with start(model, tokenizer, model_impl="auto", max_num_seqs=3, enforce_eager=True) as engine:
        handle = engine.submit([5], SamplingParams(n=40, structured_outputs=asked))
        wait = [row is not None and row.matcher is None for row in (child.held for child in handle.children)]
        model.gate.set()
        assert all(wait)
        assert {answer.text[:7] for answer in handle.result(60).outputs} == {"option "}
        assert all(child.held is None for child in handle.children)


@everywhere
def test_logprobs_are_of_the_models_own_logits(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, options: dict[str, Any]
) -> None:
    """Mask, function and bias all push; the log-probabilities are those of a plain forward."""
    prompt = PROMPTS[1]
    a = tokenizer.convert_tokens_to_ids("a")

    def push(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[a] += 3.0
        return logits

    params = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        logprobs=3,
        structured_outputs=StructuredOutputsParams(regex="[a-e]{6}"),
        logits_processors=[push],
        logit_bias={a + 1: 2.0},
    )
    with start(model, tokenizer, **options) as engine:
        neighbour = engine.submit(PROMPTS[0], SamplingParams(max_tokens=9, seed=1, logprobs=1))
        found = answer(engine.submit(prompt, params))
        assert len(tokens(neighbour)) > 0
    assert found.logprobs is not None and found.text
    device = next(model.parameters()).device
    for i, (token, one) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.token_ids[:i]], device=device)).logits[0, -1].float()
        wanted = logits.log_softmax(-1)
        assert one[token].logprob == pytest.approx(wanted[token].item(), abs=1e-4)
        ranked = {entry.rank: id for id, entry in one.items()}
        assert [ranked[rank] for rank in (1, 2, 3)] == wanted.topk(3).indices.tolist()


def test_abort_at_every_step(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    asked = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=asked)
    with start(model, tokenizer) as engine:
        whole = tokens(engine.submit([5], params))
        for count in range(1, 9):
            handle = engine.submit([5], params)
            beside = engine.submit([5], params)
            taken: list[int] = []
            for token in handle:
                taken.append(token)
                if len(taken) == count:
                    handle.abort()
            assert taken == whole[: len(taken)] and len(taken) >= count
            assert tokens(beside) == whole


async def test_streams_of_json(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    from cbatch.async_llm import AsyncLLM

    asked = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    async with AsyncLLM(model, tokenizer, model_impl="transformers", block_size=4, num_blocks=400) as llm:
        async for _output in llm.generate([5, 6], SamplingParams(seed=2, max_tokens=200, structured_outputs=asked)):
            pass
        validate(_output.outputs[0].text, PERSON)
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            bad = StructuredOutputsParams(regex="(")
            async for _ in llm.generate([5], SamplingParams(structured_outputs=bad)):
                pass


def test_llm_takes_one_structure_for_each_prompt(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    asked = [StructuredOutputsParams(choice=["left", "right"]), StructuredOutputsParams(regex="[0-9]{3}")]
    with LLM(model, tokenizer, model_impl="transformers", block_size=4, num_blocks=400) as llm:
        outputs = llm.generate([[5], [6]], [SamplingParams(structured_outputs=one, max_tokens=30) for one in asked])
    assert outputs[0].outputs[0].text in ("left", "right") and re.fullmatch("[0-9]{3}", outputs[1].outputs[0].text)
