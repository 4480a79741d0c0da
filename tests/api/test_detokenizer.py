"""Text made of tokens as they come: nothing lost, nothing doubled, no half characters, whatever the tokenizer."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cbatch.detokenizer import Detokenizer
from cbatch.sampling_params import SamplingParams
from tests.api.tiny import (
    MAKERS,
    byte_level,
    metaspace,
    sentencepiece_like,
    spaced,
    straddling,
    tiktoken_like,
)

FAMILY = "👨‍👩‍👧‍👦"  # four emoji joined by zero-width joiners: 25 bytes, one glyph
WORDS = (
    f"Hello, world! don't {FAMILY} 👩🏽‍🚀 你好，世界。 こんにちは é ä̂ ñ a\u0301\u0323 naïve  two  spaces"
    "\n\ttab 12345 مرحبا हिन्दी"
)


@pytest.fixture(scope="module", params=MAKERS, ids=lambda maker: maker.__name__)
def tokenizer(request):
    return request.param()


def plain(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokenizer, prompt, ids, sizes=lambda: 1, finish="length"):
    """Deltas of `ids` pushed in chunks."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams())
    deltas, at = [], 0
    while True:
        size = sizes()
        chunk = ids[at : at + size]
        at += size
        last = at >= len(ids)
        deltas.append(detokenizer.push(chunk, finish if last else None))
        if last:
            return deltas


@pytest.mark.parametrize(
    "text", [WORDS, FAMILY, "你好，世界。", "ä̂ a\u0301", "hello world", " leading", "trailing ", "\n\n"]
)
def test_deltas_joined_are_the_text_and_hold_no_half_characters(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(tokenizer, [], ids)
    assert "".join(deltas) == plain(tokenizer, ids)
    assert "".join(deltas).replace("\ufffd", "") == "".join(deltas)


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_into_prompt_output_and_chunks_gives_the_same_text(tokenizer, seed):
    rng = random.Random(seed)
    pieces = [FAMILY, "你好", "世界", "é", "a\u0301", "hello", " world", "  ", "\n", "123", "don't", "🎉", "ñ", "हि"]
    text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 60)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = rng.randint(0, len(ids) - 1)
    deltas = stream(tokenizer, ids[:cut], ids[cut:], sizes=lambda: rng.choice([1, 1, 1, 2, 5, 40]))
    joined = "".join(deltas)
    assert "\ufffd" not in joined

    # The output is what the whole has beyond the characters that are complete at the end of the prompt.
    whole = plain(tokenizer, ids)
    before = max((n for n in range(cut + 1) if not plain(tokenizer, ids[:n]).endswith("\ufffd")), default=0)
    # One decoder tells what stands in a token before half a character, another not even the whole one before it.
    prefix = max(plain(tokenizer, ids[:before]), plain(tokenizer, ids[:cut]).rstrip("\ufffd"), key=len)
    assert whole == prefix + joined or whole.removeprefix(" ") == (prefix + joined).removeprefix(" ")


def test_first_word_keeps_its_space_after_a_prompt_and_has_none_without():
    tokenizer = sentencepiece_like()
    prompt = tokenizer.encode("the quick", add_special_tokens=False)
    answer = tokenizer.encode("the quick brown fox", add_special_tokens=False)[len(prompt) :]
    assert "".join(stream(tokenizer, prompt, answer)) == " brown fox"
    assert "".join(stream(tokenizer, [], answer)) == "brown fox"
    assert "".join(stream(tokenizer, [tokenizer.bos_token_id], answer)) == "brown fox"


def test_special_token_in_the_middle_does_not_eat_the_next_space():
    """Decoded in a window of their own, tokens after a skipped special one would look like the start of a text."""
    tokenizer = sentencepiece_like()
    words = tokenizer.encode("hello world the dog", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    ids = [*words[:2], *[eos] * 300, *words[2:]]
    assert "".join(stream(tokenizer, [], ids)) == plain(tokenizer, ids) == "hello world the dog"


def test_special_tokens_are_text_when_asked():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("hello"), tokenizer.eos_token_id, *tokenizer.encode(" world")]
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(skip_special_tokens=False))
    assert "".join(detokenizer.push([token]) for token in ids) == "hello<|end|> world"


def test_prompt_that_ends_inside_a_character_is_completed_by_the_output(tokenizer):
    """The character shows once, in the output; what the prompt holds of it is no text yet."""
    ids = tokenizer.encode("hello 👩🏽 world", add_special_tokens=False)
    for cut in range(1, len(ids)):
        joined = "".join(stream(tokenizer, ids[:cut], ids[cut:]))
        assert "\ufffd" not in joined
        assert "hello 👩🏽 world".endswith(joined)


def test_half_a_character_in_one_token_with_a_space_leaves_the_space_to_the_prompt():
    """The prompt's text ends in that space; an output that completes the character used to say it a second time."""
    tokenizer = spaced()
    *prompt, first, second, third = tokenizer.encode("hello 🎉", add_special_tokens=False)
    assert plain(tokenizer, [*prompt, first]) == "hello \ufffd"
    assert "".join(stream(tokenizer, [*prompt, first], [second, third])) == "🎉"
    assert "".join(stream(tokenizer, [*prompt, first, second], [third])) == "🎉"
    assert "".join(stream(tokenizer, [first], [second, third])) == "🎉"
    assert "".join(stream(tokenizer, prompt, [first, second, third])) == " 🎉"
    hello = tokenizer.encode(" hello", add_special_tokens=False)  # does not complete it
    assert "".join(stream(tokenizer, [*prompt, first], hello)) == " hello"


@pytest.mark.parametrize("maker", [byte_level, sentencepiece_like], ids=lambda maker: maker.__name__)
def test_prompt_that_ends_inside_a_character_which_the_output_does_not_complete(maker):
    """The broken character is the prompt's fault: the output is clean."""
    tokenizer = maker()
    prompt = tokenizer.encode("hello 🎉", add_special_tokens=False)[:-1]
    answer = tokenizer.encode("hello world", add_special_tokens=False)
    assert "".join(stream(tokenizer, prompt, answer)).strip() == "hello world"


def test_text_that_truly_ends_inside_a_character_says_so_at_the_end_only(tokenizer):
    ids = tokenizer.encode("hello 🦄", add_special_tokens=False)[:-1]
    deltas = stream(tokenizer, [], ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert deltas[-1].endswith("\ufffd")
    assert "".join(deltas).rstrip("\ufffd") == "hello "


def test_stop_token_is_not_text_but_other_endings_keep_the_last_token(tokenizer):
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert "".join(stream(tokenizer, [], ids, finish="stop")) == plain(tokenizer, ids[:-1])
    assert "".join(stream(tokenizer, [], ids, finish="length")) == "hello world"
    assert "".join(stream(tokenizer, [], ids, finish="abort")) == "hello world"


def test_real_replacement_characters_come_through(tokenizer):
    """U+FFFD is a character too: a model may write it, even many in a row."""
    text = "a" + "\ufffd" * 50 + "b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, [], ids)) == text
    assert "".join(stream(tokenizer, ids, tokenizer.encode("b", add_special_tokens=False))).strip() == "b"


def test_random_tokens_stream_to_their_decode_for_a_byte_level_tokenizer():
    """A model with random weights writes broken bytes: what is shown is what decoding all of it gives."""
    for maker in (byte_level, straddling, tiktoken_like):
        tokenizer = maker()
        rng = random.Random(1)
        for _ in range(20):
            ids = [rng.randrange(len(tokenizer)) for _ in range(200)]
            assert "".join(stream(tokenizer, [], ids)) == plain(tokenizer, ids)


@pytest.mark.parametrize("maker", [sentencepiece_like, metaspace], ids=lambda maker: maker.__name__)
def test_random_pieces_stream_to_their_decode_where_unknown_characters_are_bytes(maker):
    """Words, spaces, whole characters in bytes and lone bytes that are none, in any order and cut anywhere.

    A run of bytes that holds a broken one is decoded as broken from end to end, so here a word is between two runs.
    """
    tokenizer, rng = maker(), random.Random(3)
    vocab = tokenizer.get_vocab()
    words = [token for text, token in vocab.items() if "<" not in text]
    for _ in range(60):
        ids = []
        for _ in range(60):
            kind, spot = rng.random(), rng.choice("世🎉é👩")
            run = spot.encode() if kind < 0.4 else bytes([rng.choice([0x80, 0xBF, 0xFF])] * (kind < 0.5))
            ids += [vocab[f"<0x{byte:02X}>"] for byte in run]
            ids.append(rng.choice(words))
        cut = rng.randint(0, 20)
        while cut and tokenizer.decode(ids[:cut]).endswith("\ufffd"):
            cut -= 1
        joined = "".join(stream(tokenizer, ids[:cut], ids[cut:], sizes=lambda: rng.choice([1, 1, 2, 7])))
        whole, before = plain(tokenizer, ids), plain(tokenizer, ids[:cut])
        assert whole.removeprefix(" ") == (before + joined).removeprefix(" ")


def test_ids_the_tokenizer_does_not_know_are_silent():
    """Models pad their vocabulary: a logit beyond the tokenizer's last id can win."""
    tokenizer = byte_level()
    ids = [10**6] * 200 + tokenizer.encode("hello") + [10**6] * 200 + tokenizer.encode(" world")
    assert "".join(stream(tokenizer, [], ids)) == "hello world"


def test_cost_does_not_grow_with_the_text(tokenizer):
    """Counts decoded tokens: at most some 20 a push, whatever came before."""

    class Counting:
        decoded = calls = 0
        all_special_ids = tokenizer.all_special_ids

        def decode(self, ids, **kwargs):
            Counting.decoded += len(ids)
            Counting.calls += 1
            return tokenizer.decode(ids, **kwargs)

    ids = tokenizer.encode(WORDS * 20, add_special_tokens=False)
    detokenizer = Detokenizer(Counting(), [], SamplingParams())
    for token in ids:
        detokenizer.push([token])
    assert Counting.decoded / len(ids) < 30
    assert Counting.calls / len(ids) < 1.5
    Counting.decoded = 0
    detokenizer.push(ids, "length")
    assert Counting.decoded < len(ids) + 100


@pytest.mark.parametrize("maker", [sentencepiece_like, metaspace])
def test_cost_does_not_grow_with_a_run_of_spaces(maker, monkeypatch):
    """A space of sentencepiece is silent by itself, so the window was never cut: 6,000 of them took 3 ms a token."""
    tokenizer = maker()
    space = tokenizer.convert_tokens_to_ids("▁")
    hello = tokenizer.encode("hello", add_special_tokens=False)
    detokenizer, longest, decode = Detokenizer(tokenizer, hello, SamplingParams()), 0, tokenizer.decode

    def note(ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", note)
    text = "".join(detokenizer.push([token]) for token in [space] * 200 + hello)
    assert text == decode(hello + [space] * 200 + hello).removeprefix("hello")
    assert longest < 40


def test_nothing_to_push_and_nothing_to_say():
    detokenizer = Detokenizer(byte_level(), [], SamplingParams())
    assert detokenizer.push([]) == ""
    assert detokenizer.push([], "abort") == ""


def test_added_token_that_is_not_special_stays_in_the_text():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<hidden>", special=True)])
    ids = tokenizer.encode("hello<think>a<hidden>b")
    assert "".join(stream(tokenizer, [], ids)) == plain(tokenizer, ids) == "hello<think>ab"


def test_special_tokens_stand_together_where_asked():
    """A decoder of words puts a space in front of each token; those between two special tokens can be left out."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]")
    ids = [3, 1, 2, 2, 4, 4, 2, 3] * 8

    def streamed(skip, spaced):
        params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaced)
        detokenizer = Detokenizer(tokenizer, [4], params)
        return "".join(detokenizer.push([token]) for token in ids)

    part = " a [CLS][SEP][SEP] b b [SEP] a"
    assert streamed(False, False) == part * 8
    assert streamed(False, True) == " a [CLS] [SEP] [SEP] b b [SEP] a" * 8
    assert streamed(True, False) == streamed(True, True) == " a b b a" * 8
