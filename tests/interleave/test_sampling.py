"""Sampling draws from exactly what transformers' warpers leave, and depends on the seed alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cbatch.interleave import InterleavedGenerator, search
from cbatch.interleave.options import Choice
from cbatch.interleave.search import Beams, Tokens, draw, warp
from tests.interleave.conftest import Make, prompts
from tests.test_sampler import chi_square_p

SAMPLED = Choice(True, 1.0, 0, 1.0, 1, 1.0, False, (), None)
CASES = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 7, 1.0), (1.0, 0, 0.8), (0.8, 20, 0.7), (1.0, 1, 1.0), (1.0, 500, 0.01)]


def logits_of(device: str) -> torch.Tensor:
    return (3 * torch.randn(1, 60, generator=torch.Generator().manual_seed(3))).to(device)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_draws_follow_the_distribution(device: str, temperature: float, top_k: int, top_p: float) -> None:
    """100,000 draws; the expected shares come from transformers' own warpers, applied one after the other here."""
    choice = replace(SAMPLED, temperature=temperature, top_k=top_k, top_p=top_p)
    logits = logits_of(device)
    kept = TemperatureLogitsWarper(temperature)(None, logits)
    kept = TopKLogitsWarper(top_k)(None, kept) if top_k else kept
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    generator = torch.Generator(device).manual_seed(1)
    tokens = draw(warp(choice, logits.expand(100_000, -1)), 1, generator)
    counts = np.bincount(tokens[:, 0].cpu().numpy(), minlength=60)
    probabilities = kept.double().softmax(-1)[0].cpu().numpy()
    assert chi_square_p(counts, probabilities) > 1e-3


def test_pairs_without_replacement_follow_the_distribution(device: str) -> None:
    """Beams that sample draw several tokens at once: the second from what the first left."""
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(1)
    pairs = draw(weights.log().float().expand(100_000, -1), 2, generator)
    counts = np.bincount((pairs[:, 0] * 4 + pairs[:, 1]).cpu().numpy(), minlength=16)
    p = weights[0].cpu().numpy()
    wanted = np.array([[0 if i == j else p[i] * p[j] / (1 - p[i]) for j in range(4)] for i in range(4)])
    assert chi_square_p(counts, wanted.flatten()) > 1e-3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("ends", [(), (5,), (5, 6)])
def test_the_warpers_are_those_of_transformers(tiny: Make, beams: int, ends: tuple[int, ...]) -> None:
    """Also with beams, where each must leave more than the stop tokens; and their order."""
    model: Any = tiny("llama")
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=2, top_p=0.3, num_beams=beams, eos_token_id=list(ends) or None
    )
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    scores = torch.randn(4, 101, generator=torch.Generator().manual_seed(1))
    theirs = model._get_logits_processor(config, input_ids_seq_length=4)(None, scores)
    choice = Choice(True, 0.7, 2, 0.3, beams, 1.0, False, ends, ends[0] if ends else None)
    assert torch.equal(warp(choice, scores), theirs)


def test_the_same_seed_draws_the_same(tiny: Make, device: str) -> None:
    """From torch's own generator as ``torch.manual_seed`` left it, or from one that is handed over; on any device."""
    made = InterleavedGenerator(tiny("llama", device))
    ids, mask = prompts(device)

    def run(seed: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return made.generate(ids, mask, 12, top_k=0, **options).tolist()

    assert run(1) == run(1) != run(2)
    own = [run(7, generator=torch.Generator(where).manual_seed(3)) for where in ("cpu", "cpu", device, device)]
    assert own[0] == own[1] and own[2] == own[3] and own[0] != run(7)
    assert run(1, num_beams=3) == run(1, num_beams=3) != run(2, num_beams=3)
    one = torch.Generator().manual_seed(3)
    assert run(1, generator=one) != run(1, generator=one), "a generator goes on from call to call"


def test_tokens_of_a_model_are_drawn_as_often_as_its_softmax_says(tiny: Make, device: str) -> None:
    """The first token of 20,000 equal prompts, through the whole of ``generate``."""
    model = tiny("gpt2", device)
    ids = torch.tensor([[5, 9, 17]], device=device).expand(20_000, -1)
    torch.manual_seed(0)
    tokens = InterleavedGenerator(model).generate(ids, None, 1, temperature=0.8, top_k=12)[:, -1]
    with torch.no_grad():
        kept = TopKLogitsWarper(12)(None, model(ids[:1]).logits[:, -1].float() / 0.8)
    counts = np.bincount(tokens.cpu().numpy(), minlength=101)
    assert chi_square_p(counts, kept.double().softmax(-1)[0].cpu().numpy()) > 1e-3


def test_nearly_greedy_is_greedy(tiny: Make, device: str) -> None:
    made = InterleavedGenerator(tiny("llama", device))
    ids, mask = prompts(device)
    greedy = made.generate(ids, mask, 12).tolist()
    assert made.generate(ids, mask, 12, top_k=1).tolist() == greedy
    assert made.generate(ids, mask, 12, temperature=1e-4).tolist() == greedy


def test_a_search_allocates_nothing_that_moves(device: str) -> None:
    """A graph that was captured reads fixed addresses: every tensor of the state stays where it is."""
    for kind, choice in ((Tokens, SAMPLED), (Beams, replace(SAMPLED, num_beams=3, eos_token_ids=(4,), pad_token_id=4))):
        search = kind(choice, 2, 10, torch.device(device))
        search.reset(10)
        tensors = {name: value for name, value in vars(search).items() if isinstance(value, torch.Tensor)}
        for _ in range(3):
            search.choose(torch.randn(search.num_rows, 60, device=device))
        search.reset(5)
        assert all(vars(search)[name] is value for name, value in tensors.items())


@pytest.mark.parametrize(("beams", "early_stopping"), [(1, None), (3, True), (3, False), (3, "never")])
def test_the_same_draws_are_the_same_tokens_as_transformers(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, beams: int, early_stopping: Any
) -> None:
    """Where both draw with one generator, nothing is left to chance: also where fewer tokens have any weight than beam
    search wants candidates."""
    model, draws, multinomial = tiny("qwen3"), torch.Generator(), torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, num_samples: multinomial(p, num_samples, generator=draws))
    monkeypatch.setattr(search, "draw", lambda scores, count, _: torch.multinomial(scores.softmax(-1), count))
    made = InterleavedGenerator(model)
    ids, mask = prompts("cpu")
    for seed, (top_k, top_p, temperature) in enumerate(product((0, 1, 4), (1.0, 0.6, 1e-6), (0.3, 3.0))):
        options: dict[str, Any] = {"do_sample": True, "top_k": top_k, "top_p": top_p, "temperature": temperature}
        options |= {"num_beams": beams, "eos_token_id": list(range(3, 33)), "pad_token_id": 0}
        options |= {"early_stopping": early_stopping} if beams > 1 else {}
        draws.manual_seed(seed)
        got = made.generate(ids, mask, 8, **options)
        draws.manual_seed(seed)
        assert got.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8, **options)), options
