"""Functions of the user's between a model and its sampling: they see every token before, and hurt only their own."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import CBatchError, EngineDeadError, InvalidRequestError
from cbatch.request import RequestHandle
from cbatch.sampler import HELD, drawing, encode
from cbatch.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.counting import CountingModel, counted
from tests.engine.test_sampling import Numbers
from tests.waiting import settle, tokens

pytestmark = pytest.mark.usefixtures("device", "checked")

SCHEDULES = [{"schedule": "sync"}, {"schedule": "async"}, {"schedule": "async", "depth": 4}]
everywhere = pytest.mark.parametrize("options", SCHEDULES, ids=["sync", "async", "deep"])
Start = Callable[..., Engine]


def greedy(*processors: Callable[..., Any], max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logits_processors=processors, **more)


def skip_three(token_ids: list[int], logits: Tensor) -> Tensor:
    """Counts on in steps of three from the last token: a stale history would count from another."""
    if token_ids:
        logits[(token_ids[-1] + 3) % len(logits)] = 9.0
    return logits


def add_up(prompt: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
    """Whatever the model says: the sum of all tokens before."""
    return torch.nn.functional.one_hot(
        torch.tensor((sum(prompt) + sum(token_ids)) % len(logits), device=logits.device), len(logits)
    ).to(logits.dtype)


def summed(prompt: list[int], count: int, vocab_size: int = 100) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(sum(known) % vocab_size)
    return known[len(prompt) :]


@everywhere
def test_processors_get_every_token_before_and_neighbours_are_as_alone(
    counting_engine: Start, options: dict[str, Any]
) -> None:
    """Its history ends with a token that is in flight when the step is launched: that one must be there as well."""
    engine = counting_engine(**options)
    plain = engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30))
    skipping = engine.submit([5], greedy(skip_three))
    adding = engine.submit([1, 2], greedy(add_up))
    assert tokens(skipping) == [6 + 3 * i for i in range(12)]
    assert tokens(adding) == summed([1, 2], 12)
    assert tokens(plain) == counted(41, 30)
    assert engine.stats()["num_wasted_rows"] == 0  # they end by length, which is known when they are planned


@everywhere
def test_histories_survive_preemption_and_chunked_prompts(counting_engine: Start, options: dict[str, Any]) -> None:
    """A token that was in flight when its sequence was preempted is void: it comes into no history, and is drawn again
    from one that has not got it."""
    engine = counting_engine(num_blocks=13, max_num_batched_tokens=8, **options)
    seen: list[list[list[int]]] = [[] for _ in range(6)]

    def note(log: list[list[int]], prompt: list[int], token_ids: list[int], logits: Tensor) -> Tensor:
        log.append(token_ids)
        return add_up(prompt, token_ids, logits)

    prompts = [list(range(i, i + 3 + 2 * i)) for i in range(6)]
    handles = [
        engine.submit(prompt, greedy(functools.partial(note, log), max_tokens=16))
        for prompt, log in zip(prompts, seen, strict=True)
    ]
    for handle, prompt, log in zip(handles, prompts, seen, strict=True):
        answer = tokens(handle)
        assert answer == summed(prompt, 16)
        assert all(history == answer[: len(history)] for history in log)
        assert sorted({len(history) for history in log}) == list(range(16))
    assert engine.stats()["num_preemptions"] > 0


def test_steps_without_such_rows_are_not_held(counting_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = counting_engine()
    held: list[int] = []
    prepare = engine._held.prepare
    monkeypatch.setattr(engine._held, "prepare", lambda *given: held.append(1) or prepare(*given))
    tokens(engine.submit([1], SamplingParams(temperature=0.0, max_tokens=20)))
    assert not held
    tokens(engine.submit([1], greedy(skip_three, max_tokens=5)))
    assert len(held) == 5
    tokens(engine.submit([1], SamplingParams(temperature=0.0, max_tokens=20)))
    assert len(held) == 5


def test_time_until_the_host_has_decided_is_no_activity(
    counting_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = counting_engine()
    prepare = engine._held.prepare
    monkeypatch.setattr(engine._held, "prepare", lambda *given: time.sleep(0.03) or prepare(*given))
    assert tokens(engine.submit([1], greedy(lambda ids, logits: logits))) == counted(1, 12)
    stats = engine.stats()
    assert 0 < stats["activity_pct"] < 60
    assert stats["ms_per_step_p50"] < 25


def test_a_step_has_its_own_time_alone(counting_engine: Start) -> None:
    engine = counting_engine()
    for params in (greedy(max_tokens=120), greedy(add_up, max_tokens=120)):
        engine.reset_stats()
        begin = time.perf_counter()
        assert len(tokens(engine.submit([1], params))) == 120
        wall_ms = (time.perf_counter() - begin) * 1e3
        assert 0 < engine.stats()["ms_per_step_p50"] < wall_ms / 120 * 1.5


def test_what_a_steps_graph_has_drawn_is_drawn_again() -> None:
    """Greedily, from logits as they were. Whatever else a held row asks for, it asks for another graph behind it."""
    asked = {"prompt_len": 1, "stop_ids": (), "bad_word_ids": ()}
    for more in ({"logits_processors": [skip_three]}, {"structured_outputs": StructuredOutputsParams(regex="a")}):
        encoded = encode(SamplingParams(temperature=0.0, **more), 0, **asked)  # type: ignore[arg-type]
        assert encoded.flags & HELD and drawing(encoded.flags)


@everywhere
def test_row_of_an_answer_that_has_ended_gets_nothing(counting_engine: Start, options: dict[str, Any]) -> None:
    """EOS lands when the next step is launched already: its row there is in vain, and no function hears of it."""
    engine = counting_engine(CountingModel(eos=(8,)), **options)
    seen: list[list[int]] = []
    handle = engine.submit([5], greedy(lambda ids, logits: (seen.append(ids), logits)[1]))
    assert tokens(handle) == [6, 7, 8]
    assert tokens(engine.submit([5], greedy(add_up, max_tokens=3, ignore_eos=True))) == [5, 10, 20]
    assert seen == [[], [6], [6, 7]]


def fail(token_ids: list[int], logits: Tensor) -> Tensor:
    if len(token_ids) == 3:
        raise RuntimeError("three is too many")
    return logits


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("the message is made where it is read, and that fails")


def fail_without_words(token_ids: list[int], logits: Tensor) -> Tensor:
    raise WordlessError


@everywhere
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (fail, r"logits_processors\[0\] failed: RuntimeError: three is too many"),
        (lambda ids, logits: None, r"TypeError: it returned a NoneType, not a tensor"),
        (lambda ids, logits: logits[:-1], r"it returned torch.float32 \[99\] on .*, not floats \[100\]"),
        (lambda ids, logits: logits.long(), r"it returned torch.int64 \[100\]"),
        (lambda ids, logits: logits.to("meta"), r"on meta, not floats \[100\] on c"),
        (
            lambda ids, logits: logits.to_sparse(),
            r"RuntimeError: .*sparse",
        ),  # looks like floats until it is copied
        (fail_without_words, r"logits_processors\[0\] failed: WordlessError$"),
    ],
)
def test_one_that_fails_ends_its_own_request_alone(
    counting_engine: Start, options: dict[str, Any], bad: Callable[..., Any], message: str
) -> None:
    engine = counting_engine(**options)
    neighbours = [
        (engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30)), counted(41, 30)),
        (engine.submit([5], greedy(skip_three)), [6 + 3 * i for i in range(12)]),
    ]
    handle = engine.submit([1], greedy(bad, max_tokens=100), request_id="x")
    with pytest.raises(CBatchError, match=f"request x: .*{message}") as caught:
        handle.result(60)
    assert caught.value.__cause__ is not None
    assert handle.finish_reason == "error"
    for neighbour, wanted in neighbours:
        assert tokens(neighbour) == wanted
    settle(engine)
    assert engine.is_healthy and engine.stats()["steps"] < 50  # nothing goes on for it
    assert tokens(engine.submit([1], SamplingParams(temperature=0.0, max_tokens=3), request_id="x")) == [2, 3, 4]


@everywhere
def test_one_that_fails_behind_a_stop_string_fails_nothing(options: dict[str, Any]) -> None:
    """The stop string is found where text is made, some steps later; the function that was asked for a token more had
    failed by then, and its error took the place of the answer."""
    has_failed = threading.Event()

    def failing(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == 3:
            has_failed.set()
            raise ValueError("there is no fourth token")
        return logits

    with Engine(
        CountingModel(), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33, **options), Numbers()
    ) as engine:
        push = engine._delivery._push

        def late(*given: Any) -> None:
            has_failed.wait(10)
            time.sleep(0.05)
            push(*given)

        engine._delivery._push = late  # type: ignore[method-assign]
        output = engine.submit([1], greedy(failing, stop="4")).result(60).outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([2, 3, 4], "2 3 ", "stop")
        with pytest.raises(CBatchError, match="there is no fourth token"):
            tokens(engine.submit([1], greedy(failing)))


def nothing(token_ids: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf)


@everywhere
@pytest.mark.parametrize(
    ("more", "model"),
    [
        ({"allowed_token_ids": [7, 40]}, {}),
        ({"allowed_token_ids": [99]}, {}),
        ({"bad_words": ["0"]}, {}),
        ({"bad_words": ["0 0"]}, {}),
        ({"min_tokens": 3}, {"eos": (0,)}),
        ({"allowed_token_ids": [0, 40]}, {}),
        ({"logprobs": 2}, {}),
        ({}, {"eos": (0,)}),
        ({"temperature": 1.0, "n": 2}, {}),
    ],
)
def test_one_that_leaves_nothing_to_other_parameters_ends_its_own_request_alone(
    options: dict[str, Any], more: dict[str, Any], model: dict[str, Any]
) -> None:
    """Of logits that are all -inf the device makes token 0. It was handed out where it was forbidden, and then still
    where the functions alone forbade it: `!!!!` in many vocabularies, or an end of sequence."""
    config = EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33, **options)
    with Engine(CountingModel(**model), config, Numbers()) as engine:
        neighbour = engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30))
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logits_processors": [nothing]}
        with pytest.raises(CBatchError, match="left no token that the other parameters allow here"):
            tokens(engine.submit([1], SamplingParams(**{**fields, **more})))
        assert tokens(neighbour) == counted(41, 30)
        assert tokens(engine.submit([1], greedy(skip_three, allowed_token_ids=[2, 5, 8], max_tokens=3))) == [2, 5, 8]
        assert tokens(engine.submit([98], greedy(skip_three, max_tokens=3, ignore_eos=True))) == [99, 2, 5]
        assert tokens(engine.submit([97], greedy(add_up, skip_three, max_tokens=3, allowed_token_ids=[0, 97])))[1] == 0
    engine.scheduler.check()


@everywhere
def test_one_that_waits_for_its_own_engine_ends_its_own_request_alone(
    counting_engine: Start, options: dict[str, Any]
) -> None:
    """The engine waits for the function, and the function for the engine: nothing would ever go on, not even `close`.
    Of another engine it may want something, and to submit needs no waiting."""
    engine, other = counting_engine(**options), counting_engine(**options)
    submitted: list[RequestHandle] = []

    def ask(whom: Engine) -> Callable[..., Tensor]:
        def processor(ids: list[int], logits: Tensor) -> Tensor:
            submitted.append(engine.submit([50], greedy(max_tokens=3)))
            answer = whom.submit([20], greedy(max_tokens=2)).result().outputs[0].token_ids
            return logits.roll(answer[-1] - 21)  # by one

        return processor

    neighbour = engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30))
    with pytest.raises(CBatchError, match="a logits processor waits for it, while its engine waits for the processor"):
        tokens(engine.submit([1], greedy(ask(engine))))
    assert tokens(engine.submit([1], greedy(ask(other), max_tokens=3))) == [3, 5, 7]
    assert tokens(neighbour) == counted(41, 30)
    assert [tokens(handle) for handle in submitted] == [[51, 52, 53]] * 4


@pytest.mark.parametrize("wait", ["aresult", "anext_chunk"])
def test_one_that_awaits_its_own_engine_ends_its_own_request_alone(counting_engine: Start, wait: str) -> None:
    """In an event loop of the function's own, nothing told it: all hung, where `result` was refused."""
    engine = counting_engine()
    neighbour = engine.submit([40, 41], SamplingParams(temperature=0.0, max_tokens=30))

    def ask(ids: list[int], logits: Tensor) -> Tensor:
        asyncio.run(getattr(engine.submit([50], greedy(max_tokens=3)), wait)())
        return logits

    with pytest.raises(CBatchError, match="a logits processor waits for it, while its engine waits for the processor"):
        tokens(engine.submit([1], greedy(ask)))
    assert tokens(neighbour) == counted(41, 30)


@pytest.mark.parametrize("when", range(1, 6))
def test_device_error_in_a_held_step_reaches_everyone(counting_engine: Start, when: int, device: str) -> None:
    model = CountingModel()
    engine = counting_engine(model, enforce_eager=True)
    model.fail_at = when + model.num_forwards
    handles = [engine.submit([1], greedy(skip_three)), engine.submit([2], SamplingParams(temperature=0.0))]
    for handle in handles:
        with pytest.raises(EngineDeadError, match="injected failure"):
            handle.result(30)
    engine.close()


@everywhere
def test_logprobs_are_of_the_models_own_logits(counting_engine: Start, options: dict[str, Any]) -> None:
    engine = counting_engine(**options)
    handles = [engine.submit([5], greedy(add_up, logprobs=2)), engine.submit([5], greedy(logprobs=2))]
    changed, own = (handle.result(60).outputs[0] for handle in handles)
    assert (changed.token_ids[:3], own.token_ids[:3]) == ([5, 10, 20], [6, 7, 8])
    assert changed.logprobs and own.logprobs
    # The model's logits are 1 for the token after the last, and 0 for all others.
    assert changed.logprobs[1][6].logprob == own.logprobs[1][7].logprob > changed.logprobs[1][10].logprob
    assert changed.logprobs[1][6].rank == 1


@everywhere
@pytest.mark.parametrize("pool", [{}, {"num_blocks": 12}], ids=["roomy", "preempting"])
def test_beams_and_prompt_logprobs_in_the_same_steps(
    counting_engine: Start, options: dict[str, Any], pool: dict[str, Any]
) -> None:
    """A step with log-probabilities of prompts is launched kernel by kernel even where there are graphs, and its rows
    of logits are not all sampled from; beams are chosen between a step's landing and the sampling of the next."""
    engine = counting_engine(max_num_seqs=8, **options, **pool)

    def submit(order: int) -> list[Any]:
        calls: list[Callable[[], Any]] = [
            lambda: engine.submit([1, 2, 3, 4, 5], greedy(add_up, prompt_logprobs=2, logprobs=1)),
            lambda: engine.submit_beam_search([7, 8], BeamSearchParams(beam_width=2, max_tokens=6)),
            lambda: engine.submit([5] * 9, SamplingParams(temperature=0.0, prompt_logprobs=1)),
            lambda: engine.submit([5], greedy(skip_three)),
        ]
        return [calls[(order + i) % 4]() for i in range(4)]

    def found(handle: Any) -> Any:
        result = handle.result(60)
        of_prompt = result.prompt_logprobs and [list(one) for one in result.prompt_logprobs[1:]]
        return [one.token_ids for one in result.outputs], of_prompt

    alone = [found(handle) for handle in [submit(i)[0] for i in range(4)]]
    assert alone[0] == ([summed([1, 2, 3, 4, 5], 12)], alone[0][1]) and len(alone[0][1]) == 4
    assert alone[3] == ([[6 + 3 * i for i in range(12)]], None)
    for order in range(4):
        handles = submit(order)
        assert [found(handle) for handle in handles] == [alone[(order + i) % 4] for i in range(4)]
    assert engine.is_healthy


def test_all_other_parameters_come_after(counting_engine: Start) -> None:
    """A logit bias of 5 beats the 1 that the function makes; a ban holds against any logit."""
    engine = counting_engine()
    assert tokens(engine.submit([1, 2], greedy(add_up, max_tokens=3, logit_bias={50: 5.0}))) == [50, 50, 50]
    allowed = greedy(lambda ids, logits: logits + 1e6, max_tokens=3, allowed_token_ids=[7, 8])
    assert tokens(engine.submit([6], allowed)) == [7, 8, 7]
    # One at a time; each token of 3, 6, 12 is penalised by 2 and so cannot come twice.
    assert tokens(engine.submit([1, 2], greedy(add_up, max_tokens=3, presence_penalty=2.0))) == [3, 6, 12]


def test_several_follow_each_other_and_answers_have_histories_of_their_own(counting_engine: Start) -> None:
    engine = counting_engine()
    both = greedy(add_up, lambda ids, logits: logits.roll(1), max_tokens=3)
    assert tokens(engine.submit([1, 2], both)) == [4, 8, 16]

    def free(ids: list[int], logits: Tensor) -> Tensor:
        """Anything at first, and then what is one more."""
        if not ids:
            return logits * 0
        return torch.where(torch.arange(100, device=logits.device) == (ids[-1] + 1) % 100, 9.0, -9e9)

    params = SamplingParams(n=4, seed=3, max_tokens=3, logits_processors=[free])
    answers = [answer.token_ids for answer in engine.submit([1], params).result(60).outputs]
    assert all(answer == counted(answer[0] - 1, 3) for answer in answers)
    assert len({answer[0] for answer in answers}) > 1


def test_abort_while_one_is_at_work(counting_engine: Start) -> None:
    engine = counting_engine()
    inside, go_on = threading.Event(), threading.Event()

    def wait(ids: list[int], logits: Tensor) -> Tensor:
        if len(ids) == 3:
            inside.set()
            assert go_on.wait(30)
        return logits

    handle = engine.submit([1], greedy(wait))
    assert inside.wait(30)
    handle.abort()
    go_on.set()
    answer = handle.result(30).outputs[0]
    assert answer.finish_reason == "abort" and answer.token_ids == counted(1, len(answer.token_ids))
    assert tokens(engine.submit([1], greedy(add_up, max_tokens=2))) == [1, 2]


@pytest.mark.parametrize("given", [5, [5], ["a"], [lambda logits: logits], [lambda a, b, c, d: a], "ab"])
def test_what_cannot_be_called_so_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logits_processors"):
        SamplingParams(logits_processors=given)


def test_forms_that_are_taken() -> None:
    class Both:
        def __call__(self, ids: list[int], logits: Tensor) -> Tensor:
            return logits

    def optional(prompt: list[int], ids: list[int], logits: Tensor | None = None) -> Tensor:
        assert logits is not None, "called with two"
        return logits

    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33)
    with Engine(CountingModel(), config) as engine:
        for form in (Both(), optional, lambda *given: given[-1], functools.partial(add_up, [0])):
            assert len(tokens(engine.submit([1], greedy(form, max_tokens=3)))) == 3
    assert SamplingParams(logits_processors=[]) == SamplingParams(logits_processors=None) == SamplingParams()
