"""``n`` above 1: one request with several answers, that end, are aborted and fail as one or each by itself."""

import asyncio
import time
from itertools import pairwise

import pytest

from cbatch import (
    LLM,
    AsyncLLM,
    CBatchError,
    DuplicateRequestError,
    Engine,
    EngineClosedError,
    RequestOutputKind,
    SamplingParams,
)
from cbatch.config import EngineConfig
from tests.api.tiny import byte_level
from tests.counting import CountingModel, counted
from tests.waiting import settle

TOKENIZER = byte_level()
VOCAB = len(TOKENIZER)
COLD = 1e-4  # sampled, and yet always the most likely token
OPTIONS = {"num_blocks": 300, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def several(n=4, max_tokens=6, **more):
    return SamplingParams(**{"n": n, "temperature": COLD, "max_tokens": max_tokens, **more})


@pytest.fixture
def engine():
    model = CountingModel(VOCAB, max_model_len=512)
    with Engine(model, EngineConfig(**OPTIONS), TOKENIZER) as engine:
        yield engine
        model.gate.set()
        if engine.is_healthy:
            settle(engine)


def test_one_result_has_all_answers(engine):
    handle = engine.submit([7], several(), request_id="x")
    output = handle.result(30)
    whole = counted(7, 6, VOCAB)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in output.outputs] == [whole] * 4
    assert {answer.text for answer in output.outputs} == {TOKENIZER.decode(whole)}
    assert {answer.finish_reason for answer in output.outputs} == {"length"}
    assert (output.request_id, output.finished, output.prompt_token_ids) == ("x", True, [7])
    assert [child.request_id for child in handle.children] == ["x-0", "x-1", "x-2", "x-3"]
    assert [list(child) for child in handle.children] == [whole] * 4
    assert handle.result() == output
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
    assert (times.num_preemptions, times.num_cached_tokens) == (0, 0)


def test_more_answers_than_run_at_once(engine):
    output = engine.submit([7], several(30)).result(30)
    assert [answer.token_ids for answer in output.outputs] == [counted(7, 6, VOCAB)] * 30


def test_tokens_of_all_at_once_are_refused_and_children_named(engine):
    """Whose token would it be? The message says where to read instead."""
    handle = engine.submit([7], several())
    for read in (
        lambda: iter(handle),
        lambda: handle.next_chunk(1),
        lambda: handle.finish_reason,
        lambda: aiter(handle),
        lambda: asyncio.run(handle.anext_chunk()),
    ):
        with pytest.raises(CBatchError, match=r"n=4.*handle\.children"):
            read()
    assert len(handle.result(30).outputs) == 4


def test_chunks_of_all_come_to_an_end(engine):
    async def read(handle):
        tokens = {}
        while not handle.finished or len(tokens) < 4 or any(len(got) < 6 for got in tokens.values()):
            for index, chunk in await handle.anext_chunks():
                tokens.setdefault(index, []).extend(chunk.token_ids)
        with pytest.raises(EOFError, match="all answers have ended"):
            await handle.anext_chunks()
        return tokens

    handle = engine.submit([7], several())
    assert asyncio.run(asyncio.wait_for(read(handle), 30)) == dict.fromkeys(range(4), counted(7, 6, VOCAB))
    assert not any(child._async_waiters for child in handle.children)


def test_a_request_for_one_answer_is_its_own_child(engine):
    handle = engine.submit([7], several(1))
    assert handle.children == (handle,)
    assert list(handle) == counted(7, 6, VOCAB)


def test_aborting_a_child_ends_that_one_and_the_parent_all(engine):
    engine.model.gate.clear()
    handle = engine.submit([7], several(4, 60))
    first, second = engine.submit([9], several(3, 60)), engine.submit([9], several(3, 9))
    handle.children[2].abort()
    first.abort()
    first.abort()
    engine.model.gate.set()
    answers = handle.result(30).outputs
    assert [answer.finish_reason for answer in answers] == ["length", "length", "abort", "length"]
    assert [len(answer.token_ids) for answer in answers] == [60, 60, 0, 60]
    assert [answer.finish_reason for answer in first.result(30).outputs] == ["abort"] * 3
    assert [answer.token_ids for answer in second.result(30).outputs] == [counted(9, 9, VOCAB)] * 3


@pytest.mark.parametrize("offset", range(8))
def test_abort_at_every_step_gives_everything_back(engine, offset):
    start = engine.model.num_forwards
    handle = engine.submit([7] * 9, several(4, 6))
    while engine.model.num_forwards < start + offset and not handle.finished:
        time.sleep(0.0005)
    handle.children[1].abort()
    handle.abort()
    for answer in handle.result(30).outputs:
        assert answer.token_ids == counted(7, 6, VOCAB)[: len(answer.token_ids)]
        assert answer.finish_reason in ("abort", "length")


def test_an_id_is_taken_until_the_last_answer_has_ended(engine):
    engine.model.gate.clear()
    handle = engine.submit([7], several(3, 50), request_id="x")
    child_like = engine.submit([7], several(1), request_id="x-0")  # children's names are nobody's ids
    for child in handle.children[:2]:
        child.abort()
    with pytest.raises(DuplicateRequestError, match="request x:"):
        engine.submit([7], several(1), request_id="x")
    assert engine.abort("x-1") is False
    assert engine.abort("x") is True
    again = engine.submit([50], several(2, 5), request_id="x")  # at once: the old one's late tokens are not its own
    engine.model.gate.set()
    assert [answer.token_ids for answer in again.result(30).outputs] == [counted(50, 5, VOCAB)] * 2
    assert child_like.result(30).outputs[0].finish_reason == "length"
    assert [answer.finish_reason for answer in handle.result(30).outputs] == ["abort"] * 3


def test_closing_the_engine_fails_all(engine):
    engine.model.gate.clear()
    handle = engine.submit([7], several(3, 50))
    engine.close_soon()
    engine.model.gate.set()
    with pytest.raises(EngineClosedError):
        handle.result(30)
    assert [child.finish_reason for child in handle.children] == ["error"] * 3


def test_timeout_is_that_of_the_whole(engine):
    engine.model.gate.clear()
    handle = engine.submit([7], several(3), request_id="x")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"request x: not finished within 0\.1 s"):
        handle.result(0.1)
    assert time.monotonic() - start < 0.29
    engine.model.gate.set()
    assert len(handle.result(30).outputs) == 3


def test_stop_strings_and_tokens_end_each_answer():
    with LLM(CountingModel(VOCAB, max_model_len=512), TOKENIZER, **OPTIONS) as llm:
        word = TOKENIZER.decode([20])
        params = [several(3, 40, stop=word), several(2, 40, stop_token_ids=[12]), several(1, 3)]
        outputs = llm.generate([[7], [8], [9]], params, use_tqdm=True)
        assert [len(output.outputs) for output in outputs] == [3, 2, 1]
        assert {answer.stop_reason for answer in outputs[0].outputs} == {word}
        assert {answer.stop_reason for answer in outputs[1].outputs} == {12}


async def collect(stream):
    return [output async for output in stream]


@pytest.mark.parametrize("more", [{}, {"stop": "never said"}, {"logprobs": 2}])
async def test_streams_of_several_answers(more):
    """Cumulative outputs hold all answers so far, deltas what is new with its index, the final one all."""
    async with AsyncLLM(CountingModel(VOCAB, max_model_len=512), TOKENIZER, **OPTIONS) as llm:
        whole = counted(7, 40, VOCAB)
        text = TOKENIZER.decode(whole, skip_special_tokens=True)

        async def stream(kind):
            return await collect(llm.generate([7], several(3, 40, output_kind=kind, **more)))

        outputs, deltas, finals = await asyncio.gather(*(stream(kind) for kind in RequestOutputKind))
        for before, after in pairwise(outputs):
            for one, other in zip(before.outputs, after.outputs, strict=True):
                assert one.index == other.index
                assert other.text.startswith(one.text)
                assert other.token_ids[: len(one.token_ids)] == one.token_ids
        assert len(finals) == 1
        for last in (outputs[-1], finals[0]):
            assert [(answer.index, answer.token_ids, answer.text) for answer in last.outputs] == [
                (i, whole, text) for i in range(3)
            ]
            assert last.outputs[0].finish_reason == "length"
            if "logprobs" in more:
                for answer in last.outputs:
                    assert len(answer.logprobs) == 40
                    own = [found[token].logprob for token, found in zip(whole, answer.logprobs, strict=True)]
                    assert answer.cumulative_logprob == pytest.approx(sum(own))
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        assert len({output.request_id for output in deltas}) == 1
        for i in range(3):
            parts = [answer for output in deltas for answer in output.outputs if answer.index == i]
            assert [token for part in parts for token in part.token_ids] == whole
            assert "".join(part.text for part in parts) == text
            assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
            if "logprobs" in more:
                assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
                assert parts[-1].cumulative_logprob == pytest.approx(last.outputs[i].cumulative_logprob)
            else:
                assert {part.logprobs for part in parts} == {None}


@pytest.mark.parametrize("failing", range(3))
async def test_error_of_one_answer_comes_before_the_others_have_ended(failing):
    """A final output waited for the answers in their order, and so heard of the second one's failure when the first one
    had its last token."""
    model = CountingModel(VOCAB, max_model_len=512)
    async with AsyncLLM(model, TOKENIZER, **OPTIONS) as llm:
        final = several(3, 400, output_kind=RequestOutputKind.FINAL_ONLY)
        model.gate.clear()
        task = asyncio.create_task(collect(llm.generate([7], final, "x")))
        while "x" not in llm.engine._live:
            await asyncio.sleep(0.001)
        children = llm.engine._live["x"].children
        children[failing].fail(CBatchError("a failure"), aborted=True)
        try:
            with pytest.raises(CBatchError, match="a failure"):
                await asyncio.wait_for(task, 5)
            assert all(child.finished and not child._async_result_waiters for child in children)  # the others by abort
        finally:
            model.gate.set()
        await asyncio.to_thread(settle, llm.engine)


async def test_final_output_of_a_thousand_answers_leaves_the_loop_to_others(engine):
    """It began to wait for each of them at once: 16,384 held up every other stream for 0.6 s."""
    engine.model.gate.clear()
    handle = engine.submit([7], several(1000, 2))
    waiting = asyncio.create_task(handle.aresult())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begun = sum(bool(child._async_result_waiters) for child in handle.children)
    engine.model.gate.set()
    assert 0 < begun <= 128
    assert len((await waiting).outputs) == 1000


async def test_leaving_a_stream_of_several_aborts_them_all():
    async with AsyncLLM(CountingModel(VOCAB, max_model_len=512), TOKENIZER, **OPTIONS) as llm:
        async for output in llm.generate([7], several(3, 400)):
            assert len(output.outputs) == 3
            break
        stream = llm.generate([7], several(3, 400), request_id="x")
        seen = []
        async for output in stream:
            seen.append(output)
            await llm.abort("x")
        assert [answer.finish_reason for answer in seen[-1].outputs] == ["abort"] * 3
        task = asyncio.create_task(collect(llm.generate([7], several(3, 400))))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(settle, llm.engine)
