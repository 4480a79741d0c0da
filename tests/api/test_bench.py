"""The figures mean what they say: counted, timed from the handles, with failures named."""

import json

import pytest

from cbatch import Engine, EngineDeadError, PromptTooLongError, SamplingParams
from cbatch.bench import environment, random_prompts, run_throughput, warm_up
from tests.counting import CountingModel, counted

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)

# What reads the JSON relies on.
FIELDS = {
    *("schedule", "device", "model", "num_requests", "failed", "output_tokens", "output_tokens_per_s"),
    *("total_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p99", "ms_per_step_p50"),
    *("host_us_per_step_p50", "activity_kind", "activity_pct"),
}


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_figures_of_a_run(schedule):
    with Engine.from_model(CountingModel(), num_blocks=100, block_size=4, schedule=schedule) as engine:
        prompts = [[i, i + 1] for i in range(10)]
        warm_up(engine, prompts)
        result = run_throughput(engine, prompts, PARAMS)
    figures = result.figures
    assert figures.keys() >= FIELDS
    assert (figures["schedule"], figures["device"], figures["activity_kind"]) == (schedule, "cpu", "cpu_lane")
    assert (figures["num_requests"], figures["failed"]) == (10, 0)
    assert (figures["input_tokens"], figures["output_tokens"]) == (20, 50)
    assert figures["output_tokens_per_s"] == pytest.approx(50 / figures["duration_s"])
    assert figures["total_tokens_per_s"] == pytest.approx(70 / figures["duration_s"])
    assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"] <= figures["duration_s"] * 1e3
    assert 0 < figures["tpot_ms_p50"] <= figures["tpot_ms_p99"]
    assert 0 <= figures["activity_pct"] <= 100
    assert 5 <= figures["steps"] <= 12  # of this run alone, without the warm-up
    assert [o.outputs[0].token_ids for o in result.outputs] == [counted(i + 1, 5) for i in range(10)]
    json.dumps(figures, allow_nan=False)


def test_tokens_of_every_answer_of_a_request_are_counted():
    """Those of the first answer alone were: half of what two answers a prompt had."""
    params = SamplingParams(temperature=1.0, n=2, max_tokens=5, ignore_eos=True)
    with Engine.from_model(CountingModel(), num_blocks=100, block_size=4) as engine:
        figures = run_throughput(engine, [[1], [2], [3]], params).figures
    assert (figures["num_requests"], figures["output_tokens"]) == (3, 30)
    assert figures["output_tokens_per_s"] == pytest.approx(30 / figures["duration_s"])


def test_request_that_fails_is_counted_and_the_others_are_measured():
    with Engine.from_model(CountingModel(max_model_len=16), num_blocks=100, block_size=4) as engine:
        result = run_throughput(engine, [[1], [1] * 16, [2]], PARAMS)
    assert result.figures["failed"] == 1
    assert result.figures["output_tokens"] == 10
    assert result.outputs[1] is None
    assert isinstance(result.first_error, PromptTooLongError)


def test_run_on_an_engine_that_dies_has_only_failures():
    model = CountingModel()
    model.fail_at = 2
    with Engine.from_model(model, num_blocks=100, block_size=4) as engine:
        result = run_throughput(engine, [[1], [2]], PARAMS)
    assert result.figures["failed"] == 2
    assert isinstance(result.first_error, EngineDeadError)
    assert result.figures["ttft_ms_p50"] is None
    json.dumps(result.figures, allow_nan=False)


def test_one_token_has_no_time_per_further_token():
    with Engine.from_model(CountingModel(), num_blocks=100, block_size=4) as engine:
        result = run_throughput(engine, [[1]], SamplingParams(temperature=0.0, max_tokens=1))
    assert result.figures["tpot_ms_p50"] is None
    assert result.figures["ttft_ms_p50"] > 0


def test_progress_bar_of_a_run(capsys):
    with Engine.from_model(CountingModel(), num_blocks=100, block_size=4) as engine:
        run_throughput(engine, [[1], [2]], PARAMS, progress="measuring")
    printed = capsys.readouterr().err
    assert "measuring" in printed
    assert "2/2" in printed


def test_random_prompts_are_the_same_for_the_same_seed():
    prompts = random_prompts(3, 7, 50, seed=1)
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert all(type(token) is int and 0 <= token < 50 for prompt in prompts for token in prompt)
    assert prompts == random_prompts(3, 7, 50, seed=1) != random_prompts(3, 7, 50, seed=2)


def test_environment_names_versions_and_machine():
    facts = environment()
    assert facts.keys() >= {"cbatch", "python", "torch", "transformers", "triton", "device_name", "platform"}
    assert facts["device_name"]
