"""`LLM`: many prompts in, answers out in order, and nothing left behind when it goes wrong."""

import gc
import pickle
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from cbatch import (
    LLM,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
)
from tests.api.tiny import CHAT_TEMPLATE, byte_level
from tests.counting import CountingModel, counted
from tests.waiting import wait_until

TOKENIZER = byte_level()
VOCAB = len(TOKENIZER)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def make(model=None, tokenizer=TOKENIZER, **options):
    options = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, **options}
    return LLM(CountingModel(VOCAB, max_model_len=512) if model is None else model, tokenizer, **options)


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


def tokens(output):
    return output.outputs[0].token_ids


def test_answers_stand_in_the_order_of_the_prompts(llm):
    """Long and short ones mixed, so that they end in another order, and more than run at once."""
    prompts = [[10 + i] for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 7 * i % 30) for i in range(20)]
    outputs = llm.generate(prompts, params)
    assert [tokens(o) for o in outputs] == [counted(10 + i, 1 + 7 * i % 30, VOCAB) for i in range(20)]
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert len({o.request_id for o in outputs}) == 20


def test_prompts_may_be_text_or_ids_or_dicts(llm):
    hello = TOKENIZER.encode("hello")
    outputs = llm.generate(["hello", hello, {"prompt": "hello"}, {"prompt_token_ids": hello}, tuple(hello)], GREEDY)
    assert {tuple(tokens(o)) for o in outputs} == {tuple(counted(hello[-1], 6, VOCAB))}
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None, None]
    assert all(o.prompt_token_ids == hello for o in outputs)


@pytest.mark.parametrize(
    "prompts", ["hello", {"prompt": "hello"}, TOKENIZER.encode("hello"), np.array([40, 41]), [*np.array([40, 41])]]
)
def test_one_prompt_needs_no_list(llm, prompts):
    assert len(llm.generate(prompts, GREEDY)) == 1


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.generate([]) == []
    assert llm.chat([], GREEDY) == []


def test_text_is_the_decode_of_the_tokens(llm):
    output = llm.generate([TOKENIZER.encode("hello")], SamplingParams(temperature=0.0, max_tokens=60))[0]
    assert output.outputs[0].text == TOKENIZER.decode(tokens(output), skip_special_tokens=True)
    assert llm.get_tokenizer() is TOKENIZER


def test_text_can_be_left_out(llm):
    assert llm.generate("hello", SamplingParams(max_tokens=3, detokenize=False))[0].outputs[0].text == ""


def test_stop_token_is_among_the_tokens_and_not_in_the_text():
    with make(CountingModel(VOCAB, eos=(50,))) as llm:
        eos = llm.generate([[45]], SamplingParams(temperature=0.0))[0].outputs[0]
        assert (eos.token_ids, eos.finish_reason, eos.stop_reason) == ([46, 47, 48, 49, 50], "stop", None)
        assert eos.text == TOKENIZER.decode([46, 47, 48, 49])
        own = llm.generate([[45]], SamplingParams(temperature=0.0, stop_token_ids=[48]))[0].outputs[0]
        assert (own.token_ids, own.finish_reason, own.stop_reason) == ([46, 47, 48], "stop", 48)


def test_without_parameters_the_generation_config_decides(llm):
    assert len(tokens(llm.generate([[1]])[0])) == 16


def test_as_many_parameters_as_prompts_or_the_call_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="3 prompts, but 2 sampling_params"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate([[1]], {"temperature": 0})
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate([[1]], [None])


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (None, "NoneType"),
        (7, "int"),
        ([[1], []], "empty"),
        ([[1], [-1]], "-1"),
        ([[1], [VOCAB]], str(VOCAB)),
        ([[1], [1.5]], "1.5"),
        ([[1], None], "None"),
        ([1, "a"], "integers"),
        ([[1], ""], "empty"),
        ([[1], [1] * 512], "max_model_len"),
    ],
)
def test_bad_prompt_fails_its_call_alone(llm, prompts, says):
    """The call raises and leaves nothing running; a request of another caller goes on to its end."""
    other = llm.engine.submit([5], SamplingParams(temperature=0.0, max_tokens=200))
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=400))
    assert tokens(other.result(30)) == counted(5, 200, VOCAB)
    wait_until(lambda: llm.engine.stats()["num_running"] == 0)


def test_what_was_submitted_before_the_bad_prompt_is_aborted():
    model = CountingModel(VOCAB)
    model.gate.clear()  # nothing can finish meanwhile
    with make(model) as llm:
        try:
            with pytest.raises(PromptTooLongError):
                llm.generate([[1], [2], [1] * 200], GREEDY)
        finally:
            model.gate.set()
        wait_until(lambda: llm.engine.stats()["num_running"] + llm.engine.stats()["num_waiting"] == 0)
        assert model.num_forwards <= 2
        assert tokens(llm.generate([[1]], GREEDY)[0]) == counted(1, 6, VOCAB)


def test_chat_of_one_and_of_many():
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    one = [{"role": "user", "content": "hello"}]
    two = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with make(tokenizer=tokenizer) as llm:
        assert [o.prompt for o in llm.chat(one, GREEDY)] == ["[user]hello\n[assistant]"]
        outputs = llm.chat([one, two], [GREEDY, GREEDY])
        assert [o.prompt for o in outputs] == ["[user]hello\n[assistant]", "[system]a\n[user]b\n[assistant]"]
        assert llm.chat(one, GREEDY, add_generation_prompt=False)[0].prompt == "[user]hello\n"
        assert llm.chat(one, GREEDY, chat_template="{{ messages[0].content }}")[0].prompt == "hello"


def test_chat_without_a_template_says_so(llm):
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY)


ONE = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "messages",
    [None, 5, ONE[0], "hello", (m for m in ONE), np.array([ONE[0]]), [5], [ONE, 5], [ONE, ONE[0]], [ONE, []]],
)
def test_what_is_no_conversation_is_refused(messages):
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    with make(tokenizer=tokenizer) as llm, pytest.raises(InvalidRequestError, match="conversation"):
        llm.chat(messages, GREEDY)


def test_template_that_fails_is_an_error_of_the_request(llm):
    """A template is a program: it can fail in any way, and whoever catches CBatchError should hear of it."""
    for template in ("{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% if %}", 5):
        with pytest.raises(InvalidRequestError, match="the chat template refuses these messages"):
            llm.chat(ONE, GREEDY, chat_template=template)


def test_one_bad_prompt_of_many_is_named_by_its_number(llm):
    """Whether it is refused for its form, its text or its tokens, before or after others went to the engine."""
    for bad, says in (({}, "must hold"), (None, "must be text"), ("a\ud800", "surrogate"), ([VOCAB], "token id")):
        with pytest.raises(InvalidRequestError, match=f"^prompt 2: .*{says}"):
            llm.generate([[1], [2], bad, [3]], GREEDY)
    with pytest.raises(PromptTooLongError, match=r"^prompt 1: 512 prompt tokens"):
        llm.generate([[1], [1] * 512], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"^conversation 1: message 0 is 'hello'"):
        llm.chat([ONE, ["hello"]], GREEDY, chat_template=CHAT_TEMPLATE)
    with pytest.raises(InvalidRequestError, match=r"^request: token id"):  # of one there is no number to tell
        llm.generate([[VOCAB]], GREEDY)


@pytest.mark.parametrize("tokenizer", [5, True, ["tokenizer"], object(), type(TOKENIZER), TOKENIZER.backend_tokenizer])
def test_what_is_no_tokenizer_is_refused_before_anything_is_loaded(tokenizer):
    with pytest.raises(ConfigError, match=r"tokenizer is .* but must be"):
        LLM("no-such-model", tokenizer)


def test_without_a_tokenizer_tokens_work_and_text_is_refused():
    with make(tokenizer=None) as llm:
        output = llm.generate([[1]], GREEDY)[0]
        assert (tokens(output), output.outputs[0].text) == (counted(1, 6, VOCAB), "")
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            llm.generate("hello")
        assert llm.get_tokenizer() is None


def test_outputs_pickle_with_their_times(llm):
    output = llm.generate([[1]], GREEDY)[0]
    assert pickle.loads(pickle.dumps(output)) == output
    times = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


def test_many_threads_each_get_their_own(llm):
    results = {}

    def work(start):
        results[start] = [tokens(o) for o in llm.generate([[start + i] for i in range(5)], GREEDY)]

    threads = [threading.Thread(target=work, args=(20 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {20 * n: [counted(20 * n + i, 6, VOCAB) for i in range(5)] for n in range(8)}


def test_progress_bar_is_shown_when_asked_for_and_counts_to_the_end(llm, capsys):
    outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=True)
    assert [tokens(o) for o in outputs] == [counted(i, 6, VOCAB) for i in (1, 2, 3)]
    printed = capsys.readouterr()
    assert "3/3" in printed.err
    assert "18 tokens" in printed.err
    assert printed.out == ""


def test_no_progress_bar_where_stderr_is_no_terminal(llm, capsys):
    llm.generate([[1]], GREEDY)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_ctrl_c_leaves_at_once_and_aborts(use_tqdm):
    model = CountingModel(VOCAB)
    with make(model) as llm:
        model.gate.clear()
        main = threading.main_thread().ident
        timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i] for i in range(20)], GREEDY, use_tqdm=use_tqdm)
        assert time.monotonic() - started < 2
        model.gate.set()
        wait_until(lambda: llm.engine.stats()["num_running"] + llm.engine.stats()["num_waiting"] == 0)
        wait_until(lambda: llm.engine.stats()["num_free_blocks"] == llm.engine.stats()["num_blocks"])
        assert tokens(llm.generate([[1]], GREEDY)[0]) == counted(1, 6, VOCAB)


def test_engine_that_dies_is_heard_of():
    model = CountingModel(VOCAB)
    model.fail_at = 3
    with make(model) as llm, pytest.raises(EngineDeadError, match="injected failure"):
        llm.generate([[1], [2]], GREEDY)


def test_close_twice_and_use_after():
    llm = make()
    llm.generate([[1]], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([[1]], GREEDY)


def test_dropping_the_last_reference_ends_the_engine():
    llm = make()
    llm.generate([[1]], GREEDY)
    engine = weakref.ref(llm.engine)
    thread = llm.engine._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_two_at_once():
    with make() as one, make() as two:
        assert tokens(one.generate([[1]], GREEDY)[0]) == tokens(two.generate([[1]], GREEDY)[0])
        one.close()
        assert tokens(two.generate([[1]], GREEDY)[0]) == counted(1, 6, VOCAB)


def test_model_by_name_of_a_folder(tiny_model):
    with LLM(str(tiny_model), num_blocks=50) as llm:
        sampled = SamplingParams(temperature=0.8, seed=-5, max_tokens=8)
        first, second = llm.generate(["hello world", "hello world"], sampled)
        assert tokens(first) == tokens(second) != []
        assert first.outputs[0].text == llm.get_tokenizer().decode(tokens(first), skip_special_tokens=True)
        chat = llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0]
        assert chat.prompt_token_ids == llm.get_tokenizer().encode("[user]hello\n[assistant]")


def test_tokenizer_by_name_of_a_folder(tiny_model):
    with make(tokenizer=str(tiny_model)) as llm:
        assert llm.generate("hello", GREEDY)[0].prompt_token_ids == TOKENIZER.encode("hello")


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried to allocate 2.00 GiB.", "can't allocate memory: you tried"]
)
def test_model_that_does_not_fit_is_told_like_an_engine_that_does_not(monkeypatch, message):
    """The first error of who takes too large a model for the card was torch's own, from deep within the loading."""

    def load(*_):
        raise torch.OutOfMemoryError(message) if "CUDA" in message else RuntimeError(message)

    monkeypatch.setattr("cbatch.engine.resolve_model", load)
    with pytest.raises(ConfigError, match=r"^big/model: no memory left for the model itself.*dtype=float16.*memory"):
        LLM("big/model", dtype="float16")
    monkeypatch.setattr("cbatch.engine.resolve_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM("big/model")
