"""The logic of beam search against transformers' ``generate``, with the model's own logits and no engine."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cbatch.beam_search import BeamSearch, Hypothesis
from cbatch.errors import InvalidRequestError
from cbatch.sampling_params import BeamSearchParams
from tests.models.families import make_tiny

EOS = 17


def likely_eos(model: nn.Module, factor: float = 2.5) -> nn.Module:
    """The same model, whose answers end at different times."""
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= factor  # type: ignore[operator]
    return model


def generated(
    model: nn.Module, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...] = (EOS,)
) -> list[tuple[list[int], float]]:
    """Tokens and scores of transformers' beams, computed once: every schedule is compared with them."""
    return _generated(model, tuple(prompt), params, eos)


@cache
def _generated(
    model: nn.Module, prompt: tuple[int, ...], params: BeamSearchParams, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    where = next(model.parameters()).device
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt], device=where),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=where),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=None if params.ignore_eos or not eos else list(eos),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = [0.0] if params.beam_width == 1 else out.sequences_scores.tolist()
    answers = []
    for row in out.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos and not params.ignore_eos]
        answers.append(row[: ends[0] + 1] if ends else row)
    return list(zip(answers, scores, strict=True))


def searched(model: nn.Module, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...]) -> list[Hypothesis]:
    search = BeamSearch(params, params.max_tokens, eos)
    while search.beams:
        with torch.no_grad():
            rows = [model(torch.tensor([prompt + beam])).logits[0, -1] for beam in search.beams]
        logprobs, ids = torch.stack(rows).log_softmax(-1).topk(search.num_candidates)
        chosen = search.advance(ids.numpy().astype(np.int32), logprobs.numpy())
        assert len(chosen) == len(search.beams)
    return search.finished


def check(found: list[Any], wanted: list[tuple[list[int], float]]) -> None:
    assert [list(one.token_ids) for one in found] == [tokens for tokens, _ in wanted]
    assert [one.score for one in found] == pytest.approx([score for _, score in wanted], rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return likely_eos(make_tiny("llama"))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_same_beams_as_transformers(model: nn.Module, early_stopping: bool | str, length_penalty: float) -> None:
    ended = set()
    for width, prompt, eos in itertools.product((2, 5), ([3, 1, 4], [1, 5, 9, 2, 6]), ((EOS,), (EOS, 23, 41, 60))):
        params = BeamSearchParams(width, 12, length_penalty=length_penalty, early_stopping=early_stopping)
        found = searched(model, prompt, params, eos)
        check(found, generated(model, prompt, params, eos))
        ended |= {(len(one.token_ids), one.finish_reason) for one in found}
        for one in found:
            assert one.finish_reason == ("stop" if one.token_ids[-1] in eos else "length")
            assert one.score == pytest.approx(one.logprob / len(one.token_ids) ** length_penalty, rel=1e-5)
    assert len(ended) > 2 or length_penalty > 1, ended


@pytest.mark.parametrize("width", [1, 19])
def test_narrow_and_wide(model: nn.Module, width: int) -> None:
    params = BeamSearchParams(width, 9)
    found, wanted = searched(model, [3, 1, 4], params, (EOS,)), generated(model, [3, 1, 4], params)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in wanted]


def test_without_an_end_of_sequence_all_have_the_full_length(model: nn.Module) -> None:
    for params, eos in ((BeamSearchParams(3, 7, ignore_eos=True), (EOS,)), (BeamSearchParams(3, 7), ())):
        found = searched(model, [3, 1, 4], params, eos)
        check(found, generated(model, [3, 1, 4], params, eos))
        assert {(len(one.token_ids), one.finish_reason) for one in found} == {(7, "length")}


def test_first_step_ends_it_at_one_token(model: nn.Module) -> None:
    params = BeamSearchParams(4, 1)
    check(searched(model, [3, 1, 4], params, (EOS,)), generated(model, [3, 1, 4], params))


def step(search: BeamSearch, *rows: dict[int, float]) -> list[tuple[int, int]]:
    width = search.num_candidates
    ids = np.full((len(rows), width), -1, np.int32)
    values = np.full((len(rows), width), -np.inf, np.float32)
    for i, row in enumerate(rows):
        ordered = sorted(row.items(), key=lambda item: -item[1])[:width]
        ids[i, : len(ordered)], values[i, : len(ordered)] = zip(*ordered, strict=True)
    return search.advance(ids, values)


def test_an_end_below_the_best_beams_is_no_candidate() -> None:
    """Of two beams the third candidate ends: it is there as a replacement only, and a replacement that ends is none."""
    search = BeamSearch(BeamSearchParams(2, 5), 5, [9])
    assert step(search, {1: -1.0, 2: -2.0, 9: -3.0}) == [(0, 1), (0, 2)]
    assert search.finished == []
    assert step(search, {9: -0.5, 3: -1.0, 4: -4.0}, {5: -0.1, 9: -2.0, 6: -3.0}) == [(0, 3), (1, 5)]
    assert [one.token_ids for one in search.finished] == [[1, 9]] and search.finished[0].score == -0.75
    assert search.beams == [[1, 3], [2, 5]]


def test_equal_candidates_go_by_beam_then_by_order() -> None:
    search = BeamSearch(BeamSearchParams(2, 5), 5, [])
    step(search, {1: -1.0, 2: -1.0})
    assert step(search, {5: -1.0, 4: -1.0}, {5: -1.0, 3: -1.0}) == [(0, 5), (0, 4)]


def test_a_vocabulary_smaller_than_the_beams_runs_fewer() -> None:
    search = BeamSearch(BeamSearchParams(3, 3), 3, [])
    assert step(search, {0: -0.5, 1: -1.0}) == [(0, 0), (0, 1)]
    assert len(step(search, {0: -0.5, 1: -1.0}, {0: -0.5, 1: -1.0})) == 3


@pytest.mark.parametrize("penalty", [1e4, -1e4, 1e308])
def test_scores_beyond_float32_are_an_order_all_the_same(penalty: float) -> None:
    search = BeamSearch(BeamSearchParams(2, 2, length_penalty=penalty, early_stopping="never"), 2, [9])
    step(search, {1: -1.0, 9: -2.0, 2: -3.0})
    step(search, {1: -1.0, 9: -2.0, 2: -3.0}, {1: -1.0, 9: -2.0, 2: -3.0})
    assert len(search.finished) == 2 and not search.beams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, "beam_width=0.*at least 1 and at most 20"),
        ({"beam_width": 21}, "beam_width=21.*at most 20"),
        ({"beam_width": 2.0}, "beam_width=2.0 must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0.*at least 1"),
        ({"max_tokens": None}, "max_tokens=None must be an integer"),
        ({"temperature": 0.7}, "temperature=0.7.*must be 0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be finite"),
        ({"early_stopping": "always"}, "early_stopping='always' must be True, False or \"never\""),
        ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
    ],
)
def test_parameters_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **given})
