"""What a user writes, made into token ids in the caller's thread: prompts of each form, chats, words to be banned.

Owns the forms that a prompt and a conversation may have, how a chat template writes the latter out, and what is said
where one cannot be taken. Keeps nothing. Knows a tokenizer of transformers; which ids a model takes and how many, the
engine knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from cbatch.errors import InvalidRequestError, described, short
from cbatch.tokenizer import lock_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptLike:
    """A prompt as a user may write it, taken apart: ``text`` or ``token_ids``, the other is None; ``cache_salt``."""

    __slots__ = ("cache_salt", "text", "token_ids")

    def __init__(self, prompt: Any) -> None:
        self.text: str | None = None
        self.token_ids: list[int] | None = None
        self.cache_salt: Any = None  # what it may be, the engine knows
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

    def encode(self, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
        """Its token ids. Takes about a millisecond per 1,000 characters of text."""
        if self.token_ids is not None:
            return self.token_ids
        assert self.text is not None
        return encode_prompt(tokenizer, self.text)


def _token_ids(value: Any) -> list[int]:
    """A list of ids as it came, only its outer shape checked: what the ids may be, the engine knows."""
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"prompt {short(value)} must be text, a list of token ids or a dict, not {type(value).__name__}"
        )
    return list(value)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None, text: str, *, add_special_tokens: bool = True, what: str = "prompt"
) -> list[int]:
    """Token ids of a prompt (or ``what`` errors call it), with the special tokens that the tokenizer puts around it.

    Safe from many threads, one at a time per tokenizer: a fast tokenizer changes its own state when it is called.

    Raises:
        InvalidRequestError: there is no tokenizer, or the text cannot be encoded.
    """
    if tokenizer is None:
        raise InvalidRequestError(f"{what} {short(text)} is text, but there is no tokenizer: pass token ids")
    with lock_of(tokenizer):
        try:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # fast tokenizers say TypeError to a lone surrogate
            lone = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            why = error if lone is None else f"character {lone} is a lone surrogate, {text[lone]!r}"
            raise InvalidRequestError(f"{what} {short(text)} is not valid Unicode text: {why}") from None
    return list(ids)


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> dict[str, list[tuple[int, ...]]]:
    """The token sequences of each word: as it is, and as it is behind a space. None where it has no tokens.

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
        elif spaced[-len(plain) :] == plain:  # the space is a token of its own, and the rest is found anyhow
            found[word] = [plain]
        else:
            found[word] = [plain, spaced]
    return found


def check_conversation(messages: Any) -> None:
    """Whether these are messages of a chat.

    Raises:
        InvalidRequestError: they are not; the message says what is wrong with them.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"a conversation must be a list of messages, each a dict of role and content, not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("a conversation needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InvalidRequestError(f"message {number} is {short(message)}: it must be a dict of role and content")


def render_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a conversation as the model's chat template writes it, special tokens included.

    Args:
        messages: ``{"role": ..., "content": ...}``, oldest first.
        chat_template: a Jinja template instead of the tokenizer's own.
        add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
        InvalidRequestError: no tokenizer, no template, messages of another shape, or the template refuses them.
    """
    if tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer, and there is none: use generate with token ids")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("the tokenizer has no chat template: pass chat_template, or use generate")
    check_conversation(messages)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # anything: a template is a program of somebody else's
        raise InvalidRequestError(f"the chat template refuses these messages: {described(error)}") from error
    assert isinstance(text, str)
    return text
