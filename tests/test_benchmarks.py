"""Benchmarks have a command line on any machine, say in one line what they lack, and run on the CPU where they can."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import decode
from cbatch.models.loader import load_model
from tests.models.families import FAMILIES

FOLDER = Path(decode.__file__).parent
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef main(" in path.read_text(encoding="utf-8"))
NEED_GPU = {
    "attention_sweep": [],
    "decode": [],
    "headline": [],
    "interference": ["--tokenizer", "x"],
    "kernels": ["--device", "cuda"],
    "long_prompt": [],
    "prefill": [],
    "serving": [],
    "shared_prefix": [],
    "startup": [],
    "traffic": [],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The config of a tiny model that takes the longest request of the traffic."""
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 4096
    config.architectures = ["LlamaForCausalLM"]
    folder = tmp_path_factory.mktemp("tiny")
    config.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture
def run(monkeypatch):
    """Run ``benchmarks.name`` as a command."""

    def call(name, *options):
        monkeypatch.setattr("sys.argv", [name, *map(str, options)])
        importlib.import_module(f"benchmarks.{name}").main()

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_gpu(run, capsys, name):
    with pytest.raises(SystemExit) as end:
        run(name, "--help")
    assert end.value.code == 0
    assert ("--json" in capsys.readouterr().out) == (name != "figures")  # which reads them


@pytest.mark.parametrize("name", NEED_GPU)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(run, capsys, name):
    with pytest.raises(SystemExit) as end:
        run(name, *NEED_GPU[name])
    assert end.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"python -m benchmarks.{name}: needs a CUDA GPU, and torch finds none here\n"


def test_traffic_gives_every_request_its_tokens(run, capsys, tiny, tmp_path):
    file = tmp_path / "traffic.json"
    run("traffic", "--shapes", tiny, "--device", "cpu", "--limit", 4, "--json", file)
    report = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    (figures,) = report["runs"]
    assert (report["prompt_tokens"], figures["output_tokens"]) == (296 + 249 + 244 + 414, 570 + 86 + 132 + 402)


def test_the_traffic_is_the_whole_of_it():
    from benchmarks.traffic import read_lengths

    lengths = read_lengths(None)
    assert len(lengths) == 512
    assert [sum(column) for column in zip(*lengths, strict=True)] == [258_125, 143_784]


def test_prefill_counts_the_operations_of_a_prompt(run, tiny, tmp_path):
    file = tmp_path / "prefill.json"
    run("prefill", "--shape", tiny, "--device", "cpu", "--num-prompts", 3, "--input-len", 50, "--json", file)
    report = json.loads(file.read_text())
    # Hidden 48, heads of 16: 4 of queries and 2 on 2 of keys and values; 80 in the MLP; 3 layers; 101 tokens.
    matrices = 48 * (4 + 2 + 2) * 16 + 4 * 16 * 48 + 48 * 2 * 80 + 80 * 48
    assert report["tflop"] == pytest.approx(
        {
            "layers": 2 * 3 * matrices * 3 * 50 / 1e12,
            "head": 2 * 48 * 101 * 3 / 1e12,
            "attention": 4 * 4 * 16 * 3 * 3 * (50 * 51 / 2) / 1e12,
        }
    )
    assert report["runs"][0]["matrix_rate_share"] is None


def test_a_window_of_decode_has_exactly_the_batch_asked_for(tiny):
    model = load_model(tiny, load_format="dummy", model_impl="auto")
    args = Namespace(sampling=["greedy"], batches=[2, 5], contexts=[40], steps=10, profiled_steps=0, depth=None)
    runs = list(decode.windows(model, "async", args, bandwidth=1e10))
    assert [run["num_requests"] for run in runs] == [2, 5]
    assert all(8 < run["mean_context"] < 40 + decode.ROOM for run in runs)


@pytest.mark.parametrize("kind", ["one-grammar", "one-processor"])
def test_one_row_of_a_batch_of_decode_waits_for_the_host(tiny, kind):
    if kind == "one-grammar":
        pytest.importorskip("llguidance")
    model = load_model(tiny, load_format="dummy", model_impl="auto")
    model.eos_token_ids = (2,)  # as the shapes have one
    args = Namespace(sampling=[kind], batches=[3], contexts=[40], steps=10, profiled_steps=0, depth=None)
    (run,) = decode.windows(model, "async", args, bandwidth=1e10)
    assert (run["num_requests"], run["sampling"]) == (3, kind)


def test_the_ratio_of_33_to_32_is_of_the_same_schedule_and_context():
    def measured(schedule, context, batch, ms):
        names = ("model", "schedule", "context", "num_requests", "ms_per_step_p50")
        return dict(zip(names, ("m", schedule, context, batch, ms), strict=True))

    runs = [measured("async", 10, 32, 4.0), measured("async", 10, 33, 5.0), measured("sync", 10, 33, 9.0)]
    assert [found["step_33_over_32"] for found in decode.ratios(runs)] == [1.25]


def test_the_readme_has_the_figures_of_the_results():
    from benchmarks import figures

    _, _, rest = figures.README.read_text(encoding="utf-8").partition(figures.BEGIN)
    assert rest.partition(figures.END)[0].strip() == figures.table().strip(), (
        "run: python -m benchmarks.figures --write"
    )


def test_shared_prefixes_are_hit_as_often_as_they_can_be(run, capsys, tiny, tmp_path):
    """Within a group the first computes the prefix and the others wait for it, so nothing is computed twice."""
    file = tmp_path / "shared.json"
    sizes = ("--num-requests", 24, "--num-groups", 3, "--prefix-len", 128, "--own-len", 5, "--output-len", 4)
    run("shared_prefix", "--shape", tiny, "--device", "cpu", *sizes, "--json", file)
    report = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    cached, computed = report["runs"]
    assert (cached["hit_rate"], computed["hit_rate"]) == (report["best_hit_rate"], 0.0)
    assert cached["hit_rate"] == pytest.approx(21 * 128 / (24 * 133))
    assert cached["output_tokens"] == computed["output_tokens"] == 24 * 4


def test_serving_sends_each_request_at_its_time(run, tiny, tmp_path):
    file = tmp_path / "serving.json"
    run("serving", "--shape", tiny, "--device", "cpu", "--limit", 3, "--rates", 50, 500, "--json", file)
    slow, fast = json.loads(file.read_text())["runs"]
    for figures in (slow, fast):
        assert figures["num_requests"] == 3
        assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"] <= figures["latency_ms_p99"]
        assert figures["itl_ms_p99"] > 0


def test_a_long_prompt_is_measured_alone_and_beside(run, tiny, tmp_path):
    file = tmp_path / "long.json"
    sizes = ("--num-running", 3, "--prompt-len", 700, "--short-len", 5, "--most-tokens", 3000, "--seconds", 0.2)
    run("long_prompt", "--shape", tiny, "--device", "cpu", *sizes, "--json", file)
    report = json.loads(file.read_text())
    assert report["steps_beside"] >= 3  # 256 tokens a step
    assert report["ttft_ratio"] == report["ttft_beside_s"] / report["ttft_alone_s"]
    assert report["itl_disturbed_ms_p99"] > 0 and report["itl_undisturbed_ms_p99"] > 0
