"""`AsyncLLM`: streams that hold their own tokens and nobody else's, and end when nobody listens."""

import asyncio
import itertools
import threading
from dataclasses import replace

import pytest

from cbatch import (
    AsyncLLM,
    BeamSearchParams,
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    request,
)
from cbatch import async_llm as module
from tests.api.tiny import CHAT_TEMPLATE, byte_level
from tests.counting import CountingModel, counted
from tests.waiting import settle

TOKENIZER = byte_level()
VOCAB = len(TOKENIZER)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
LONG = SamplingParams(temperature=0.0, max_tokens=400)


def make(model=None, tokenizer=TOKENIZER, **options):
    options = {"num_blocks": 500, "block_size": 4, "max_num_seqs": 8, **options}
    return AsyncLLM(CountingModel(VOCAB, max_model_len=512) if model is None else model, tokenizer, **options)


async def collect(stream):
    return [output async for output in stream]


async def test_cumulative_outputs_grow_to_the_whole():
    async with make() as llm:
        outputs = await collect(llm.generate("hello", LONG))
        hello = TOKENIZER.encode("hello")
        whole = counted(hello[-1], 400, VOCAB)
        assert outputs[-1].outputs[0].token_ids == whole
        assert outputs[-1].outputs[0].text == TOKENIZER.decode(whole, skip_special_tokens=True)
        for before, after in itertools.pairwise(outputs):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[0].prompt == "hello"
        assert outputs[0].prompt_token_ids == hello


async def test_deltas_joined_are_the_whole():
    async with make() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=400, output_kind=RequestOutputKind.DELTA)
        outputs = await collect(llm.generate([7], params))
        whole = counted(7, 400, VOCAB)
        assert [token for o in outputs for token in o.outputs[0].token_ids] == whole
        assert "".join(o.outputs[0].text for o in outputs) == TOKENIZER.decode(whole, skip_special_tokens=True)


async def test_final_only_gives_one_output():
    async with make() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = await collect(llm.generate([7], params))
        assert output.finished
        assert output.outputs[0].token_ids == counted(7, 50, VOCAB)
        assert output.outputs[0].text == TOKENIZER.decode(counted(7, 50, VOCAB))


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 1}, {"logprobs": 2, "prompt_logprobs": 1}])
async def test_final_only_wakes_the_loop_for_the_end_alone(more, monkeypatch):
    """The loop was woken for each token and took it, although nothing was to be seen before the last one."""
    wakes = []
    resolve = request._resolve
    monkeypatch.setattr(request, "_resolve", lambda waiters: (wakes.append(waiters), resolve(waiters)))
    async with make() as llm:
        fields = {"temperature": 0.0, "max_tokens": 100, **more}
        stream = await collect(llm.generate([7], SamplingParams(**fields)))
        wakes.clear()
        final = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = await collect(llm.generate({"prompt_token_ids": [7]}, final))
        assert 1 <= len(wakes) <= final.n
        assert (output.finished, output.prompt, output.prompt_token_ids) == (True, None, [7])
        assert output.prompt_logprobs == stream[-1].prompt_logprobs
        for one, other in zip(output.outputs, stream[-1].outputs, strict=True):
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob)
            assert replace(one, cumulative_logprob=None) == replace(other, cumulative_logprob=None)


async def test_final_only_ends_by_abort_by_leaving_and_with_the_engine():
    model = CountingModel(VOCAB, max_model_len=512)
    final = replace(LONG, output_kind=RequestOutputKind.FINAL_ONLY)
    llm = make(model)
    model.gate.clear()
    tasks = [asyncio.create_task(collect(llm.generate([7], final, name))) for name in "abc"]
    await asyncio.sleep(0.05)
    await llm.abort("a")
    (output,) = await tasks[0]
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert "b" not in llm.engine._live
    closing = asyncio.create_task(asyncio.to_thread(llm.close))
    model.gate.set()
    with pytest.raises(EngineClosedError):
        await tasks[2]
    await closing


async def test_leaving_the_loop_aborts_the_request():
    async with make() as llm:
        async for output in llm.generate([7], LONG):
            assert not output.finished
            break
        await asyncio.to_thread(settle, llm.engine)
        assert llm.stats()["num_free_blocks"] == llm.stats()["num_blocks"]


async def test_closing_the_stream_aborts_before_it_returns():
    async with make() as llm:
        stream = llm.generate([7], LONG, request_id="a")
        await anext(stream)
        await stream.aclose()
        stream = llm.generate([7], GREEDY, request_id="a")  # so the id is free
        assert (await collect(stream))[-1].finished


async def test_cancelling_the_task_aborts_the_request():
    model = CountingModel(VOCAB, max_model_len=512)
    model.gate.clear()
    async with make(model) as llm:
        task = asyncio.create_task(collect(llm.generate([7], LONG)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        model.gate.set()
        await asyncio.to_thread(settle, llm.engine)
        assert model.num_forwards < 10


async def test_abort_by_id_ends_the_stream_with_what_it_has():
    async with make() as llm:
        outputs = []
        async for output in llm.generate([7], LONG, request_id="a"):
            outputs.append(output)
            await llm.abort("a")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        whole = outputs[-1].outputs[0].token_ids
        assert whole == counted(7, len(whole), VOCAB)
        await llm.abort("a")  # of nothing: nothing happens
        await asyncio.to_thread(settle, llm.engine)


async def test_a_hundred_streams_get_their_own_tokens_and_a_slow_one_holds_back_nobody():
    async with make() as llm:
        slow = llm.generate([3], SamplingParams(temperature=0.0, max_tokens=300))
        await anext(slow)  # and does not read on
        params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 17) for i in range(100)]
        streams = [collect(llm.generate([i], params[i])) for i in range(100)]
        results = await asyncio.wait_for(asyncio.gather(*streams), 60)
        for i, outputs in enumerate(results):
            assert outputs[-1].outputs[0].token_ids == counted(i, 1 + i % 17, VOCAB)
            assert sum(o.finished for o in outputs) == 1
        rest = await collect(slow)
        assert rest[-1].outputs[0].token_ids == counted(3, 300, VOCAB)
        assert len(rest) < 300  # what it had not read came together


async def test_bad_request_fails_alone():
    async with make() as llm:
        good = asyncio.create_task(collect(llm.generate([7], LONG)))
        await asyncio.sleep(0.01)
        for prompt in ([], [VOCAB], [-1], "", [1] * 600):
            with pytest.raises(InvalidRequestError):
                await collect(llm.generate(prompt, GREEDY))
        with pytest.raises(InvalidRequestError):
            llm.generate(None, GREEDY)
        with pytest.raises(InvalidRequestError):
            await collect(llm.generate([1], {"max_tokens": 3}))
        assert (await good)[-1].outputs[0].token_ids == counted(7, 400, VOCAB)


async def test_id_of_a_running_request_is_refused_and_the_first_goes_on():
    async with make() as llm:
        first = llm.generate([7], LONG, request_id="a")
        await anext(first)
        with pytest.raises(DuplicateRequestError):
            await collect(llm.generate([8], GREEDY, request_id="a"))
        assert (await collect(first))[-1].outputs[0].token_ids == counted(7, 400, VOCAB)


async def test_abort_and_submit_again_under_the_same_id():
    """The late tokens of the old request never reach the new one."""
    async with make() as llm:
        for round_ in range(20):
            stream = llm.generate([round_], LONG, request_id="a")
            await anext(stream)
            await llm.abort("a")
            new = await collect(llm.generate([100 + round_], GREEDY, request_id="a"))
            assert new[-1].outputs[0].token_ids == counted(100 + round_, 6, VOCAB)
            assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"


async def test_engine_that_dies_ends_every_stream():
    model = CountingModel(VOCAB)
    model.fail_at = 4
    async with make(model) as llm:
        results = await asyncio.wait_for(
            asyncio.gather(*(collect(llm.generate([i], LONG)) for i in range(12)), return_exceptions=True), 20
        )
        assert {type(result) for result in results} == {EngineDeadError}
        assert not llm.is_healthy


async def test_closing_ends_every_stream():
    llm = make()
    assert llm.is_healthy
    stream = llm.generate([7], LONG)
    await anext(stream)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineClosedError):
        await collect(stream)
    assert not llm.is_healthy
    with pytest.raises(EngineClosedError):
        await collect(llm.generate([7], GREEDY))


async def test_chat_streams():
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    async with make(tokenizer=tokenizer) as llm:
        outputs = await collect(llm.chat([{"role": "user", "content": "hello"}], GREEDY))
        assert outputs[-1].prompt == "[user]hello\n[assistant]"
        assert outputs[-1].finished
        with pytest.raises(InvalidRequestError, match="no bad ones"):
            await collect(llm.chat([{"role": "bad", "content": "hello"}], GREEDY))
        for messages in (None, 5, "hello", {"role": "user", "content": "hello"}, [], [5]):
            with pytest.raises(InvalidRequestError):  # at once, as a prompt of no known form
                llm.chat(messages, GREEDY)


@pytest.mark.parametrize("limit", [0, 10**9])
async def test_long_text_is_tokenised_beside_the_loop(limit, monkeypatch):
    """A megabyte takes a tokenizer about a second, in which no other stream would move."""
    threads = []

    class Spy:
        all_special_ids = ()

        def encode(self, text, **_):
            threads.append(threading.current_thread())
            return [1, 2]

        def decode(self, ids, **_):
            return "x" * len(ids)

    monkeypatch.setattr(module, "_LONG_TEXT", limit)
    async with make(tokenizer=Spy()) as llm:
        await collect(llm.generate("hello", GREEDY))
    assert (threads[0] is threading.main_thread()) == (limit > 0)


@pytest.mark.parametrize("more", [{}, {"bad_words": ["fox"]}])
async def test_loop_does_not_wait_for_a_tokenizer_that_encodes_a_long_text(more, monkeypatch):
    """One call at a time is all that a tokenizer takes. A short prompt waited in the loop itself for a long one's
    thread, and with it every stream."""
    begun, go_on = threading.Event(), threading.Event()
    encode = TOKENIZER.encode

    def slow(text, **how):
        if len(text) > 5000:
            begun.set()
            assert go_on.wait(20)
        return encode(text, **how)

    monkeypatch.setattr(TOKENIZER, "encode", slow)
    async with make() as llm:
        long = asyncio.create_task(collect(llm.generate("z" * 6000, GREEDY)))
        await asyncio.to_thread(begun.wait)
        short = asyncio.create_task(collect(llm.generate("hello", replace(GREEDY, **more))))
        assert (await collect(llm.generate([7], GREEDY)))[-1].finished  # would never be, if the loop stood still
        go_on.set()
        assert (await short)[-1].finished
        with pytest.raises(InvalidRequestError, match="6000 prompt tokens"):
            await long


async def test_abort_by_id_while_a_long_text_is_tokenised(monkeypatch):
    """The engine does not know the id yet. The abort was lost, and the whole answer came."""
    begun, go_on = threading.Event(), threading.Event()
    encode = TOKENIZER.encode

    def slow(text, **how):
        begun.set()
        assert go_on.wait(20)
        return encode(text, **how)

    monkeypatch.setattr(TOKENIZER, "encode", slow)
    monkeypatch.setattr(module, "_LONG_TEXT", 0)
    async with make() as llm:
        stream = asyncio.create_task(collect(llm.generate("hello", LONG, "x")))
        other = asyncio.create_task(collect(llm.generate("hello", GREEDY, "y")))
        search = asyncio.create_task(llm.beam_search("hello", BeamSearchParams(2, 400), "z"))
        await asyncio.to_thread(begun.wait)
        await asyncio.sleep(0)
        await llm.abort("x")
        await llm.abort("z")
        go_on.set()
        assert (await search).outputs[0].finish_reason == "abort"
        assert (await stream)[-1].outputs[0].finish_reason == "abort"
        assert (await other)[-1].outputs[0].finish_reason == "length"
        again = await collect(llm.generate("hello", GREEDY, "x"))
        assert again[-1].outputs[0].finish_reason == "length"


async def test_streams_of_two_loops_in_two_threads():
    async with make() as llm:
        assert llm.get_tokenizer() is TOKENIZER
        other = asyncio.to_thread(lambda: asyncio.run(collect(llm.generate([9], GREEDY))))
        here, there = await asyncio.gather(collect(llm.generate([7], GREEDY)), other)
        assert here[-1].outputs[0].token_ids == counted(7, 6, VOCAB)
        assert there[-1].outputs[0].token_ids == counted(9, 6, VOCAB)
