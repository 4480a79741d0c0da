"""Prompts, chats and banned words become token ids, or are refused with what is wrong with them."""

import json
import random
import threading

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer
from transformers import PreTrainedTokenizerFast

from cbatch.errors import InvalidRequestError, PromptTooLongError
from cbatch.prompts import PromptLike, bad_word_ids, encode_prompt, render_chat
from cbatch.tokenizer import least_tokens
from tests.api.tiny import CHAT_TEMPLATE, MAKERS, byte_level, metaspace


def test_many_threads_encode_with_one_tokenizer():
    """A fast tokenizer that carries a truncation changes itself at each call, and two at once are an error in it."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(8)
    expected = tokenizer("hello world " * 50)["input_ids"]
    failures = []

    def work():
        try:
            for _ in range(50):
                assert encode_prompt(tokenizer, "hello world " * 50) == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_prompt_keeps_the_special_tokens_of_its_tokenizer():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", tokenizer.bos_token_id)]
    )
    assert encode_prompt(tokenizer, "hello")[0] == tokenizer.bos_token_id
    assert encode_prompt(tokenizer, "hello", add_special_tokens=False)[0] != tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("hello", "hello", None),
        ([1, 2], None, [1, 2]),
        ((1, 2), None, [1, 2]),
        ({"prompt": "hello"}, "hello", None),
        ({"prompt_token_ids": [1]}, None, [1]),
        ({"prompt": "hello", "prompt_token_ids": [1]}, "hello", [1]),
        ([], None, []),
    ],
)
def test_prompt_forms(prompt, text, token_ids):
    taken = PromptLike(prompt)
    assert (taken.text, taken.token_ids) == (text, token_ids)


@pytest.mark.parametrize("prompt", [None, 7, {}, {"text": "a"}, {"prompt": 3}, {"prompt_token_ids": "abc"}, b"abc"])
def test_prompts_of_no_known_form_are_refused(prompt):
    with pytest.raises(InvalidRequestError, match="prompt"):
        PromptLike(prompt)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(InvalidRequestError, match=r"not valid Unicode text: character 1 is a lone surrogate, '.ud800'"):
        encode_prompt(byte_level(), "a\ud800b")


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        PromptLike("hello").encode(None)


def test_chat_is_rendered_by_the_template():
    tokenizer = byte_level()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render_chat(tokenizer, messages)
    text = "[system]Be kind.\n[user]Hi\n[assistant]"
    assert render_chat(tokenizer, messages, chat_template=CHAT_TEMPLATE) == text
    tokenizer.chat_template = CHAT_TEMPLATE
    assert render_chat(tokenizer, messages) == text
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == text.removesuffix("[assistant]")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one"),
        ([{"role": "user"}], "message 0"),
        (["hello"], "message 0"),
        ([{"role": "bad", "content": ""}], "no bad ones"),
        ([{"role": "user", "content": "a"}, {"role": 5, "content": "a"}], "message 1 has the role 5"),
        # which the template would write out as "None" and "5"
        ([{"role": "user", "content": None}], "message 0 has None for content"),
        ([{"role": "user", "content": 5}], "message 0 has 5 for content"),
        ([{"role": "user", "content": {"text": "a"}}], "for content: it must be text"),
    ],
)
def test_conversations_of_another_shape_are_refused(messages, says):
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(InvalidRequestError, match=says):
        render_chat(tokenizer, messages)


TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% if not think %}[quick]{% endif %}"


def test_tools_and_names_of_a_template_reach_it():
    tokenizer = byte_level()
    tokenizer.chat_template = TOOLS + CHAT_TEMPLATE

    def add(a: int) -> int:
        """Adds one.

        Args:
            a: the number
        """
        return a + 1

    messages = [{"role": "user", "content": "Hi"}]
    text = "[user]Hi\n[assistant]"
    assert render_chat(tokenizer, messages, tools=[]) == "[quick]" + text
    for tool in (add, {"type": "function", "function": {"name": "add"}}):
        found = render_chat(tokenizer, messages, tools=[tool], chat_template_kwargs={"think": True})
        assert found == "<add>" + text
    calls = [*messages, {"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "3"}]
    assert render_chat(tokenizer, calls) == "[quick][user]Hi\n[assistant]\n[tool]3\n[assistant]"


def test_final_message_is_gone_on_with():
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    found = render_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert found == "[user]Hi\n[assistant]Well,"
    with pytest.raises(InvalidRequestError, match="add_generation_prompt=False"):
        render_chat(tokenizer, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "knows no tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "knows no enable_thinking"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize', which is no name"),
        ({"chat_template_kwargs": {"tools": []}}, "'tools', which is no name"),
        ({"chat_template_kwargs": "think"}, "must be a dict or None"),
        ({"tools": {"type": "function"}}, "must be a list or None"),
        ({"tools": [5]}, "refuses|knows no tools"),
    ],
)
def test_what_a_template_would_ignore_is_refused(more, says):
    """A template says nothing of names that it does not know, and the model would never hear of the tools."""
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(InvalidRequestError, match=says):
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}], **more)


def test_parts_of_content_are_refused_where_the_template_takes_text():
    """It would put ``[{'type': 'text', ...`` before the model."""
    tokenizer = byte_level()
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    with pytest.raises(InvalidRequestError, match=r"message 0 has .* it takes text"):
        render_chat(tokenizer, messages, chat_template=CHAT_TEMPLATE)
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert render_chat(tokenizer, messages, chat_template=parts) == "Hi"


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_no_text_has_fewer_tokens_than_said(make):
    """By that number a text is refused unread, so it must hold for every text: of long tokens, of added tokens, of
    characters that are composed, fall apart into bytes, or have no token."""
    tokenizer, rng = make(), random.Random(0)
    kinds = [" \n\t", "abc the hello", "你好世界👨‍👩‍👧🎉é\u0302\u0301", "\x00\x04\x7f\u1f82 \U00050000A"]
    texts = ["".join(rng.choices(kind, k=k)) for kind in kinds for k in (50, 500)]
    texts += [
        "the lazy dog " * 50,
        " " * 999,
        "hello" * 99,
        "<|end|></s><s>" * 50,
        "don't stop 123" * 50,
        "界你世" * 99,
    ]
    for text in texts:
        assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text))
    assert (least_tokens(tokenizer, "hello" * 10_000) > 1000) == (make is not metaspace)  # which may join unknown ones


@pytest.mark.parametrize("drop", ["split", "spaces", "bytes"])
def test_nothing_is_said_of_a_tokenizer_that_drops_characters(drop):
    tokenizer = byte_level()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if drop == "split":
        split = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    elif drop == "spaces":
        state["added_tokens"][0]["rstrip"] = True
    else:
        state["model"]["merges"] = []
        state["model"]["vocab"] = {token: i for token, i in state["model"]["vocab"].items() if token not in ("x", "Ģ")}
    text = {"split": "x", "spaces": " ", "bytes": "x"}[drop] * 10_000
    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert least_tokens(found, text) == 0


def test_a_tokenizer_with_parts_in_python_says_nothing_of_a_long_text():
    """It can be written into no file, and ``tokenizers`` raised that at the first prompt over 100,000 characters."""

    class Whole:
        def pre_tokenize(self, text):
            text.split(lambda _, part: [part])

    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())
    text = "ab" * 60_000
    assert encode_prompt(tokenizer, text, max_model_len=100) == tokenizer.encode(text)


@pytest.mark.parametrize("affix", [{"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}])
def test_nothing_is_said_where_a_byte_goes_by_another_name_inside_of_a_word(affix):
    """The vocabulary has every byte, but none as it stands behind another or ends a word: those are dropped."""
    made = Tokenizer(BPE({char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, [], **affix))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer, text = PreTrainedTokenizerFast(tokenizer_object=made), "hello " * 20
    assert len(tokenizer.encode(text)) < len(text)
    assert least_tokens(tokenizer, text) == 0


def test_a_long_token_that_is_added_later_counts():
    """A text of it was refused by the longest token that there had been at first."""
    tokenizer, text = byte_level(), "x" * 5000
    assert least_tokens(tokenizer, text) > 2
    tokenizer.add_tokens("x" * 2500)
    assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text)) == 2


def test_text_far_too_long_is_refused_unread(monkeypatch):
    """A megabyte takes a second or more to encode, and meanwhile nobody else's prompt was."""
    tokenizer = byte_level()
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(PromptTooLongError, match="3000000 characters are at least 166666 prompt tokens, but max_model"):
        PromptLike("x" * 3_000_000).encode(tokenizer, 2048)


def test_chat_without_a_tokenizer_is_refused():
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        render_chat(None, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_bad_words_are_banned_at_the_start_and_behind_a_space(maker):
    """Were only one of the two, the model would say the other."""
    tokenizer = maker()
    found = bad_word_ids(tokenizer, ["hello", " world", "fox jumps", "你", " "])
    assert list(found) == ["hello", " world", "fox jumps", "你", " "]
    assert found.pop(" ") == []
    for word, sequences in found.items():
        shown = [tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for ids in sequences]
        assert shown[0].strip() == word.strip()
        text = tokenizer.encode(f"a {word.strip()}", add_special_tokens=False)
        assert any(tuple(text[-len(ids) :]) == ids for ids in sequences), "it could still come behind a space"
    with pytest.raises(InvalidRequestError, match=r"bad_words item 'a.ud800' is not valid Unicode"):
        bad_word_ids(tokenizer, ["a\ud800"])
