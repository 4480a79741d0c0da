"""Sampling parameters through the whole engine: against transformers, on every schedule, in any mixture."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import CBatchError, InvalidRequestError
from cbatch.sampling_params import SamplingParams
from tests.counting import CountingModel, counted
from tests.models.families import VOCAB_SIZE, make_tiny
from tests.test_sampler import chi_square_p
from tests.test_sampler import expected as expected_distribution
from tests.waiting import tokens

pytestmark = pytest.mark.usefixtures("device")

SYNC, ASYNC, DEEP = {"schedule": "sync"}, {"schedule": "async"}, {"schedule": "async", "depth": 4}
SCHEDULES = [SYNC, ASYNC, DEEP]
TIGHT = {"num_blocks": 17}  # of the tests' requests, some are preempted
EOS = 17
LENGTH = 24
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [99] * 6]


class Numbers:
    """A tokenizer whose words are token ids: ``"12 7"`` is [12, 7]."""

    all_special_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"{token} " for token in ids)


class CountPenalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers does not have."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        times = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[1])
        return scores - times * self.frequency - (times > 0) * self.presence


@pytest.fixture(scope="module")
def model(device: str) -> nn.Module:
    model = make_tiny("llama", device=device)
    model.generation_config.eos_token_id = EOS  # type: ignore[union-attr]
    return model


def start(model: nn.Module, **options: Any) -> Engine:
    defaults = {"max_num_seqs": 16, "block_size": 4, "num_blocks": 400, "max_num_batched_tokens": 32}
    return Engine.from_model(model, Numbers(), **{**defaults, "model_impl": "transformers", **options})


def plain(model: nn.Module, prompt: list[int], params: SamplingParams) -> list[int]:
    """What transformers generates, greedily, with its own processors where it has them."""
    biases = {(token,): bias for token, bias in dict(params.logit_bias).items()}
    others = [] if params.allowed_token_ids is None else sorted(set(range(VOCAB_SIZE)) - set(params.allowed_token_ids))
    where = next(model.parameters()).device
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt], device=where),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=where),
        pad_token_id=0,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=None if params.ignore_eos else EOS,
        repetition_penalty=params.repetition_penalty,
        bad_words_ids=[Numbers().encode(word) for word in params.bad_words] or None,
        sequence_bias=biases or None,
        suppress_tokens=others or None,
        logits_processor=LogitsProcessorList(
            [CountPenalties(len(prompt), params.presence_penalty, params.frequency_penalty)]
        ),
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(model: nn.Module) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts with parameters, each by itself and several together, and what transformers makes of them."""
    cases = []
    for prompt in PROMPTS:
        common: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
        greedy = plain(model, prompt, SamplingParams(**common))
        # Its second token, and its seventh behind its sixth: the first of these rules it breaks are known to apply.
        words = [str(greedy[1]), f"{greedy[5]} {greedy[6]}"]
        eos = {**common, "ignore_eos": False}
        with_bias = {greedy[0]: -3.0, greedy[2]: 2.5, EOS: 4.0}
        few = list(range(0, VOCAB_SIZE, 3))
        for more in (
            {},
            {"repetition_penalty": 1.6},
            {"repetition_penalty": 0.7},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.8},
            {"frequency_penalty": -1.0},
            {"bad_words": words},
            {"logit_bias": with_bias},
            {"allowed_token_ids": few},
            {"ignore_eos": False, "logit_bias": {EOS: 100.0}},  # ends at once
            {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "min_tokens": 5},
            {"ignore_eos": False, "logit_bias": {EOS: 9.0}, "min_tokens": 3, "repetition_penalty": 1.2},
            {
                "repetition_penalty": 1.3,
                "presence_penalty": 0.4,
                "frequency_penalty": 0.3,
                "bad_words": words,
                "logit_bias": with_bias,
                "allowed_token_ids": [*few, *greedy],
            },
        ):
            params = SamplingParams(**{**common, **more})
            cases.append((prompt, params, plain(model, prompt, params)))
        assert plain(model, prompt, SamplingParams(**{**eos, "logit_bias": {EOS: 100.0}})) == [EOS]
    return cases


@pytest.mark.parametrize("pool", [{}, TIGHT], ids=["roomy", "preempting"])
@pytest.mark.parametrize("options", SCHEDULES, ids=["sync", "async", "deep"])
def test_each_processor_gives_the_tokens_of_transformers(
    model: nn.Module,
    expected: list[tuple[list[int], SamplingParams, list[int]]],
    options: dict[str, Any],
    pool: dict[str, Any],
) -> None:
    """All in one batch, so that rows with and without each stand side by side, and a token is in flight behind each."""
    with start(model, **options, **pool) as engine:
        handles = [engine.submit(prompt, params) for prompt, params, _ in expected]
        for handle, (prompt, params, wanted) in zip(handles, expected, strict=True):
            assert tokens(handle) == wanted, (prompt, params)
        assert bool(engine.stats()["num_preemptions"]) == bool(pool)


class LoopingModel(CountingModel):
    """Whatever it reads, it wants the same: token 7 most, then 0, then 3."""

    likes = ((7, 4.0), (0, 3.0), (3, 2.5))

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: object) -> Tensor:
        super().forward(input_ids, positions, sample_rows, attend)
        logits = torch.zeros(len(sample_rows), self.vocab_size, device=input_ids.device)
        for token, logit in self.likes:
            logits[:, token] = logit
        return logits


def penalised(params: SamplingParams, prompt: list[int], count: int) -> list[int]:
    """What ``LoopingModel`` answers greedily, by hand."""
    logits = dict.fromkeys(range(100), 0.0) | dict(LoopingModel.likes)
    answer: list[int] = []
    for _ in range(count):

        def left(token: int) -> float:
            logit = logits[token]
            if token in prompt or token in answer:
                logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
            times = answer.count(token)
            return logit - params.frequency_penalty * times - params.presence_penalty * (times > 0)

        answer.append(max(logits, key=lambda token: (left(token), -token)))
    return answer


@pytest.mark.parametrize("options", SCHEDULES, ids=["sync", "async", "deep"])
@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 0.75},
        {"presence_penalty": 1.25},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ],
)
def test_penalty_at_the_next_step_knows_a_token_that_the_host_does_not(
    options: dict[str, Any], penalty: dict[str, float]
) -> None:
    """A model that loops: with the count a step late, 7 would come once too often. Token 0, which stands for tokens
    in flight, is its second choice: were a placeholder counted, 3 would come before it."""
    config = EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33, max_num_batched_tokens=16, **options)
    with Engine(LoopingModel(), config) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, **penalty)  # type: ignore[arg-type]
        free = SamplingParams(temperature=0.0, max_tokens=20)
        prompts = [[1], [7], [0, 3], [1]]
        handles = [engine.submit(prompt, one) for prompt in prompts for one in (params, free)]
        for prompt, (handle, neighbour) in zip(prompts, zip(handles[::2], handles[1::2], strict=True), strict=True):
            assert tokens(handle) == penalised(params, prompt, 20)
            assert tokens(neighbour) == [7] * 20


def test_a_slot_of_a_new_owner_knows_nothing_of_the_old_one() -> None:
    config = EngineConfig(max_num_seqs=1, block_size=4, num_blocks=33)
    with Engine(LoopingModel(), config, Numbers()) as engine:
        old = {"frequency_penalty": 2.0, "logit_bias": {5: 9.0}, "bad_words": ["7"], "allowed_token_ids": [5, 7, 9]}
        for max_tokens in (1, 2, 9):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            engine.submit([1], SamplingParams(temperature=0.0, max_tokens=9, **old)).result(30)  # type: ignore[arg-type]
            assert tokens(engine.submit([1], params)) == [7] * max_tokens
            with_penalty = SamplingParams(temperature=0.0, max_tokens=max_tokens, presence_penalty=1.25)
            assert tokens(engine.submit([1], with_penalty)) == penalised(with_penalty, [1], max_tokens)


def test_steps_in_between_carry_nothing_to_the_slots() -> None:
    """What a slot needs goes over when it gets its owner; a decode step in steady state does none of that."""
    seen = []
    with Engine(LoopingModel(), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)) as engine:
        compute = engine._executor.compute

        def spy(io: Any, plan: Any, admissions: Any, *rest: Any) -> None:
            seen.append([(a.slot, a.history.tolist(), a.prompt_len) for a in admissions])
            compute(io, plan, admissions, *rest)

        engine._executor.compute = spy  # type: ignore[method-assign]
        tokens(engine.submit([1, 2], SamplingParams(temperature=0.0, max_tokens=9, presence_penalty=1.0)))
        assert [len(admissions) for admissions in seen] == [1, *[0] * 8]
        assert seen[0][0][1:] == ([1, 2], 2)
        seen.clear()
        tokens(engine.submit([1, 2], SamplingParams(temperature=0.5, max_tokens=3, logprobs=2)))
        assert seen == [[], [], []]


@pytest.mark.parametrize("options", [SYNC, ASYNC, {**ASYNC, **TIGHT}], ids=["sync", "async", "preempting"])
def test_logprobs_are_those_of_the_models_own_logits(model: nn.Module, options: dict[str, Any]) -> None:
    """Whatever the parameters do to the logits, and where rows that ended meanwhile stand between."""
    asked = [
        {"logprobs": 5, "temperature": 0.0},
        {"temperature": 0.0},
        {"logprobs": 0, "temperature": 0.7, "seed": 1},
        {"logprobs": 20, "temperature": 1.3, "seed": 2, "top_k": 9, "presence_penalty": 1.0},
        {"logprobs": 1, "temperature": 0.0, "logit_bias": {50: 100.0}},
        {"logprobs": 3, "temperature": 0.0, "allowed_token_ids": [1, 2, 3], "max_tokens": 3},
        {"temperature": 1.0, "seed": 3, "max_tokens": 5},
        {"logprobs": 2, "temperature": 0.0, "stop_token_ids": list(range(50))},
    ]
    with start(model, **options) as engine:
        params = [SamplingParams(**{"max_tokens": 12, **one}) for one in asked]  # type: ignore[arg-type]
        handles = [engine.submit(prompt, one) for prompt in PROMPTS for one in params]
        streams = [engine.submit(prompt, one) for prompt in PROMPTS for one in params]
        for handle, stream in zip(handles, streams, strict=True):
            answer = handle.result(120).outputs[0]
            check_logprobs(model, handle.prompt_token_ids, handle.params, answer)
            chunks = []
            while not (chunks and chunks[-1].finished):
                chunks.append(stream.next_chunk(120))
            assert [token for chunk in chunks for token in chunk.token_ids] == answer.token_ids
            if answer.logprobs is None:
                assert all(chunk.logprobs is None for chunk in chunks)
            else:
                streamed = [one for chunk in chunks for one in chunk.logprobs or []]
                assert all(len(chunk.logprobs or []) == len(chunk.token_ids) for chunk in chunks)
                assert [list(one) for one in streamed] == [list(one) for one in answer.logprobs]


def check_logprobs(model: nn.Module, prompt: list[int], params: SamplingParams, answer: Any) -> None:
    if params.logprobs is None:
        assert answer.logprobs is None and answer.cumulative_logprob is None
        return
    with torch.no_grad():
        ids = torch.tensor([prompt + answer.token_ids], device=next(model.parameters()).device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), -1).cpu()
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, found, row in zip(answer.token_ids, answer.logprobs, wanted, strict=True):
        best = row.topk(params.logprobs).indices.tolist()
        assert list(found) == list(dict.fromkeys([token, *best]))
        rank = int((row > row[token]).sum()) + 1
        assert [one.rank for one in found.values()] == list(dict.fromkeys([rank, *range(1, params.logprobs + 1)]))
        for other, one in found.items():
            assert one.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert one.decoded_token == f"{other} "
    own = [float(row[token]) for row, token in zip(wanted, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(math.fsum(own), abs=1e-3)


def test_vocabulary_smaller_than_the_logprobs_asked_for() -> None:
    with Engine(CountingModel(vocab_size=8), EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)) as engine:
        answer = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=3, logprobs=20)).result(30).outputs[0]
        assert answer.token_ids == [2, 3, 4]
        assert answer.logprobs is not None
        for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
            assert sorted(found) == list(range(8))
            assert found[token].rank == 1 and found[token].decoded_token is None
            assert found[token].logprob == pytest.approx(1 - math.log(math.e + 7), abs=1e-5)


@pytest.mark.parametrize("options", [SYNC, ASYNC, {**ASYNC, **TIGHT}], ids=["sync", "async", "preempting"])
def test_a_seed_gives_its_tokens_in_any_company(model: nn.Module, options: dict[str, Any]) -> None:
    """Alone, in a batch, beside unseeded neighbours and after preemption; the caller's random state is untouched."""
    seeded = [
        SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, **more)  # type: ignore[arg-type]
        for seed, more in enumerate([{}, {"min_p": 0.05}, {"top_p": 0.9, "frequency_penalty": 0.5}, {"top_k": 30}])
    ]
    with start(model, **SYNC) as engine:
        alone = [tokens(engine.submit(PROMPTS[0], params)) for params in seeded]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    others = random.getstate(), repr(np.random.get_state())
    with start(model, **options) as engine:
        handles = []
        for params in seeded * 3:
            handles.append(engine.submit(PROMPTS[0], params))
            engine.submit(PROMPTS[1], SamplingParams(max_tokens=10, ignore_eos=True))
        assert [tokens(handle) for handle in handles] == alone * 3
        assert bool(engine.stats()["num_preemptions"]) == ("num_blocks" in options)
    assert torch.equal(before, torch.random.get_rng_state())
    assert others == (random.getstate(), repr(np.random.get_state()))


class SteadyModel(CountingModel):
    """Has the same logits ``steady`` for every token of every request."""

    def __init__(self) -> None:
        super().__init__(vocab_size=64)
        self.steady = 2 * torch.randn(64, generator=torch.Generator().manual_seed(7))
        self._on_device = self.steady.to(self.device)

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: object) -> Tensor:
        return self._on_device.repeat(len(sample_rows), 1)


def test_hundred_thousand_tokens_of_requests_follow_the_softmax_independently() -> None:
    """The sampler is tested alone. That each token of each answer gets noise of its own is the engine's part: with one
    position for all steps, every comparison of schedules would still hold, and answers would be one token repeated."""
    filters = {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    config = EngineConfig(max_num_seqs=128, block_size=16, num_blocks=1100, max_num_batched_tokens=256)
    model = SteadyModel()
    with Engine(model, config) as engine:
        params = SamplingParams(n=1000, seed=5, max_tokens=100, ignore_eos=True, **filters)  # type: ignore[arg-type]
        answers = engine.submit([1], params).result(120).outputs
    found = np.array([answer.token_ids for answer in answers])
    wanted = expected_distribution(model.steady, **filters)  # type: ignore[arg-type]
    assert chi_square_p(np.bincount(found.ravel(), minlength=64), wanted) > 1e-3
    for one, next_one in ((found[:, :-1], found[:, 1:]), (found[:-1], found[1:])):  # in an answer, between answers
        assert (one == next_one).mean() == pytest.approx((wanted**2).sum(), abs=0.01)


def test_children_draw_what_requests_with_their_seeds_would(model: nn.Module) -> None:
    with start(model, **ASYNC) as engine, start(model, **SYNC) as sync:
        several = SamplingParams(n=4, seed=40, max_tokens=12, ignore_eos=True, logprobs=1)
        whole = engine.submit(PROMPTS[0], several).result(60)
        for i, answer in enumerate(whole.outputs):
            alone = sync.submit(PROMPTS[0], SamplingParams(seed=40 + i, max_tokens=12, ignore_eos=True)).result(60)
            assert (answer.index, answer.token_ids) == (i, alone.outputs[0].token_ids)
            check_logprobs(model, PROMPTS[0], several, answer)
        assert len({tuple(answer.token_ids) for answer in whole.outputs}) == 4
        unseeded = engine.submit(PROMPTS[0], SamplingParams(n=3, max_tokens=12, ignore_eos=True)).result(60)
        assert len({tuple(answer.token_ids) for answer in unseeded.outputs}) == 3


@pytest.mark.parametrize("seed", [-3, -(2**63), 2**63 - 2])
def test_seeds_of_children_pass_through_minus_one_and_over_the_end(model: nn.Module, seed: int) -> None:
    """-1 alone means any seed; as that of a child it is one like the others. Behind the largest comes the smallest."""
    several = SamplingParams(n=4, seed=seed, max_tokens=12, ignore_eos=True)
    with start(model, **ASYNC) as engine, start(model, **SYNC) as sync:
        answers = [answer.token_ids for answer in engine.submit(PROMPTS[0], several).result(60).outputs]
        again = [answer.token_ids for answer in sync.submit(PROMPTS[0], several).result(60).outputs]
        assert again == answers and len(set(map(tuple, answers))) == 4
        for i, answer in enumerate(answers):
            own = (seed + i + 2**63) % 2**64 - 2**63
            if own != -1:
                assert tokens(sync.submit(PROMPTS[0], replace(several, n=1, seed=own))) == answer


def test_generation_config_gives_the_defaults_where_no_parameters_are_given(device: str) -> None:
    model = make_tiny("llama", device=device)
    asks = {"do_sample": False, "repetition_penalty": 1.4, "max_new_tokens": 9, "min_new_tokens": 4}
    for name, value in asks.items():
        setattr(model.generation_config, name, value)
    with start(model) as engine:
        given = SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=9, min_tokens=4)
        assert engine.default_sampling_params == given
        answer = tokens(engine.submit(PROMPTS[0]))
        assert answer == plain(model, PROMPTS[0], given)
        alone = SamplingParams(temperature=0.0, max_tokens=9)
        assert tokens(engine.submit(PROMPTS[0], alone)) == plain(model, PROMPTS[0], alone) != answer


@pytest.mark.parametrize("temperature", [1e-4, 1e-7])
def test_temperature_near_zero_is_greedy(model: nn.Module, temperature: float) -> None:
    with start(model) as engine:
        for more in ({}, {"presence_penalty": 1.0}, {"min_p": 0.5, "allowed_token_ids": list(range(30))}):
            cold = SamplingParams(temperature=temperature, max_tokens=10, seed=1, **more)  # type: ignore[arg-type]
            greedy = SamplingParams(temperature=0.0, max_tokens=10, **more)  # type: ignore[arg-type]
            assert tokens(engine.submit(PROMPTS[1], cold)) == tokens(engine.submit(PROMPTS[1], greedy))


def test_penalty_that_float32_cannot_hold_gives_tokens_all_the_same(model: nn.Module) -> None:
    with start(model) as engine:
        for penalty in (1e-300, 1e-40, 1e40, 1e300):
            params = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=penalty, ignore_eos=True)
            assert len(tokens(engine.submit(PROMPTS[1], params))) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, f"allowed_token_ids has {VOCAB_SIZE}, but the vocabulary has"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias has {VOCAB_SIZE}, but the vocabulary has"),
        ({"stop_token_ids": [VOCAB_SIZE]}, f"stop_token_ids has {VOCAB_SIZE}, but the vocabulary has"),
        ({"bad_words": [f"1 {VOCAB_SIZE}"]}, f"bad_words has '1 {VOCAB_SIZE}'.*the vocabulary has {VOCAB_SIZE}"),
        ({"bad_words": [" "]}, "bad_words has ' ', of which the tokenizer makes no token"),
        ({"bad_words": ["1 " * 17]}, "bad_words has .*, which is 17 tokens, but the limit is 16"),
        ({"bad_words": [str(i) for i in range(65)]}, "bad_words has 65 texts, but the limit is 64"),
        (
            {"allowed_token_ids": [EOS, 5], "min_tokens": 2, "bad_words": ["5"]},
            "allowed_token_ids has 2 tokens, but min_tokens and bad_words forbid all of them$",
        ),
        (
            {"allowed_token_ids": [5, 6], "bad_words": ["5 5", "5 6", "7 5 6"]},
            r"allowed_token_ids has 2 tokens, but min_tokens and bad_words forbid all of them behind \[5\]$",
        ),
        (
            {"allowed_token_ids": [5, 6, 7], "bad_words": ["6 6 5", "6 6", "7", "6 5"]},
            r"allowed_token_ids has 3 tokens, but .* behind \[6\]$",
        ),
        ({"allowed_token_ids": [5, 6], "bad_words": ["5 5", "6 5 6"]}, r".* forbid all of them behind \[6, 5\]$"),
        (
            {"stop_token_ids": range(VOCAB_SIZE), "min_tokens": 1},
            f"the vocabulary has {VOCAB_SIZE} tokens, but min_tokens and bad_words forbid all of them$",
        ),
    ],
)
def test_what_the_model_or_a_slot_cannot_serve_is_refused_alone(
    model: nn.Module, given: dict[str, Any], message: str
) -> None:
    with start(model) as engine:
        neighbour = engine.submit(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        with pytest.raises(InvalidRequestError, match=f"request x: {message}"):
            engine.submit(PROMPTS[0], SamplingParams(**given), request_id="x")
        assert tokens(neighbour) == plain(model, PROMPTS[0], neighbour.params)


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [5, 6], "bad_words": ["5 5", "7 5 6"]},  # 7 is not allowed, so 6 can follow 5
        {"allowed_token_ids": [5, 6], "bad_words": ["6 6", "6 5"], "max_tokens": 1},  # nothing comes behind it
        {"allowed_token_ids": [5, 6], "bad_words": ["6 6", "6 5"], "stop_token_ids": [6]},  # nor here
        {"allowed_token_ids": [5, 6], "bad_words": ["6 6", "6 5", "6"]},  # 6 never comes
    ],
)
def test_bad_words_that_never_meet_all_that_is_allowed(model: nn.Module, given: dict[str, Any]) -> None:
    """What is refused must be impossible: an answer that these words leave open comes, and keeps to them."""
    with start(model) as engine:
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 1, "temperature": 9.0, **given})
        found = tokens(engine.submit(PROMPTS[0], params))
        assert found and set(found) <= {5, 6}
        text = f" {' '.join(map(str, found))} "
        assert not any(f" {word} " in text for word in given["bad_words"])


class Padded(CountingModel):
    """Its logits of tokens from 10 on are -inf, as where a model pads its vocabulary."""

    def forward(self, input_ids: Tensor, positions: Tensor, sample_rows: Tensor, attend: object) -> Tensor:
        logits = super().forward(input_ids, positions, sample_rows, attend)
        logits[:, 10:] = -torch.inf
        return logits


@pytest.mark.parametrize(
    "more", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}, {"temperature": 0.0, "min_tokens": 2}]
)
def test_tokens_that_the_model_rules_out_end_their_request_and_never_give_another(more: dict[str, Any]) -> None:
    """Of logits that are all -inf the device draws token 0, which came out although it was not allowed."""
    with Engine(Padded(eos=(0,)), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)) as engine:
        neighbour = engine.submit([1], SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[*range(2, 30)]))
        handle = engine.submit([1], SamplingParams(**more, allowed_token_ids=[20, 30]))
        with pytest.raises(CBatchError, match=r"request \d+: the model's logits of all allowed_token_ids are -inf"):
            handle.result(30)
        mixed = engine.submit([1], SamplingParams(**more, max_tokens=8, allowed_token_ids=[20, 30, 5]))
        assert tokens(mixed) == [5] * 8
        assert tokens(neighbour) == [2, 3, 4, 5, 6, 7, 8, 9]
        assert engine.is_healthy
    engine.scheduler.check()


def test_a_hundred_thousand_bad_words_are_refused_before_they_are_tokenised() -> None:
    """It took 10 s, and the tokenizer's lock from everybody else."""

    class Untouched(Numbers):
        def encode(self, text: str, **_: object) -> list[int]:
            raise AssertionError("tokenised")

    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    with Engine(CountingModel(), config, Untouched()) as engine:
        params = SamplingParams(bad_words=[chr(0x4E00 + i) for i in range(20_000)] * 5)
        with pytest.raises(InvalidRequestError, match="request x: bad_words has 20000 texts, but the limit is 64"):
            engine.submit([1], params, request_id="x")


def test_bad_words_count_with_and_without_a_space_in_front() -> None:
    class Spaced(Numbers):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [int(text) + 50 * text.startswith(" ")]

    with Engine(CountingModel(), EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33), Spaced()) as engine:
        engine.submit([1], SamplingParams(bad_words=[str(i) for i in range(32)])).abort()
        with pytest.raises(InvalidRequestError, match=r"bad_words makes 66 token sequences.*the limit is 64"):
            engine.submit([1], SamplingParams(bad_words=[str(i) for i in range(33)]))


def test_more_biases_than_a_slot_holds_are_refused() -> None:
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    with Engine(CountingModel(vocab_size=2000, eos=(1999, 0)), config) as engine:
        most = dict.fromkeys(range(1024), 0.5)
        assert tokens(engine.submit([1], SamplingParams(temperature=0.0, max_tokens=3, logit_bias=most))) == [2, 3, 4]
        with pytest.raises(InvalidRequestError, match=r"logit_bias has more than 1024 tokens, which is the limit"):
            engine.submit([1], SamplingParams(logit_bias={**most, 1500: 1.0}))
        with pytest.raises(InvalidRequestError, match=r"logit_bias has 1024 tokens, 1025 with those that min_tokens"):
            engine.submit([1], SamplingParams(logit_bias=most, min_tokens=1))  # 0 is among them already


def test_bad_words_need_a_tokenizer_at_submission_only() -> None:
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    with Engine(CountingModel(), config) as engine, pytest.raises(InvalidRequestError, match="bad_words has '5'"):
        engine.submit([1], SamplingParams(bad_words=["5"]))
    with Engine(CountingModel(), config, Numbers()) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=4, bad_words=["4"], detokenize=False)
        answer = engine.submit([1], params).result(30).outputs[0]
        assert (answer.token_ids, answer.text) == ([2, 3, 0, 1], "")  # of equals, the first


def test_min_tokens_bans_what_would_end_it_and_no_more() -> None:
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    with Engine(CountingModel(eos=(5,)), config) as engine:
        common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
        assert tokens(engine.submit([3], SamplingParams(**common))) == [4, 5]
        assert tokens(engine.submit([3], SamplingParams(**common, min_tokens=1))) == [4, 5]
        assert tokens(engine.submit([3], SamplingParams(**common, min_tokens=2))) == [4, *counted(-1, 6)]
        stop = SamplingParams(**common, min_tokens=2, ignore_eos=True, stop_token_ids=[6])
        assert tokens(engine.submit([3], stop)) == [4, 5, 6]
        assert tokens(engine.submit([4], stop)) == [5, 0, 1, 2, 3, 4, 5, 6]


# ---- mixtures


@pytest.fixture(scope="module")
def both(model: nn.Module) -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as stack:
        sync = stack.enter_context(start(model, **SYNC))
        yield sync, stack.enter_context(start(model, **ASYNC, **TIGHT))


ids = st.integers(0, VOCAB_SIZE - 1)
mixtures = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 40, 1000]),
        "top_p": st.sampled_from([0.1, 0.8, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 4.0]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "min_tokens": st.integers(0, 14),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(ids, max_size=12),
        "stop": st.lists(ids.map(str), max_size=2),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(lambda w: " ".join(map(str, w))), max_size=8),
        "allowed_token_ids": st.lists(ids, min_size=12, max_size=60, unique=True),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=8),
        "logprobs": st.integers(0, 20),
        "logits_processors": st.just([lambda token_ids, logits: logits.roll(len(token_ids))]),
        "n": st.integers(1, 3),
    },
)


@settings(max_examples=125, deadline=None, suppress_health_check=list(HealthCheck))  # 500 mixtures and more
@given(st.lists(st.tuples(st.sampled_from(PROMPTS), mixtures), min_size=4, max_size=8))
def test_any_mixture_of_parameters_is_the_same_on_both_schedules(
    both: tuple[Engine, Engine], drawn: list[tuple[list[int], dict[str, Any]]]
) -> None:
    requests = []
    for prompt, fields in drawn:
        if fields.get("temperature") == 0:
            fields = {**fields, "n": 1}
        fields = {**fields, "min_tokens": min(fields.get("min_tokens", 0), fields["max_tokens"])}
        requests.append((prompt, SamplingParams(**fields)))
    results = []
    for engine in both:
        handles = []
        for prompt, params in requests:
            try:
                handles.append(engine.submit(prompt, params))
            except InvalidRequestError as error:
                assert "forbid all" in str(error)
        results.append([[shown(answer) for answer in handle.result(120).outputs] for handle in handles])
    assert results[0] == results[1]
    for engine in both:
        assert engine.is_healthy


def shown(answer: Any) -> tuple[Any, ...]:
    """All of an answer but for the values of its logprobs, which the batch rounds."""
    found = answer.logprobs and [list(one) for one in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, found
