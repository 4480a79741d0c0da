"""The loop: tokens are read late, and what was computed meanwhile is dropped exactly."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextStreamer

from cbatch.errors import CBatchError
from cbatch.interleave import InterleavedGenerator, generator
from cbatch.interleave.lanes import HostLane
from cbatch.interleave.options import Choice
from cbatch.interleave.search import Beams
from tests.interleave.conftest import Make, expected, prompts


class LateLane(HostLane):
    """Reads as late as ``depth`` streams would, and notes the order of what is done."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.done: list[tuple[str, int]] = []

    def launch(self, index: int, compute: Callable[[], None]) -> None:
        self.done.append(("launch", index))
        super().launch(index, compute)

    def land(self, index: int) -> Tensor:
        self.done.append(("land", index))
        return super().land(index)


def late(model: Any, depth: int) -> tuple[InterleavedGenerator, LateLane]:
    made = InterleavedGenerator(model, num_streams=1)
    made._lanes = lane = LateLane(depth)
    return made, lane


def test_token_i_is_launched_before_token_i_minus_1_is_read(tiny: Make) -> None:
    made, lane = late(tiny("llama"), 2)
    ids, mask = prompts("cpu")
    made.generate(ids, mask, 4)
    assert lane.done == [
        *(("launch", 0), ("launch", 1), ("land", 0), ("launch", 2), ("land", 1), ("launch", 3), ("land", 2)),
        ("land", 3),
    ]
    assert (made.num_steps, made.num_wasted_steps) == (4, 0)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_was_computed_after_the_last_stop_is_dropped(tiny: Make, depth: int, beams: int) -> None:
    """A stop that is looked for every ten tokens lets a row run on: too many tokens, or a row that is not padded. Here
    it is known ``depth - 1`` steps late, every time; the steps computed meanwhile are counted and are in no output."""
    model = tiny("llama")
    ids, mask = prompts("cpu", rows=2)
    free = expected(model, ids, mask, 24)
    ends = sorted({int(token) for token in free[:, 9 + 6]}) if beams == 1 else list(range(3, 35))
    options = {"eos_token_id": ends, "pad_token_id": 1, "num_beams": beams, "early_stopping": beams > 1}
    right = expected(model, ids, mask, 24, **options)
    assert right.shape[1] < 9 + 24, "the stop is not early"
    made, _ = late(model, depth)
    assert made.generate(ids, mask, 24, **options).tolist() == right.tolist()
    assert made.num_wasted_steps == min(depth - 1, 24 - (made.num_steps - made.num_wasted_steps))
    if beams == 1:
        assert made.num_steps - made.num_wasted_steps == right.shape[1] - 9


def test_a_stop_at_the_last_token_wastes_nothing(tiny: Make) -> None:
    model = tiny("llama")
    ids, mask = prompts("cpu")
    made, _ = late(model, 2)
    made.generate(ids, mask, 5, eos_token_id=list(range(101)))
    assert (made.num_steps, made.num_wasted_steps) == (2, 1)
    made.generate(ids, mask, 1, eos_token_id=list(range(101)))
    assert (made.num_steps, made.num_wasted_steps) == (1, 0)


class Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.said: list[list[int]] = []
        self.ended = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        self.said.append(value.flatten().tolist())
        if len(self.said) == self.fail_at:
            raise RuntimeError("the consumer fails")

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_each_token_once_and_no_wasted_one(tiny: Make, device: str) -> None:
    model = tiny("gpt2", device)
    ids, mask = prompts(device)
    stop = {"eos_token_id": sorted({int(t) for t in expected(model, ids, mask, 9)[:, -1]}), "pad_token_id": 1}
    theirs, ours = Recorder(), Recorder()
    expected(model, ids, mask, 20, streamer=theirs, **stop)
    InterleavedGenerator(model).generate(ids, mask, 20, streamer=ours, **stop)
    assert ours.said == theirs.said and ours.ended == 1


def test_a_consumer_that_fails_leaves_the_generator_usable(tiny: Make, device: str) -> None:
    made = InterleavedGenerator(tiny("gpt2", device))
    ids, mask = prompts(device)
    with pytest.raises(RuntimeError, match="the consumer fails"):
        made.generate(ids, mask, 20, streamer=Recorder(fail_at=4))
    assert made.generate(ids, mask, 20).tolist() == expected(made.model, ids, mask, 20).tolist()


def test_a_second_thread_is_refused(tiny: Make) -> None:
    made = InterleavedGenerator(tiny("gpt2"))
    ids, mask = prompts("cpu")
    inside, go, seen = threading.Event(), threading.Event(), []

    class Holding(Recorder):
        def put(self, value: Tensor) -> None:
            inside.set()
            go.wait(10)

    worker = threading.Thread(target=lambda: seen.append(made.generate(ids, mask, 3, streamer=Holding())))
    worker.start()
    inside.wait(10)
    with pytest.raises(CBatchError, match="another thread"):
        made.generate(ids, mask, 3)
    go.set()
    worker.join()
    assert seen[0].tolist() == made.generate(ids, mask, 3).tolist()


def test_a_streamer_that_generates_is_refused_and_not_held_for_ever(tiny: Make) -> None:
    made = InterleavedGenerator(tiny("gpt2"))
    ids, mask = prompts("cpu")

    class Nested(Recorder):
        def put(self, value: Tensor) -> None:
            made.generate(ids, mask, 2)

    with pytest.raises(CBatchError, match="a streamer's put"):
        made.generate(ids, mask, 3, streamer=Nested())
    assert made.generate(ids, mask, 3).shape == (3, 12)


def test_ctrl_c_in_the_middle_leaves_the_generator_usable(tiny: Make, device: str) -> None:
    made = InterleavedGenerator(tiny("gpt2", device))
    ids, mask = prompts(device)

    class Impatient(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.said) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.generate(ids, mask, 20, streamer=Impatient())
    assert made.generate(ids, mask, 20).tolist() == expected(made.model, ids, mask, 20).tolist()


def test_ctrl_c_at_any_line_of_a_call_leaves_the_generator_usable(tiny: Make) -> None:
    """Between taking the lock and the ``try`` that gave it back, it stayed taken: all later calls were refused."""
    made = InterleavedGenerator(tiny("llama"))
    ids, mask = prompts("cpu")
    before, first = sys.gettrace(), made.generate(ids, mask, 2)
    done: set[int] = set()  # lines that were interrupted

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code.co_name != "generate" or frame.f_code.co_filename != generator.__file__:
            return trace if frame.f_code.co_name == "decorate_context" else None
        if event == "line" and frame.f_lineno not in done:
            done.add(frame.f_lineno)
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    while True:
        num_done = len(done)
        sys.settrace(trace)
        try:
            made.generate(ids, mask, 2)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert made.generate(ids, mask, 2).equal(first)
        if len(done) == num_done:
            break
    assert len(done) > 20


def test_a_call_within_inference_mode_leaves_nothing_of_it_behind(tiny: Make, device: str) -> None:
    """What a captured step keeps for the next call was made in the mode of the first, and torch lets no tensor of
    inference mode be written outside of it."""
    made = InterleavedGenerator(tiny("gpt2", device), compile="cudagraphs" if device == "cuda" else False)
    ids, mask = prompts(device)
    with torch.inference_mode():
        within = made.generate(ids, mask, 6)
    assert isinstance(within, Tensor) and not within.is_inference()
    assert made.generate(ids, mask, 6).tolist() == within.tolist()


def test_on_the_cpu_one_lane_computes_and_one_line_says_so(tiny: Make, caplog: pytest.LogCaptureFixture) -> None:
    generator._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "cbatch.interleave"):
        made = [InterleavedGenerator(tiny("gpt2")) for _ in range(2)]
    assert [one.num_lanes for one in made] == [1, 1] and made[0].num_streams == 2
    assert [record.getMessage() for record in caplog.records] == [
        "num_streams=2: there are no streams on cpu, so one lane computes"
    ]


def test_steps_run_what_torch_compile_made_of_the_model_and_prompts_do_not(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt has another shape each time, and would be compiled each time."""
    model, lengths = tiny("llama"), []

    def fake_compile(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(**inputs: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return function(**inputs)

        return compiled

    monkeypatch.setattr(torch, "compile", fake_compile)
    ids, mask = prompts("cpu")
    tokens = InterleavedGenerator(model, compile=True).generate(ids, mask, 6)
    assert lengths == [1] * 5
    assert tokens.tolist() == expected(model, ids, mask, 6).tolist()


def test_what_was_compiled_serves_prompts_of_other_lengths(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU each length had a cache of its own, torch.compile made another step for each, for a minute, and none
    any more after the eighth."""
    model, sizes = tiny("llama"), set()

    def fake_compile(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(**inputs: Any) -> Any:
            sizes.add(inputs["past_key_values"].layers[0].keys.shape[2])
            return function(**inputs)

        return compiled

    monkeypatch.setattr(torch, "compile", fake_compile)
    made = InterleavedGenerator(model, compile=True)
    for length, count in ((5, 4), (9, 20), (9, 55), (9, 56)):
        ids, mask = prompts("cpu", length=length)
        tokens = made.generate(ids, mask, count)
        assert tokens.tolist() == expected(model, ids, mask, count).tolist()
    assert sizes == {64, 128}


class Letters:
    """Token 3 + i is the i-th letter; a tokenizer as far as ``generate`` needs one."""

    all_special_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def batch_decode(self, rows: Tensor, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(map(str, row)) for row in rows.tolist()]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens)) + " "


def test_text_goes_in_and_new_text_comes_out(tiny: Make, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama", device)
    tokenizer = Letters()
    made = InterleavedGenerator(model, tokenizer)
    texts = ["hello", "a", "goodbye"]
    answers = made.generate(texts, max_new_tokens=5)
    alone = [made.generate(text, max_new_tokens=5) for text in texts]
    assert answers == alone
    ids = torch.tensor([tokenizer.encode("hello")], device=device)
    assert alone[0] == tokenizer.batch_decode(made.generate(ids, max_new_tokens=5)[:, 5:], True)[0]
    made.generate("hello", max_new_tokens=5, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == alone[0].split()


def test_steps_after_the_end_of_a_beam_search_change_no_answer() -> None:
    """Random scores instead of a model: searches that end in every way, and go on for as long as they could."""
    dice, num_early = random.Random(0), 0
    for trial in range(400):
        vocab, beams, batch_size = dice.choice([4, 6, 12]), dice.choice([2, 3, 4]), dice.choice([1, 2, 3])
        ends = tuple(dice.sample(range(vocab), dice.choice([1, 2, vocab - 1])))
        penalty, early = dice.choice([1.0, 0.0, -1.0, 2.0]), dice.choice([True, False, "never"])
        search = Beams(Choice(False, 1.0, 0, 1.0, beams, penalty, early, ends, 0), batch_size, 8, torch.device("cpu"))
        search.reset(8)
        answer = None
        noise = torch.Generator().manual_seed(trial)
        for step in range(8):
            search.choose(torch.randn(search.num_rows, vocab, generator=noise))
            if answer is None and not search.report[step, 0]:
                answer, num_early = search.result(step + 1).clone(), num_early + (step < 7)
        assert answer is not None and search.result(8).equal(answer), trial
    assert num_early > 100
