"""Turns prompts, conversations and bad words into token ids, in the caller's thread.

Checks the form of prompts and conversations, and renders chat templates. Keeps no state. Knows a transformers
tokenizer; the engine checks the ids and their number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from cbatch.errors import InvalidRequestError, PromptTooLongError, described, short
from cbatch.tokenizer import least_tokens, lock_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LONG_TEXT = 100_000  # characters: some 0.1 s of tokenising


class PromptLike:
    """A user's prompt, parsed: its ``token_ids``, or else its ``text``; its ``cache_salt``."""

    __slots__ = ("cache_salt", "text", "token_ids")

    def __init__(self, prompt: Any) -> None:
        self.text: str | None = None
        self.token_ids: list[int] | None = None
        self.cache_salt: Any = None  # checked by the engine
        if isinstance(prompt, Mapping):
            keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            unknown = set(prompt) - {"prompt_token_ids", "prompt", "cache_salt"}
            if not keys or unknown:
                raise InvalidRequestError(
                    f"prompt {short(prompt)} must hold prompt or prompt_token_ids, and nothing else but cache_salt"
                )
            self.cache_salt = prompt.get("cache_salt")
            if "prompt_token_ids" in keys:
                self.token_ids = _token_ids(prompt["prompt_token_ids"])
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt {short(text)} must be text, not {type(text).__name__}")
            self.text = text
        elif isinstance(prompt, str):
            self.text = prompt
        else:
            self.token_ids = _token_ids(prompt)

    def encode(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int | None = None) -> list[int]:
        """Its token ids. Takes about a millisecond per 1,000 characters of text."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return encode_prompt(tokenizer, self.text, max_model_len=max_model_len)


def _token_ids(value: Any) -> list[int]:
    """The ids as a list; the engine checks its items."""
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"prompt {short(value)} must be text, a list of token ids or a dict, not {type(value).__name__}"
        )
    return list(value)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    text: str,
    *,
    add_special_tokens: bool = True,
    max_model_len: int | None = None,
    what: str = "prompt",
) -> list[int]:
    """Token ids of a text, with the tokenizer's special tokens. Errors call the text ``what``.

    Thread-safe: holds the tokenizer's lock, since a fast tokenizer changes its own state when it is called.

    Raises:
        InvalidRequestError: there is no tokenizer, or the text cannot be encoded.
        PromptTooLongError: ``max_model_len`` tokens cannot hold a text of this length. Raised without encoding, which
            takes 8 s for 5 million characters and would block the tokenizer for all others.
    """
    if tokenizer is None:
        raise InvalidRequestError(f"{what} {short(text)} is text, but there is no tokenizer: pass token ids")
    if (
        max_model_len is not None
        and len(text) > _LONG_TEXT
        and (least := least_tokens(tokenizer, text)) >= max_model_len
    ):
        raise PromptTooLongError(
            f"request: {len(text)} characters are at least {least} prompt tokens, but max_model_len is {max_model_len} "
            "and one token must have room"
        )
    with lock_of(tokenizer):
        try:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # fast tokenizers raise TypeError for a lone surrogate
            lone = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            why = error if lone is None else f"character {lone} is a lone surrogate, {text[lone]!r}"
            raise InvalidRequestError(f"{what} {short(text)} is not valid Unicode text: {why}") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise InvalidRequestError(f"{what} {short(text)}: the tokenizer failed: {described(error)}") from error
    return list(ids)


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> dict[str, list[tuple[int, ...]]]:
    """The token sequences of each word, alone and behind a space; an empty list if the word has no tokens.

    Raises:
        InvalidRequestError: a word cannot be encoded.
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    for word in words:
        plain, spaced = (
            tuple(encode_prompt(tokenizer, space + word.lstrip(), add_special_tokens=False, what="bad_words item"))
            for space in ("", " ")
        )
        if not plain:
            found[word] = []
        elif spaced[-len(plain) :] == plain:  # the space is a separate token: ``plain`` matches both
            found[word] = [plain]
        else:
            found[word] = [plain, spaced]
    return found


def check_conversation(messages: Any) -> None:
    """Raises InvalidRequestError if these are not messages of a chat; the error says why."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"a conversation must be a list of messages, each a dict of role and content, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message")
    for number, message in enumerate(messages):
        # An assistant's tool calls need no content.
        whole = isinstance(message, Mapping) and "role" in message and ("content" in message or "tool_calls" in message)
        if not whole:
            raise InvalidRequestError(f"message {number} is {short(message)}: it must be a dict of role and content")
        if not isinstance(message["role"], str):
            raise InvalidRequestError(f"message {number} has the role {short(message['role'])}: it must be a string")
        content = message.get("content")  # a template would write other types as Python: 5, None
        if not (isinstance(content, (str, list, tuple)) or (content is None and "tool_calls" in message)):
            raise InvalidRequestError(
                f"message {number} has {short(content)} for content: it must be text or a list of parts, or None "
                "beside tool_calls"
            )


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Text of a conversation as the chat template writes it, special tokens included. Arguments: see ``LLM.chat``.

    Raises:
        InvalidRequestError: there is no tokenizer or template, the messages have another form, or the template refuses
            them or does not use a given argument.
    """
    if tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer, and there is none: use generate with token ids")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("the tokenizer has no chat template: pass chat_template, or use generate")
    check_conversation(messages)
    for name, flag in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"{name} is {short(flag)}, but must be True or False")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError("continue_final_message=True needs add_generation_prompt=False: no new turn begins")
    for name, value, kind in (("tools", tools, Sequence), ("chat_template_kwargs", chat_template_kwargs, Mapping)):
        if value is not None and (not isinstance(value, kind) or isinstance(value, (str, bytes))):
            raise InvalidRequestError(
                f"{name} is {short(value)}, but must be a {'list' if kind is Sequence else 'dict'} or None"
            )
    more: dict[str, Any] = dict(chat_template_kwargs or {})
    try:
        _check_names(tokenizer, chat_template, more, tools)
        if tools:
            more["tools"] = list(tools)
        if continue_final_message:
            more["continue_final_message"] = True
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **more,
        )
    except InvalidRequestError:
        raise
    except Exception as error:  # of any type: a template is a program
        raise InvalidRequestError(f"the chat template refuses these messages: {described(error)}") from error
    assert isinstance(text, str)
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, (list, tuple)) and content and str(content) in text:
            raise InvalidRequestError(
                f"message {number} has {short(content)} for content, which the chat template would write out as "
                "Python: it takes text"
            )
    return text


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    max_model_len: int | None = None,
    **options: Any,
) -> tuple[str, list[int]]:
    """``render_chat`` with its ``options``, and the token ids of that text. Raises as both."""
    text = render_chat(tokenizer, messages, **options)
    # The template wrote the special tokens; the tokenizer would add a second <s>.
    return text, encode_prompt(tokenizer, text, add_special_tokens=False, max_model_len=max_model_len)


def _check_names(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, names: Iterable[str], tools: Sequence[Any] | None
) -> None:
    """Refuse names that the template would ignore, or that ``apply_chat_template`` would take as its own arguments."""
    wanted = [*names, *(["tools"] if tools else [])]
    if not wanted:
        return
    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
    if own := sorted(taken & set(names)):
        raise InvalidRequestError(f"chat_template_kwargs has {own[0]!r}, which is no name of a template's own")
    template: Any = tokenizer.get_chat_template(chat_template, list(tools or ()) or None)
    for name in wanted:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise InvalidRequestError(f"the chat template knows no {name}")
