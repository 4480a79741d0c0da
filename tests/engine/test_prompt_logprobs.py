"""``prompt_logprobs`` through the whole engine: against transformers' logits, in chunks, preempted, in any company."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from cbatch import prompt_logprobs
from cbatch.async_llm import AsyncLLM
from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import InvalidRequestError
from cbatch.llm import LLM
from cbatch.models.decoder import Decoder
from cbatch.models.transformers_model import TransformersModel
from cbatch.outputs import RequestOutput
from cbatch.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from cbatch.scheduler.scheduler import Scheduler
from tests.counting import CountingModel, counted
from tests.engine.test_sampling import Numbers
from tests.models.families import VOCAB_SIZE, make_tiny

pytestmark = pytest.mark.usefixtures("device")

CHUNK = 16
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5]
ASYNC, SYNC, DEEP = {"schedule": "async"}, {"schedule": "sync"}, {"schedule": "async", "depth": 4}


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + start) % VOCAB_SIZE for i in range(length)]


def check(model: nn.Module, output: RequestOutput, k: int) -> None:
    """Every position against the model's own float32 logits: values, ranks, and which tokens."""
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    where = next(model.parameters()).device
    with torch.no_grad():
        wanted = model(torch.tensor([prompt], device=where)).logits[0].float().log_softmax(-1).cpu()
    for position, (token, one) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        row = wanted[position]
        assert one is not None and next(iter(one)) == token
        assert len(one) in (k, k + 1) and len(one) >= 1
        for candidate, logprob in one.items():
            assert logprob.logprob == pytest.approx(row[candidate].item(), abs=2e-5)
            better = int((row > row[candidate] + 1e-4).sum()), int((row > row[candidate] - 1e-4).sum())
            assert better[0] < logprob.rank <= max(better[1], 1)
        assert {1, *range(1, k + 1)} - {logprob.rank for logprob in one.values()} <= ({1} if k == 0 else set())


@pytest.fixture(scope="module")
def model(device: str) -> nn.Module:
    return make_tiny("llama", device=device)


def start(model: nn.Module, **options: Any) -> Engine:
    defaults = {"max_num_seqs": 8, "block_size": 4, "num_blocks": 400, "max_num_batched_tokens": CHUNK}
    return Engine.from_model(model, Numbers(), **{**defaults, "model_impl": "transformers", **options})


def asking(k: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": k, **more})


@pytest.mark.parametrize("options", [ASYNC, SYNC, DEEP, {**ASYNC, "enforce_eager": True}])
def test_every_length_around_a_chunk_equals_the_models_own(model: nn.Module, options: dict[str, Any]) -> None:
    """All at once, so that a step has the end of one prompt, a chunk of the next and decodes."""
    with start(model, **options) as engine:
        handles = [engine.submit(prompt_of(length), asking(3)) for length in LENGTHS]
        plain = [engine.submit(prompt_of(length), asking(0, prompt_logprobs=None)) for length in LENGTHS]
        for handle, other in zip(handles, plain, strict=True):
            output, without = handle.result(120), other.result(120)
            check(model, output, 3)
            assert without.prompt_logprobs is None
            assert output.outputs[0].token_ids == without.outputs[0].token_ids
        engine.close()
        engine.scheduler.check()


def test_what_kernels_get_begins_where_those_compiled_before_expect_it(model: nn.Module) -> None:
    """Triton compiles a kernel again for an array that does not begin at 16 bytes, for a second in the midst of
    serving: of a prompt with 5 tokens wanted, the second row of the indices did not."""
    with start(model) as engine:
        runner, offsets = engine._executor._runner, set[int]()
        logprobs = runner._ops.logprobs

        def spy(logits: torch.Tensor, targets: torch.Tensor, records: torch.Tensor) -> None:
            offsets.add(targets.data_ptr() % 16)
            logprobs(logits, targets, records)

        runner._ops = dataclasses.replace(runner._ops, logprobs=spy)
        for length in range(2, 10):
            check(model, engine.submit(prompt_of(length), asking(1)).result(120), 1)
    assert offsets == {0}


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "cohere", "granite", "qwen3", "biogpt", "bert_decoder"])
@pytest.mark.parametrize("implementation", ["transformers", "decoder"])
def test_families(family: str, implementation: str, device: str) -> None:
    """With soft caps and scales of logits, heads with a transform of their own, and the fused last norm."""
    module = make_tiny(family, device=device)
    if implementation == "decoder":
        if family in ("cohere", "biogpt", "bert_decoder"):
            pytest.skip("not covered by the decoder")
        served: Any = Decoder.from_transformers(TransformersModel(module), take_weights=False)
    else:
        served = TransformersModel(module)
    config = EngineConfig(max_num_seqs=4, block_size=4, num_blocks=200, max_num_batched_tokens=CHUNK)
    with Engine(served, config) as engine:
        for handle in [engine.submit(prompt_of(length), asking(2)) for length in (5, 40)]:
            check(module, handle.result(120), 2)


def test_a_step_makes_logits_of_few_tokens_of_prompts(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of 8,192 tokens at once would not fit beside the cache; prompts that want none are not held up."""
    monkeypatch.setattr("cbatch.engine.MAX_PROMPT_LOGITS", 5)
    with start(model, max_num_batched_tokens=64) as engine:
        sizes: list[int] = []
        original = prompt_logprobs.prompt_rows

        def spy(*args: Any) -> Any:
            rows = original(*args)
            sizes.append(0 if rows is None else rows.index.shape[1])
            return rows

        monkeypatch.setattr("cbatch.engine.prompt_rows", spy)
        handles = [engine.submit(prompt_of(length), asking(1)) for length in (12, 5, 6, 1, 21)]
        other = engine.submit(prompt_of(50), asking(0, prompt_logprobs=None))
        for handle in handles:
            check(model, handle.result(120), 1)
        assert len(other.result(120).outputs[0].token_ids) == 4
        assert max(sizes) == 5 and sum(sizes) == 11 + 4 + 5 + 0 + 20


@pytest.mark.parametrize("options", [ASYNC, SYNC, DEEP])
def test_preempted_in_the_middle_of_its_prompt(
    model: nn.Module, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes its prompt again, also what had landed or was in flight; each position counts once.

    Those before it grow while it advances by two tokens a step.
    """
    monkeypatch.setattr("cbatch.engine.MAX_PROMPT_LOGITS", 2)
    landed = []
    preempt = Scheduler._preempt

    def spy(self: Scheduler, sequence: Any) -> None:
        if sequence.payload.prompt_logprobs is not None:
            landed.append(sequence.payload.prompt_logprobs.num_landed)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    with start(model, num_blocks=32, **options) as engine:
        others = [engine.submit(prompt_of(3, i), asking(0, prompt_logprobs=None, max_tokens=70)) for i in range(3)]
        handles = [engine.submit(prompt_of(60, i), asking(2)) for i in range(2)]
        for handle in handles:
            check(model, handle.result(120), 2)
        assert all(len(other.result(120).outputs[0].token_ids) == 70 for other in others)
        assert any(0 < count < 59 for count in landed), landed
        engine.close()
        engine.scheduler.check()


def test_warm_cache_is_not_read_and_others_still_hit_it(model: nn.Module) -> None:
    with start(model, enable_prefix_caching=True) as engine:
        for i in range(2):
            output = engine.submit(prompt_of(41), asking(2)).result(120)
            check(model, output, 2)
            assert output.metrics.num_cached_tokens == 0, i
        plain = engine.submit(prompt_of(41), asking(0, prompt_logprobs=None)).result(120)
        assert plain.metrics.num_cached_tokens == 40
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_together_with_logprobs_and_several_answers(model: nn.Module) -> None:
    with start(model) as engine:
        params = asking(2, n=3, temperature=1.0, seed=5, logprobs=1)
        handle = engine.submit(prompt_of(21), params)
        output = handle.result(120)
        check(model, output, 2)
        assert [child.prompt_logprobs is None for child in handle.children] == [False, True, True]
        assert all(answer.logprobs is not None and len(answer.logprobs) == 4 for answer in output.outputs)
        assert pickle.loads(pickle.dumps(output)) == output


def test_tokens_are_those_without_it(model: nn.Module) -> None:
    """Its rows of logits stand behind those that are sampled from, whatever is done with these."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "seed": 2, "top_p": 0.8},
        {"repetition_penalty": 1.4, "logprobs": 3},
        {"temperature": 0.7, "seed": 3, "presence_penalty": 1.0, "min_tokens": 2, "n": 2},
    ]
    with start(model) as engine:
        found = []
        for k in (2, None):
            handles = [
                engine.submit(prompt_of(9 + 8 * i, i), asking(0, **{**way, "prompt_logprobs": k}))
                for i, way in enumerate(ways)
            ]
            outputs = [handle.result(120) for handle in handles]
            found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
            if k is not None:
                for output in outputs:
                    check(model, output, k)
        assert found[0] == found[1]


@pytest.mark.parametrize("options", [ASYNC, SYNC])
def test_rows_that_wait_for_the_host_and_beams_in_the_same_steps(model: nn.Module, options: dict[str, Any]) -> None:
    """Such a step is launched kernel by kernel and sampled later, from its first rows of logits alone."""

    def no_even_tokens(tokens: Any, logits: Any) -> Any:
        logits[::2] = float("-inf")
        return logits

    with start(model, **options) as engine:
        ways: list[dict[str, Any]] = [{"logits_processors": [no_even_tokens]}, {}, {"logprobs": 2}]
        found = []
        for k in (2, None):
            handles = [
                engine.submit(prompt_of(20 + i, i), asking(0, **{**way, "max_tokens": 9, "prompt_logprobs": k}))
                for i, way in enumerate(ways * 2)
            ]
            beams = engine.submit_beam_search(prompt_of(9), BeamSearchParams(3, 8, ignore_eos=True)).result(120)
            outputs = [handle.result(120) for handle in handles]
            for output in outputs if k is not None else []:
                check(model, output, k)
            found.append([[answer.token_ids for answer in output.outputs] for output in (*outputs, beams)])
        assert found[0] == found[1]
        assert all(token % 2 for token in found[0][0][0])


def test_fewer_tokens_in_the_vocabulary_than_asked_for() -> None:
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33, max_num_batched_tokens=4)
    with Engine(CountingModel(vocab_size=6), config) as engine:
        output = engine.submit([1, 2, 3, 0, 5, 5, 2], asking(20)).result(30)
        assert output.outputs[0].token_ids == counted(2, 4, 6)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        for one in output.prompt_logprobs[1:]:
            assert one is not None and sorted(one) == list(range(6))
        assert output.prompt_logprobs[1][2].rank == 1 and output.prompt_logprobs[3][0].rank == 2  # type: ignore[index]


def test_aborted_before_its_prompt_is_computed_has_none() -> None:
    model = CountingModel()
    config = EngineConfig(max_num_seqs=2, block_size=4, num_blocks=33, max_num_batched_tokens=4)
    with Engine(model, config) as engine:
        if engine.config.device != "cpu":
            pytest.skip("graphs do not wait at the gate")
        model.gate.clear()
        handle = engine.submit(list(range(20)), asking(1))
        handle.abort()
        model.gate.set()
        assert handle.result(30).prompt_logprobs is None
        assert engine.submit([1, 2], asking(0)).result(30).prompt_logprobs is not None


def test_llm_and_streams(model: nn.Module) -> None:
    """Cumulative outputs all have them, deltas the first one alone; the texts of tokens are there."""
    options: dict[str, Any] = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with LLM(model, Numbers(), **options) as llm:
        (output,) = llm.generate([prompt_of(11)], asking(1))
        check(model, output, 1)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[1] is not None
        assert all(one.decoded_token == f"{token} " for token, one in output.prompt_logprobs[1].items())
        (bare,) = llm.generate([prompt_of(11)], asking(1, detokenize=False))
        assert all(one.decoded_token is None for found in bare.prompt_logprobs[1:] for one in found.values())  # type: ignore

    async def stream(kind: RequestOutputKind) -> list[RequestOutput]:
        async with AsyncLLM(model, Numbers(), **options) as llm:
            return [out async for out in llm.generate(prompt_of(11), asking(1, output_kind=kind))]

    cumulative = asyncio.run(stream(RequestOutputKind.CUMULATIVE))
    assert all(out.prompt_logprobs == output.prompt_logprobs for out in cumulative)
    deltas = asyncio.run(stream(RequestOutputKind.DELTA))
    assert deltas[0].prompt_logprobs == output.prompt_logprobs
    assert all(out.prompt_logprobs is None for out in deltas[1:])


@pytest.mark.parametrize(
    ("value", "limit"), [(21, "at most 20"), (-1, "at least 0"), (1.5, "integer"), (True, "integer")]
)
def test_what_is_refused(value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"prompt_logprobs={value}.*{limit}"):
        SamplingParams(prompt_logprobs=value)
