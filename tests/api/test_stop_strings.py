"""Stop strings: found across tokens while the answer comes, never shown, and everything given back."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CBatchError,
    Engine,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
)
from cbatch.config import EngineConfig
from cbatch.detokenizer import Detokenizer, TextUntilStop
from tests.api.tiny import byte_level, metaspace, sentencepiece_like, spaced, straddling, tiktoken_like
from tests.counting import CountingModel
from tests.waiting import settle

TOKENIZER = byte_level()
TOKENIZERS = [TOKENIZER, straddling(), spaced(), sentencepiece_like(), metaspace(), tiktoken_like()]
EOS = TOKENIZER.eos_token_id
PAD = TOKENIZER.encode("z", add_special_tokens=False)[0]


class TapeModel(CountingModel):
    """Reads from a tape: what follows the token at position p is ``tape[p + 1]``, whatever that token is.

    So each request's answer is chosen by the length of its prompt.
    """

    def __init__(self, tape, tokenizer=TOKENIZER, eos=()):
        super().__init__(len(tokenizer), max_model_len=len(tape), eos=eos)
        self.tape = torch.tensor(tape)

    def forward(self, input_ids, positions, sample_rows, attend):
        self.gate.wait()
        following = self.tape[(positions[sample_rows] + 1).clamp(max=len(self.tape) - 1)]
        return (following[:, None] == torch.arange(self.vocab_size)).float()


def letters(text):
    """One token a character (or a byte): nothing is merged."""
    return [token for char in text for token in TOKENIZER.encode(char, add_special_tokens=False)]


def options(**more):
    return {"max_num_seqs": 4, "block_size": 4, "num_blocks": 400, "max_num_batched_tokens": 64, **more}


def start(answer, tokenizer=TOKENIZER, eos=(), **more):
    """An engine whose model says ``answer`` (token ids) after a prompt of one token."""
    return Engine(TapeModel([PAD, *answer, *[PAD] * 20], tokenizer, eos), EngineConfig(**options(**more)), tokenizer)


def greedy(stop, max_tokens=None, **more):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=stop, **more)


def run(answer, stop, max_tokens=None, **more):
    """The completion of one request alone, by ``result`` and, the same, by chunks."""
    eos = more.pop("eos", ())
    with start(answer, eos=eos) as engine:
        whole = engine.submit([PAD], greedy(stop, max_tokens, **more)).result(30).outputs[0]
        handle, chunks = engine.submit([PAD], greedy(stop, max_tokens, **more)), []
        while not (chunks and chunks[-1].finished):
            chunks.append(handle.next_chunk(30))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert handle.result().outputs[0] == whole
        settle(engine)
    return whole


def shown_by_each_token(answer, stop, **more):
    """What a stream has shown after each token, to the end."""
    text, shown = TextUntilStop(TOKENIZER, [], greedy(stop, **more)), []
    for token in answer:
        found = text.push([token])
        shown.append(text.text)
        if found is not None:
            return shown
    text.push([], "length")
    return [*shown, text.text]


def search(text, stop, include=False):
    """What a plain search gives: text, stop string, length to its end. The earliest end, then the first listed."""
    ends = [(at + len(s), number) for number, s in enumerate(stop) if (at := text.find(s)) >= 0]
    if not ends:
        return text, None, len(text)
    end, number = min(ends)
    return text[: end if include else end - len(stop[number])], stop[number], end


@pytest.mark.parametrize("schedule", ["async", "sync"])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_three_tokens_while_streaming(schedule, include):
    """No character of it is ever shown; where it is to be included it is."""
    answer = letters("hello <|> more")
    shown = shown_by_each_token(answer, "<|>", include_stop_str_in_output=include)
    tail = ["hello <", "hello <|", "hello <|>"] if include else ["hello "] * 3
    assert shown == ["h", "he", "hel", "hell", "hello", "hello ", *tail]

    model = TapeModel([PAD, *answer, *[PAD] * 20])
    async with AsyncLLM(model, TOKENIZER, schedule=schedule, **options()) as llm:
        for kind in RequestOutputKind:
            params = greedy("<|>", output_kind=kind, include_stop_str_in_output=include)
            outputs = [output.outputs[0] async for output in llm.generate([PAD], params)]
            text = outputs[-1].text
            if kind is RequestOutputKind.DELTA:
                text = "".join(output.text for output in outputs)
                assert [token for output in outputs for token in output.token_ids] == answer[:9]
            else:
                assert outputs[-1].token_ids == answer[:9]
                assert all(text.startswith(output.text) for output in outputs)
            assert text == tail[-1]
            assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "<|>")
            assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY
        settle(llm.engine)


def test_stop_at_the_very_first_token():
    answer = run(letters("xyz"), "x")
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", letters("x"), "stop")
    assert run(letters("xyz"), "x", include_stop_str_in_output=True).text == "x"


def test_stop_string_that_is_the_whole_answer():
    answer = run(letters("abc"), ["abc"], max_tokens=3)
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("", letters("abc"), "abc")


def test_of_overlapping_candidates_the_one_that_ends_first_counts_then_the_first_listed():
    for stop in (["ab", "abc"], ["abc", "ab"]):
        answer = run(letters("xxabcd"), stop)
        assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("xx", "ab", 4)
    assert run(letters("xabc"), ["bc", "abc"]).text == "xa"
    assert run(letters("xabc"), ["abc", "bc"]).text == "x"
    assert run(letters("aabaabaac"), ["aabaac"]).text == "aab"  # a false start that the true one overlaps


def test_text_after_the_stop_string_in_its_own_token_is_not_shown():
    (hello,) = TOKENIZER.encode("hello", add_special_tokens=False)
    assert run([hello, hello], ["el"]).text == "h"
    answer = run([hello, hello], ["el"], include_stop_str_in_output=True)
    assert (answer.text, answer.token_ids) == ("hel", [hello])
    assert run([hello, hello], ["lo", "he"]).stop_reason == "he"


@pytest.mark.parametrize("stop", [(), ("xyz",)])
def test_stop_token_is_text_where_stop_strings_are(stop):
    """``include_stop_str_in_output`` was ignored where a token ended the answer; a special one stays out of the text
    unless special tokens are wanted."""
    comma = letters(",")[0]
    for more, text in (
        ({"stop_token_ids": [comma]}, "ab"),
        ({"stop_token_ids": [comma], "include_stop_str_in_output": True}, "ab,"),
        ({"include_stop_str_in_output": True}, "ab,c"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab,c" + TOKENIZER.eos_token),
        ({"skip_special_tokens": False}, "ab,c"),
    ):
        with start([*letters("ab,c"), EOS], eos=(EOS,)) as engine:
            handle = engine.submit([PAD], greedy(stop, 12, **more))
            output = handle.result(20).outputs[0]
            assert (output.text, output.finish_reason) == (text, "stop")


def test_stop_string_inside_multi_byte_text():
    """The token that completes the last byte completes the stop string, and half of it is no text."""
    ids = letters("né🎉界x")
    assert len(ids) > 8
    answer = run(ids, "🎉界")
    assert (answer.text, answer.token_ids) == ("né", ids[:-1])
    assert "\ufffd" not in "".join(shown_by_each_token(ids, "🎉界"))
    assert run(ids[:-2], "🎉界", max_tokens=len(ids) - 2).text == "né🎉\ufffd"  # not complete: all comes out


def test_false_starts_are_released():
    shown = shown_by_each_token(letters("<|a<<|<|>"), "<|>")
    assert shown == ["", "", "<|a", "<|a", "<|a<", "<|a<", "<|a<<|", "<|a<<|", "<|a<<|"]
    answer = run(letters("ab<|"), "<|>", max_tokens=4)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab<|", "length", None)


def test_what_ends_at_the_same_token():
    """A stop string in the last token that max_tokens allows beats length. A stop token has no text to find one in,
    unless it is in the output: then the text ended with the string, and yet ``stop_reason`` was the token."""
    answer = run(letters("abc"), "c", max_tokens=3)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "c")
    answer = run([*letters("ab<"), EOS], "<|", eos=(EOS,))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab<", "stop", None)
    (c,) = letters("c")
    answer = run(letters("abcd"), "c", stop_token_ids=[c])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", c)
    answer = run(letters("abcd"), "bc", stop_token_ids=[c], include_stop_str_in_output=True)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", "bc")
    for special, found in ((True, ("ab<", None)), (False, ("ab<<|", "<|"))):
        more = {"include_stop_str_in_output": True, "skip_special_tokens": special}
        answer = run([*letters("ab<"), EOS], "<|", eos=(EOS,), **more)  # "<|end|>"
        assert (answer.text, answer.stop_reason, answer.finish_reason) == (*found, "stop")
    answer = run([*letters("ab"), EOS, *letters("cd")], "bc", eos=(EOS,), ignore_eos=True)
    assert (answer.text, answer.stop_reason) == ("a", "bc")  # across a token that is not shown


def test_prompt_never_matches():
    prompt = letters("END EN")
    model = TapeModel([*prompt, *letters("D or END."), *[PAD] * 20])
    with LLM(model, TOKENIZER, **options()) as llm:
        (output,) = llm.generate([prompt], greedy("END"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("D or ", "END")


TIGHT = {"num_blocks": 64, "max_num_seqs": 8, "enable_prefix_caching": False}  # prompts that share no blocks


@pytest.mark.parametrize("more", [{"schedule": "sync"}, {}, {"depth": 4}, TIGHT])
def test_requests_with_and_without_stop_in_one_batch_equal_each_alone(more):
    """Each prompt length reads its own place of the tape; the tight pool preempts some of them."""
    tape = letters("".join(f"word{number % 7} ab<{number}|>. " for number in range(40)))
    stops = [(), "|>", ("ab<1", "rd6"), "never", ["6 ", "6 ab"], "<"]
    requests = [
        (tape[: 5 + 11 * i], greedy(stops[i % len(stops)], 40, include_stop_str_in_output=i % 4 == 1))
        for i in range(18)
    ]
    with LLM(TapeModel(tape), TOKENIZER, schedule="sync", **options()) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt, params in requests]
    model = TapeModel(tape)
    model.gate.clear()  # until all are there
    with LLM(model, TOKENIZER, **options(**more)) as llm:
        handles = [llm.engine.submit(prompt, params) for prompt, params in requests]
        model.gate.set()
        together = [handle.result(60) for handle in handles]
        settle(llm.engine)
        assert (llm.engine.stats()["num_preemptions"] > 0) == ("num_blocks" in more)
    llm.engine.scheduler.check()
    assert [output.outputs[0] for output in together] == alone
    for (prompt, params), answer in zip(requests, alone, strict=True):
        whole = tape[len(prompt) : len(prompt) + 40]
        text, stop, end = search(TOKENIZER.decode(whole), params.stop, params.include_stop_str_in_output)
        assert (answer.text, answer.stop_reason, len(answer.token_ids)) == (text, stop, end)
    assert {answer.finish_reason for answer in alone} == {"stop", "length"}


def test_tokens_after_the_stop_string_are_dropped_and_the_id_is_free():
    with start(letters("ab" + "x" * 100)) as engine:
        for _ in range(3):
            assert len(engine.submit([PAD], greedy("ab"), "mine").result(30).outputs[0].token_ids) == 2
        settle(engine)
        assert engine.stats()["steps"] < 30  # not on to the end of the tape
    engine.scheduler.check()


@pytest.mark.parametrize("options", [{}, {"schedule": "sync"}, {"depth": 4}])
def test_tokens_after_the_stop_string_or_an_abort_are_in_no_count(options):
    """The scheduler samples on until it hears of the end: what nobody got was counted as output, a fifth too much."""
    with start(letters("ab" + "x" * 100), **options) as engine:
        rows, land = [], engine.scheduler.land
        engine.scheduler.land = lambda plan, tokens: (rows.append(len(tokens)), land(plan, tokens))[1]
        given = [len(engine.submit([PAD], greedy("ab")).result(30).outputs[0].token_ids) for _ in range(5)]
        for _ in range(5):
            handle = engine.submit([PAD], greedy(()))
            handle.next_chunk(30)
            handle.abort()
            given.append(len(handle.result(30).outputs[0].token_ids))
        given.append(len(engine.submit([PAD], greedy((), 7)).result(30).outputs[0].token_ids))
        engine.close()  # all has been delivered
        stats = engine.stats()
        assert stats["num_output_tokens"] == sum(given)
        assert stats["num_wasted_rows"] == sum(rows) - sum(given)
        engine.reset_stats()
        assert engine.stats()["num_output_tokens"] == engine.stats()["num_wasted_rows"] == 0


async def test_aborted_stream_shows_what_was_held_back():
    """Held back, it may still have become a stop string; now it will not."""
    with start(letters("ab<|" + "x" * 40)) as engine:
        handle = engine.submit([PAD], greedy("<|" + "x" * 40 + "y"))
        got = []
        while len(got) < 4:
            chunk = await handle.anext_chunk()
            got += chunk.token_ids
        handle.abort()
        last = await handle.anext_chunk()
        output = handle.result().outputs[0]
        assert (last.finish_reason, output.finish_reason) == ("abort", "abort")
        assert output.text == TOKENIZER.decode(output.token_ids)
        assert last.text.startswith("<|")


def test_handle_aborted_while_its_tokenizer_works():
    """As the garbage collector may do, from inside the delivery thread."""

    class Aborting(Broken):
        def decode(self, ids, **kwargs):
            if threading.current_thread().name.endswith("delivery"):
                handles[0].abort()
            return super().decode(ids, **kwargs)

    handles = []
    model = TapeModel([PAD, *letters("abcd"), *[PAD] * 20])
    model.gate.clear()
    with Engine(model, EngineConfig(**options()), Aborting()) as engine:
        handles.append(engine.submit([PAD], greedy("a")))
        model.gate.set()
        output = handles[0].result(30).outputs[0]
        assert (output.token_ids, output.finish_reason) == (letters("a"), "abort")
        settle(engine)


class Broken:
    """A user's tokenizer."""

    all_special_ids = ()

    def encode(self, text, **kwargs):
        if "?" in text:
            raise ValueError("no questions")
        return TOKENIZER.encode(text, **kwargs)

    def decode(self, ids, **kwargs):
        text = TOKENIZER.decode(ids, **kwargs)
        if "!" in text:
            raise ValueError("no exclamations")
        return text


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_tokenizer_that_raises_fails_its_own_request_alone(schedule):
    tape = [PAD, *letters("abc!def" + "g" * 60)]
    with Engine(TapeModel(tape), EngineConfig(**options(schedule=schedule)), Broken()) as engine:
        bad = engine.submit([PAD], greedy("never"))
        good = engine.submit([PAD] * 5, greedy("efg"))
        plain = engine.submit([PAD], greedy((), 10, detokenize=False))
        with pytest.raises(CBatchError, match=r"request 0: the tokenizer failed.*no exclamations") as info:
            bad.result(30)
        assert isinstance(info.value.__cause__, ValueError)
        assert list(itertools.islice(bad, 3)) == letters("abc")
        assert (good.result(30).outputs[0].text, good.finish_reason) == ("d", "stop")
        assert plain.result(30).outputs[0].token_ids == tape[1:11]
        assert engine.is_healthy
        settle(engine)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ("never",)}, {"n": 2, "temperature": 1e-4}], ids=str)
async def test_tokenizer_that_raises_is_one_error_whoever_decodes(more):
    """Only with stop strings was it ours: the consumer's thread got whatever the tokenizer raised, such as the
    IndexError of one over sentencepiece, for an id by which a model's vocabulary is padded."""
    tape = [PAD, *letters("abc!def" + "g" * 60)]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "seed": 1, **more})
    failed = pytest.raises(CBatchError, match=r"the tokenizer failed: ValueError: no exclamations")
    async with AsyncLLM(TapeModel(tape), Broken(), **options()) as llm:
        for kind in RequestOutputKind:
            with failed as info:
                async for _ in llm.generate([PAD], replace(params, output_kind=kind)):
                    pass
            assert isinstance(info.value.__cause__, ValueError)
        with failed:
            llm.engine.submit([PAD], params).result(30)
        if not more:
            with failed:
                await llm.beam_search([PAD], BeamSearchParams(2, 8))
            with pytest.raises(
                InvalidRequestError, match=r"prompt 'a\?b': the tokenizer failed: ValueError: no questions"
            ):
                await anext(llm.generate("a?b", params))
        (last,) = [output async for output in llm.generate([PAD] * 5, greedy((), 3)) if output.finished]
        assert last.outputs[0].text == "def"
        settle(llm.engine)
    llm.engine.scheduler.check()


def test_tokenizer_that_fails_on_the_prompt_refuses_the_request_by_its_id():
    """Text behind a prompt begins with a look at its end; that error alone named no request."""
    with Engine(CountingModel(len(TOKENIZER)), EngineConfig(**options()), Broken()) as engine:
        with pytest.raises(CBatchError, match=r"^request x: the tokenizer failed: ValueError: no exclamations"):
            engine.submit(letters("a!"), greedy("y"), "x")
        assert not engine._live and engine.is_healthy


def test_tokenizer_that_makes_no_text_fails_its_own_request_alone():
    class Wordless(Broken):
        def decode(self, ids, **kwargs):
            return None if len(ids) > 2 else "x"

    with Engine(CountingModel(len(TOKENIZER)), EngineConfig(**options()), Wordless()) as engine:
        for stop in ("y", ()):
            with pytest.raises(CBatchError, match="the tokenizer failed: TypeError: it returned a NoneType, not text"):
                engine.submit([1], greedy(stop, 8)).result(30)
        assert engine.is_healthy


def test_engine_without_a_tokenizer_refuses_stop_strings():
    with Engine(CountingModel(), EngineConfig(**options())) as engine:
        with pytest.raises(InvalidRequestError, match="request 7: stop has 'END', but there is no tokenizer"):
            engine.submit([1], greedy("END"), "7")
        assert len(engine.submit([1], greedy((), 3)).result(30).outputs[0].token_ids) == 3


def test_requests_without_stop_strings_make_no_text_in_the_delivery_thread():
    class Counting(Broken):
        threads: ClassVar = set()

        def decode(self, ids, **kwargs):
            self.threads.add(threading.current_thread().name)
            return super().decode(ids, **kwargs)

    with Engine(TapeModel([PAD, *letters("hello")]), EngineConfig(**options()), Counting()) as engine:
        output = engine.submit([PAD], greedy(())).result(30)
    assert output.outputs[0].text == "hello"
    assert Counting.threads == {threading.current_thread().name}


def test_many_streams_with_stop_strings_at_once():
    tape = letters("ab cd <|ef|> gh " * 20)

    async def one(llm, length):
        params = greedy("<|ef|>", 30, output_kind=RequestOutputKind.DELTA)
        return "".join([output.outputs[0].text async for output in llm.generate(tape[:length], params)])

    async def main():
        async with AsyncLLM(TapeModel(tape), TOKENIZER, **options()) as llm:
            return await asyncio.gather(*(one(llm, 1 + i) for i in range(40)))

    assert asyncio.run(main()) == [search(TOKENIZER.decode(tape[1 + i : 31 + i]), ["<|ef|>"])[0] for i in range(40)]


ALPHABET = st.sampled_from(["a", "b", "ab", "é", "🎉", "👩‍🚀", "世", "界", " ", "hello", "\n"])
TEXTS = st.lists(ALPHABET, min_size=1, max_size=30).map("".join)
STOPS = st.lists(st.lists(ALPHABET, min_size=1, max_size=4).map("".join), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TOKENIZERS), TEXTS, STOPS, st.booleans())
def test_streaming_equals_a_search_over_the_whole_text(tokenizer, text, stop, include):
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = Detokenizer(tokenizer, [], SamplingParams()).push(ids, "length")
    expected, reason, end = search(whole, stop, include)

    until = TextUntilStop(tokenizer, [], greedy(stop, include_stop_str_in_output=include))
    by_token, decoded = Detokenizer(tokenizer, [], SamplingParams()), ""
    deltas, found = [], None
    for number, token in enumerate(ids, 1):
        finish = "length" if number == len(ids) else None
        found = until.push([token], finish)
        decoded += by_token.push([token], finish)
        deltas.append(until.take())
        assert expected.startswith("".join(deltas))  # so nothing of a stop string has been shown
        assert (found is not None) == (reason is not None and len(decoded) >= end)
        if found is not None:
            break
        if finish is None:  # no more is held back than may become a stop string
            held = "" if include else decoded[len(until.text) :]
            assert held == "" or any(s.startswith(held) for s in stop)
    assert (until.text, "".join(deltas), found) == (expected, expected, reason)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_repetitive_texts_and_stop_strings(text, stop):
    until = TextUntilStop(TOKENIZER, [], greedy(stop))
    found = None
    for token in letters(text):
        found = found or until.push([token])
        assert search(text, stop)[0].startswith(until.text)
    until.push([], "length")
    assert (until.text, found) == search(text, stop)[:2]


def test_long_stop_string_costs_no_more():
    """It is told character by character what a prefix may become; a plain comparison would look at all prefixes."""
    until = TextUntilStop(TOKENIZER, [], greedy("a" * 20_000 + "b"))
    begin = time.perf_counter()
    for token in letters("a" * 500 + "c"):
        until.push([token])
    assert until.text == "a" * 500 + "c"
    assert time.perf_counter() - begin < 5


def test_many_stop_strings_cost_no_more():
    """The thread that delivers all tokens looked at each of a request's: 1,000 that begin alike took 0.2 ms a token."""

    def seconds(stop):
        until = TextUntilStop(TOKENIZER, [], greedy(stop))
        begin = time.perf_counter()
        for token in letters("a" * 500):
            until.push([token])
        return time.perf_counter() - begin

    one, many = (min(seconds(stop) for _ in range(5)) for stop in (["ab0"], [f"ab{i}" for i in range(10_000)]))
    assert many < 5 * one


@pytest.mark.parametrize(
    ("min_tokens", "text", "count"), [(0, "", 2), (1, "", 2), (2, "abc", 5), (4, "abc", 5), (5, "abcabca", 9)]
)
def test_stop_string_within_min_tokens_is_text(min_tokens, text, count):
    """As a stop token could not come there. One that begins there and ends later counts."""
    answer = run(letters("abcabcaab"), "ab", 9, min_tokens=min_tokens, include_stop_str_in_output=False)
    assert (answer.text, len(answer.token_ids)) == (text, count)


def test_stop_string_that_overlaps_one_within_min_tokens():
    answer = run(letters("aaab"), "aa", 4, min_tokens=2)
    assert (answer.text, len(answer.token_ids)) == ("a", 3)
