"""Beam search through the whole engine: transformers' beams, beside other requests, in a small pool, aborted."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from typing import Any

import pytest
from torch import Tensor, nn

from cbatch.async_llm import AsyncLLM
from cbatch.beam_search import BeamSearch
from cbatch.config import EngineConfig
from cbatch.engine import Engine
from cbatch.errors import (
    CBatchError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    PromptTooLongError,
)
from cbatch.llm import LLM
from cbatch.models.decoder import Decoder
from cbatch.models.transformers_model import TransformersModel
from cbatch.sampling_params import BeamSearchParams, SamplingParams
from tests.counting import CountingModel
from tests.engine.test_sampling import Numbers
from tests.models.families import make_tiny
from tests.test_beam_search import EOS, check, generated, likely_eos
from tests.waiting import settle

pytestmark = pytest.mark.usefixtures("device", "checked")

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [50], [99] * 6, list(range(40))]
ASYNC, SYNC, DEEP = {"schedule": "async"}, {"schedule": "sync"}, {"schedule": "async", "depth": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(device: str) -> nn.Module:
    model = likely_eos(make_tiny("llama", device=device))
    model.generation_config.eos_token_id = EOS  # type: ignore[union-attr]
    return model


def start(model: Any, **options: Any) -> Engine:
    defaults = {"max_num_seqs": 16, "block_size": 4, "num_blocks": 400, "max_num_batched_tokens": 32}
    return Engine.from_model(model, Numbers(), **{**defaults, "model_impl": "transformers", **options})


@pytest.mark.parametrize("options", [ASYNC, SYNC, DEEP, {**ASYNC, "enable_prefix_caching": True}])
def test_all_prompts_at_once_equal_transformers(model: nn.Module, options: dict[str, Any]) -> None:
    """Ragged prompts, some longer than a chunk, whose beams end at different times."""
    with start(model, **options) as engine:
        for early, penalty in itertools.product([True, False, "never"], [1.0, 0.0, 2.0, -1.0]):
            params = BeamSearchParams(3, 10, early_stopping=early, length_penalty=penalty)
            handles = [engine.submit_beam_search(prompt, params) for prompt in PROMPTS]
            for prompt, handle in zip(PROMPTS, handles, strict=True):
                output = handle.result(120)
                check(output.outputs, generated(model, prompt, params))
                assert [one.index for one in output.outputs] == [0, 1, 2]
        settle(engine)


@pytest.mark.parametrize("width", [1, 2, 7, 19])
def test_widths(model: nn.Module, width: int) -> None:
    """The widest has more beams than slots, so that some wait for others that pause."""
    params = BeamSearchParams(width, 8)
    with start(model) as engine:
        output = engine.submit_beam_search(PROMPTS[1], params).result(120)
        wanted = generated(model, PROMPTS[1], params)
        assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in wanted]
        settle(engine)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "mistral", "phi3"])
@pytest.mark.parametrize("implementation", ["transformers", "decoder"])
def test_families(family: str, implementation: str, device: str) -> None:
    """With sliding windows, too: a beam is forked where its parent's window is."""
    module = likely_eos(make_tiny(family, device=device), 1.8)
    module.generation_config.eos_token_id = EOS  # type: ignore[union-attr]
    module.config.eos_token_id = EOS  # type: ignore[union-attr]
    served: Any = TransformersModel(module)
    if implementation == "decoder":
        served = Decoder.from_transformers(served, take_weights=False)
    config = EngineConfig(max_num_seqs=8, block_size=4, num_blocks=300, max_num_batched_tokens=16)
    params = BeamSearchParams(4, 14)
    with Engine(served, config) as engine:
        handles = [engine.submit_beam_search(prompt, params) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            check(handle.result(120).outputs, generated(module, prompt, params))
        settle(engine)


@pytest.mark.parametrize("options", [ASYNC, SYNC])
def test_neighbours_do_not_notice(model: nn.Module, options: dict[str, Any]) -> None:
    """Beams wait for each other between steps; others are planned in every step, and their tokens do not change."""
    sampled = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
    with start(model, **options) as engine:
        alone = [engine.submit(prompt, each).result(120) for prompt in PROMPTS[:3] for each in (GREEDY, sampled)]
        params = BeamSearchParams(4, 12)
        beams = [engine.submit_beam_search(prompt, params) for prompt in PROMPTS[:2]]
        beside = [engine.submit(prompt, each) for prompt in PROMPTS[:3] for each in (GREEDY, sampled)]
        beams += [engine.submit_beam_search(prompt, params) for prompt in PROMPTS[2:4]]
        for handle, plain in zip(beside, alone, strict=True):
            answer, wanted = handle.result(120).outputs[0], plain.outputs[0]
            assert answer.token_ids == wanted.token_ids
            assert (answer.logprobs is None) == (wanted.logprobs is None)
        for prompt, handle in zip(PROMPTS, beams, strict=False):
            check(handle.result(120).outputs, generated(model, prompt, params))
        settle(engine)


@pytest.mark.parametrize("options", [ASYNC, SYNC])
@pytest.mark.parametrize("num_blocks", [17, 24, 40])
def test_small_pool(model: nn.Module, options: dict[str, Any], num_blocks: int) -> None:
    """Beams are preempted, also those that pause; in the smallest pool they wait for blocks that siblings hold."""
    params = BeamSearchParams(5, 16)
    with start(model, num_blocks=num_blocks, **options) as engine:
        handles = [engine.submit_beam_search(prompt, params) for prompt in PROMPTS[:4]]
        beside = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:4]]
        for prompt, handle in zip(PROMPTS, handles, strict=False):
            check(handle.result(120).outputs, generated(model, prompt, params))
        tokens = [handle.result(120).outputs[0].token_ids for handle in beside]
        assert tokens == [engine.submit(prompt, GREEDY).result(120).outputs[0].token_ids for prompt in PROMPTS[:4]]
        if num_blocks == 17:
            assert engine.stats()["num_preemptions"] > 0
        settle(engine)


def test_fewer_slots_than_beams(model: nn.Module) -> None:
    """With one slot each beam in turn gives it to the next, and is computed again when the search goes on with it."""
    params = BeamSearchParams(4, 8)
    for max_num_seqs in (1, 2, 3):
        with start(model, max_num_seqs=max_num_seqs) as engine:
            handles = [engine.submit_beam_search(prompt, params) for prompt in PROMPTS]
            for prompt, handle in zip(PROMPTS, handles, strict=True):
                check(handle.result(120).outputs, generated(model, prompt, params))
            settle(engine)


@pytest.mark.parametrize("options", [SYNC, ASYNC, DEEP], ids=["sync", "async", "deep"])
def test_beams_without_room_do_not_wait_for_the_end_of_a_neighbour(model: nn.Module, options: dict[str, Any]) -> None:
    """Beams that had landed gave their slots to those that waited only when nothing else could run: a neighbour that
    decoded for minutes held up the search, which held the slots of everyone who came after it."""
    params = BeamSearchParams(beam_width=6, max_tokens=8)
    with start(model, **options) as engine:
        alone = engine.submit_beam_search(PROMPTS[0], params).result(60).outputs
    with start(model, max_num_seqs=4, **options) as engine:
        neighbour = engine.submit([7], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
        neighbour.next_chunk(60)
        search = engine.submit_beam_search(PROMPTS[0], params)
        newcomer = engine.submit([8], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        found = search.result(60)
        newcomer.result(60)
        neighbour.result(60)
        assert [answer.token_ids for answer in found.outputs] == [answer.token_ids for answer in alone]
        assert found.metrics.finished_time < neighbour.metrics.finished_time
        assert newcomer.metrics.finished_time < neighbour.metrics.finished_time
        settle(engine)


def test_beams_without_room_do_not_wait_for_the_end_of_another_search(model: nn.Module) -> None:
    """A search lost patience only after eight steps without a beam of any search: one whose beams landed at every step
    kept it waiting to its own end, like a neighbour that decodes."""
    params = BeamSearchParams(beam_width=6, max_tokens=8)
    with start(model) as engine:
        alone = engine.submit_beam_search(PROMPTS[0], params).result(60).outputs
    with start(model, max_num_seqs=4) as engine:
        neighbour = engine.submit_beam_search([7], BeamSearchParams(beam_width=1, max_tokens=100, ignore_eos=True))
        search = engine.submit_beam_search(PROMPTS[0], params)
        found = search.result(60)
        neighbour.result(60)
        assert [answer.token_ids for answer in found.outputs] == [answer.token_ids for answer in alone]
        assert found.metrics.finished_time < neighbour.metrics.finished_time
        settle(engine)


def test_beams_share_blocks_and_compute_one_token_each(model: nn.Module) -> None:
    """A search over a long prompt holds its blocks once, and computes the prompt once."""
    prompt = [(7 * i * i + 3) % 101 for i in range(120)]
    with start(model, enable_prefix_caching=False) as engine:
        computed, used = [], []
        plan = engine.scheduler.plan

        def spy(*args: Any) -> Any:
            step = plan(*args)
            if step is not None:
                computed.append(step.sizes.num_tokens)
                used.append(engine.scheduler.blocks.num_usable - engine.scheduler.blocks.num_free)
            return step

        engine.scheduler.plan = spy  # type: ignore[method-assign]
        params = BeamSearchParams(4, 9, ignore_eos=True)
        check(engine.submit_beam_search(prompt, params).result(120).outputs, generated(model, prompt, params))
        assert sum(computed) == 120 + 8 * 4  # each beam one token a step, the last of which is sampled alone
        assert max(used) <= 30 + 4 * 3
        settle(engine)


@pytest.mark.parametrize("options", [ASYNC, SYNC])
def test_abort_at_any_time_gives_everything_back(model: nn.Module, options: dict[str, Any]) -> None:
    with start(model, num_blocks=40, **options) as engine:
        for i in range(25):
            handle = engine.submit_beam_search(PROMPTS[i % 5], BeamSearchParams(4, 20, ignore_eos=True), "x")
            neighbour = engine.submit(PROMPTS[0], GREEDY)
            time.sleep(0.002 * i)
            assert engine.abort("x") or handle.finished
            output = handle.result(30)
            assert output.outputs[0].finish_reason in ("abort", "length")
            assert len(neighbour.result(30).outputs[0].token_ids) == 20
        settle(engine)


def test_close_and_failure_reach_who_waits(model: nn.Module) -> None:
    engine = start(model)
    handle = engine.submit_beam_search(PROMPTS[0], BeamSearchParams(4, 200, ignore_eos=True))
    engine.close()
    with pytest.raises(EngineClosedError):
        handle.result(30)
    with pytest.raises(EngineClosedError):
        engine.submit_beam_search(PROMPTS[0], BeamSearchParams(4, 20))
    engine.scheduler.check()
    counting = CountingModel()
    counting.fail_at = 3
    with Engine(counting, EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33, enforce_eager=True)) as engine:
        handle = engine.submit_beam_search([1, 2], BeamSearchParams(2, 20))
        with pytest.raises(EngineDeadError, match="injected"):
            handle.result(30)


def test_deadline_and_full_queue(model: nn.Module) -> None:
    with start(model, max_queue_size=2) as engine:
        handle = engine.submit_beam_search(PROMPTS[0], BeamSearchParams(4, 200, ignore_eos=True), timeout_s=0.05)
        answer = handle.result(30).outputs[0]
        assert (answer.finish_reason, answer.token_ids) == ("timeout", [])
        settle(engine)
        with engine._lock:  # nobody is taken in meanwhile
            handles = [engine.submit_beam_search(PROMPTS[0], BeamSearchParams(2, 4)) for _ in range(2)]
            with pytest.raises(EngineOverloadedError, match="max_queue_size is 2"):
                engine.submit_beam_search(PROMPTS[0], BeamSearchParams(2, 4))
        assert all(len(handle.result(30).outputs) == 2 for handle in handles)
        assert len(engine.submit_beam_search(PROMPTS[0], BeamSearchParams(2, 4)).result(30).outputs) == 2
        settle(engine)


def test_max_model_len_is_a_limit(model: nn.Module) -> None:
    with start(model, max_model_len=16) as engine:
        output = engine.submit_beam_search(PROMPTS[1], BeamSearchParams(3, 10**18, ignore_eos=True)).result(30)
        check(output.outputs, generated(model, PROMPTS[1], BeamSearchParams(3, 6, ignore_eos=True)))
        with pytest.raises(PromptTooLongError, match="16 prompt tokens, but max_model_len is 16"):
            engine.submit_beam_search([1] * 16, BeamSearchParams(3, 50))


@pytest.mark.parametrize(
    ("eos", "width", "message"),
    [
        ((1, 2, 3), 18, "request x: beam_width is 18, but the limit is 17: a beam has 20 candidates, of which 3"),
        ((1,), 20, "request x: beam_width is 20, but the limit is 19"),
        ((), 9, "request x: beam_width is 9, but the limit is 8: the vocabulary has 8 tokens, of which 0"),
    ],
)
def test_more_beams_than_candidates_are_refused(eos: tuple[int, ...], width: int, message: str) -> None:
    config = EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)
    with Engine(CountingModel(vocab_size=8 if not eos else 100, eos=eos), config) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit_beam_search([1], BeamSearchParams(width, 5), "x")
        with pytest.raises(InvalidRequestError, match="params is a SamplingParams, but must be BeamSearchParams"):
            engine.submit_beam_search([1], SamplingParams())  # type: ignore[arg-type]
        assert len(engine.submit_beam_search([1], BeamSearchParams(width - 1, 5)).result(30).outputs) == width - 1


def test_vocabulary_as_small_as_the_beams() -> None:
    with Engine(CountingModel(vocab_size=3), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)) as engine:
        output = engine.submit_beam_search([1], BeamSearchParams(3, 4)).result(30)
        assert output.outputs[0].token_ids == [2, 0, 1, 2] and len(output.outputs) == 3


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_no_numbers_are_an_error(value: float) -> None:
    """The result had no answer in it, and whoever took the first one met an IndexError."""

    class Broken(CountingModel):
        def forward(self, *step: Any) -> Tensor:
            return super().forward(*step).fill_(value)

    with Engine(Broken(), EngineConfig(max_num_seqs=4, block_size=4, num_blocks=33)) as engine:
        search = engine.submit_beam_search([1], BeamSearchParams(2, 5), "x")
        with pytest.raises(CBatchError, match="request x: no beam goes on, since the model's logits are not finite"):
            search.result(60)
        assert search.finish_reason == "error"
        settle(engine)


def test_handle_has_a_result_and_no_tokens(model: nn.Module) -> None:
    with start(model) as engine:
        handle = engine.submit_beam_search(PROMPTS[0], BeamSearchParams(2, 5))
        for read in (lambda: iter(handle), lambda: handle.next_chunk(1), lambda: asyncio.run(handle.anext_chunk())):
            with pytest.raises(CBatchError, match="a beam search has no"):
                read()
        output = handle.result(30)
        assert output == handle.result() and pickle.loads(pickle.dumps(output)) == output
        times = output.metrics
        assert times.arrival_time <= times.first_scheduled_time <= times.finished_time  # type: ignore[operator]


def test_doors(model: nn.Module) -> None:
    """``LLM`` and ``AsyncLLM``, with text, and the end-of-sequence token's own where it is asked for."""
    options: dict[str, Any] = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    params = BeamSearchParams(3, 10)
    with LLM(model, Numbers(), **options) as llm:
        outputs = llm.beam_search(["3 1 4", "50"], params)
        assert [output.prompt for output in outputs] == ["3 1 4", "50"]
        for output in outputs:
            check(output.outputs, generated(model, output.prompt_token_ids, params))
            for one in output.outputs:
                shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
                assert one.text == Numbers().decode(shown)
        assert any(one.finish_reason == "stop" for output in outputs for one in output.outputs)
        (with_end,) = llm.beam_search("3 1 4", BeamSearchParams(3, 10, include_stop_str_in_output=True))
        assert [one.text for one in with_end.outputs] == [Numbers().decode(one.token_ids) for one in with_end.outputs]
        with pytest.raises(InvalidRequestError, match=r"prompt 1: .*out of range"):
            llm.beam_search([[1], [1000]], params)
        assert llm.beam_search([], params) == []
        settle(llm.engine)

    async def search() -> None:
        async with AsyncLLM(model, Numbers(), **options) as llm:
            found = await asyncio.gather(*[llm.beam_search(prompt, params) for prompt in ("3 1 4", "50")])
            for one, other in zip(found, outputs, strict=True):
                assert [a.text for a in one.outputs] == [a.text for a in other.outputs] and one.prompt == other.prompt
            task = asyncio.create_task(llm.beam_search("3 1 4", BeamSearchParams(3, 200, ignore_eos=True), "gone"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(settle, llm.engine)

    asyncio.run(search())


def test_search_that_is_over_early_frees_its_beams(model: nn.Module) -> None:
    """Those that would go on are in no step any more."""
    params = BeamSearchParams(3, 60, early_stopping=True, length_penalty=0.0)
    with start(model) as engine:
        output = engine.submit_beam_search(PROMPTS[0], params).result(60)
        check(output.outputs, generated(model, PROMPTS[0], params))
        assert max(len(one.token_ids) for one in output.outputs) < 60
        settle(engine)


def test_logic_is_told_the_tokens_that_may_end_it() -> None:
    assert BeamSearch(BeamSearchParams(3, 5), 5, (7, 8)).num_candidates == 5
    assert BeamSearch(BeamSearchParams(3, 5, ignore_eos=True), 5, (7, 8)).num_candidates == 3
