"""Benchmarks have a command line on any machine, say in one line what they lack, and run on the CPU where they can."""

import asyncio
import importlib
import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import clients, decode
from cbatch.errors import EngineDeadError
from cbatch.models.loader import load_model
from cbatch.scheduler.kv_spec import KVSpec
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
    "ladder": [],
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


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(("prefill", "--repeat", 0), ("vs_transformers", "--rounds", 0), ("traffic", "--limit", 0)),
        *(("serving", "--rates", 0), ("serving", "--rates", "inf"), ("long_prompt", "--seconds", 0)),
        *(("decode", "--steps", 0), ("shared_prefix", "--num-groups", -1), ("headline", "--num-requests", "many")),
    ],
)
def test_what_leaves_nothing_to_measure_is_said_at_once(run, capsys, name, option, value):
    """The engine ran first, in some for minutes; then came an IndexError, or a division by zero."""
    with pytest.raises(SystemExit) as end:
        run(name, option, value)
    assert end.value.code == 2
    assert f"error: argument {option}: " in capsys.readouterr().err


def test_the_headline_is_of_all_requests_or_none(run, monkeypatch):
    """Those that failed were left out of its tokens, and nothing was said."""
    from benchmarks import headline

    model = SimpleNamespace(vocab_size=101)
    failed = SimpleNamespace(figures={}, first_error=EngineDeadError("the device failed"))
    for name, stub in (
        ("needs_gpu", lambda parser: None),
        ("environment", lambda device: {}),
        ("load_model", lambda *_, **__: model),
        ("Engine", SimpleNamespace(from_model=lambda *_, **__: nullcontext())),
        ("warm_up", lambda *_: None),
        ("run_throughput", lambda *_: failed),
    ):
        monkeypatch.setattr(headline, name, stub)
    with pytest.raises(EngineDeadError):
        run("headline", "--num-requests", 2)


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


def event(name, start, on_device=True):
    kind = "DeviceType.CUDA" if on_device else "DeviceType.CPU"
    return SimpleNamespace(name=lambda: name, start_ns=lambda: start, device_type=lambda: kind)


def test_launches_are_counted_over_whole_steps():
    """The profiler went on behind the steps that were waited for, and all that it saw was divided by those: one graph
    of 264 kernels had 277 a step."""
    landing = "Memcpy DtoH (Device -> Pinned)"
    events = [event("the graph before, its end", 5), event(landing, 2)]
    for begin in range(10, 90, 10):  # of eight steps; the first and the last are there in part
        own = [event(f"kernel {i}", begin + i) for i in range(3)] + [event("Memcpy HtoD (Pinned -> Device)", begin + 1)]
        own += [event(landing, begin + 5), event("cudaGraphLaunch", begin, on_device=False)]
        events += own[1:] if begin == 10 else own[:2] if begin == 80 else own
    found = decode.launches(reversed(events))
    assert found["profiled_steps"] == 6
    assert found["kernels_per_step"] == 3
    assert found["copies_per_step"] == {"Memcpy HtoD (Pinned -> Device)": 1, landing: 1}
    assert found["calls_per_step"] == {"cudaGraphLaunch": 1}
    assert decode.launches(events[:2]) == decode.launches([]) == {}


def test_the_roofline_reads_no_more_of_a_layer_than_its_window():
    """A model with windows came closer to the roofline than it is, past 100% at long contexts; and the values of one
    whose heads are smaller than those of its keys were counted as large as these."""
    specs = [KVSpec(2, 16, 16), KVSpec(2, 16, 16, window=100), KVSpec(1, 24, 8)]
    assert decode.kv_bytes(specs, 2, 50.0) == 2 * 50 * (64 + 64 + 32)
    assert decode.kv_bytes(specs, 2, 1000.0) == 2 * (1000 * 64 + 100 * 64 + 1000 * 32)


def test_the_ratio_of_n_plus_1_to_n_is_of_the_same_schedule_and_context():
    def measured(schedule, context, batch, ms):
        names = ("model", "schedule", "context", "num_requests", "ms_per_step_p50")
        return dict(zip(names, ("m", schedule, context, batch, ms), strict=True))

    runs = [measured("async", 10, 32, 4.0), measured("async", 10, 33, 5.0), measured("sync", 10, 33, 9.0)]
    assert [found["ratio"] for found in decode.ratios(runs)] == [1.25]


@pytest.mark.parametrize("table", ["figures", "kernels", "ladder"])
def test_the_pages_have_the_figures_of_the_results(table):
    from benchmarks import figures as f

    file, begin, made, end = {
        "figures": (f.README, f.BEGIN, f.table, f.END),
        "kernels": (f.MORE, f.KERNELS_BEGIN, f.kernel_table, f.KERNELS_END),
        "ladder": (f.MORE, f.LADDER_BEGIN, f.ladder_table, f.LADDER_END),
    }[table]
    _, _, rest = file.read_text(encoding="utf-8").partition(begin)
    assert rest.partition(end)[0].strip() == made().strip(), "run: python -m benchmarks.figures --write"


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
    run(
        "serving", "--shape", tiny, "--device", "cpu", "--limit", 3, "--rates", 50, 500,
        "--prefix-caching", "on", "off", "--json", file,
    )  # fmt: skip
    runs = json.loads(file.read_text())["runs"]
    assert [(run["rate"], run["enable_prefix_caching"]) for run in runs] == [
        (50, True), (500, True), (50, False), (500, False),
    ]  # fmt: skip
    for figures in runs:
        assert figures["hit_rate"] == 0
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


def test_interference_is_measured_while_all_decode_or_not_at_all(run, monkeypatch, tmp_path):
    """With more seconds than the requests have tokens, the figures of the last few, or of none, stood for 32."""
    from benchmarks import interference

    llm = SimpleNamespace(close=lambda: None, engine=None)
    model = SimpleNamespace(vocab_size=101)
    for name, stub in (
        ("needs_gpu", lambda parser: None),
        ("environment", lambda device: {}),
        ("load_model", lambda *_, **__: model),
        ("load_tokenizer", lambda folder: []),
        ("AsyncLLM", lambda *_, **__: llm),
        ("CASES", {"nobody": (lambda *_: {"num_running": 31}, 32)}),
    ):
        monkeypatch.setattr(interference, name, stub)
    file = tmp_path / "x.json"
    with pytest.raises(SystemExit, match="31 of 32 requests decoded to the end"):
        run("interference", "--tokenizer", "x", "--cases", "nobody", "--json", file)
    assert not file.exists()


def test_a_long_prompt_beside_requests_that_fail_is_not_waited_for():
    """It waited for their first tokens for ever."""
    from benchmarks import long_prompt

    async def read(self):
        if self.handle == "alone":
            return self
        raise EngineDeadError("the device failed")

    engine = SimpleNamespace(submit=lambda prompt, params: "alone" if params.max_tokens == 1 else "short")
    with pytest.MonkeyPatch.context() as patched, pytest.raises(EngineDeadError):
        patched.setattr(clients.Stream, "read", read)
        asyncio.run(asyncio.wait_for(long_prompt.measure(engine, [[1], [2]], [[3]], 0.1, 5), timeout=5))


LADDER = ["--device", "cpu", "--batches", 1, 2, "--new-tokens", 3, 6, "--input-len", 5]


def test_the_ladder_merges_runs_into_one_file(run, capsys, tiny, tmp_path, monkeypatch):
    file = tmp_path / "ladder.json"
    run("ladder", "--shapes", tiny, *LADDER, "--rungs", "no-cache", "static", "--json", file)
    first = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert [(r["rung"], r["batch"], r["new_tokens"]) for r in first["runs"]] == [
        (rung, batch, count) for rung in ("no-cache", "static") for batch in (1, 2) for count in (3, 6)
    ]
    assert all(r["tokens_per_s"] * r["seconds"] == pytest.approx(r["batch"] * r["new_tokens"]) for r in first["runs"])
    run("ladder", "--shapes", tiny, *LADDER, "--rungs", "static", "engine", "--seconds", 0, "--json", file)
    assert "engine: batches [1, 2] left out, --seconds is over" in capsys.readouterr().out
    assert json.loads(file.read_text()) == first
    run("ladder", "--shapes", tiny, *LADDER, "--rungs", "static", "engine", "--json", file)
    again = json.loads(file.read_text())["runs"]
    assert len(again) == 12 and again[:4] == first["runs"][:4]
    assert [r["rung"] for r in again[4:]] == ["static"] * 4 + ["engine"] * 4
    monkeypatch.setitem(first["environment"], "torch", "1.0")
    file.write_text(json.dumps(first))
    with pytest.raises(SystemExit):
        run("ladder", "--shapes", tiny, *LADDER, "--json", file)
    assert "holds runs with other torch" in capsys.readouterr().err


def test_the_ladder_ends_in_a_line_where_it_cannot_climb(run, capsys, tmp_path, tiny):
    """Zero tokens were an error of the engine, after the rungs before it had been measured; a folder for ``--json``
    that is not there was one after the first, and a second shape that is not there one after all of the first. More
    tokens than there are positions end a GPU's use in the process."""
    here = ("--device", "cpu", "--shapes", tiny)
    for arguments, says in (
        (("--device", "cpu", "--batches", 0), "--batches: 0 is not at least 1"),
        (("--device", "cpu", "--new-tokens", 5, -1), "not at least 1"),
        (("--device", "cuda:1"), "invalid choice: 'cuda:1'"),  # whose memory would not have been measured
        ((*here, "--dtype", "load"), "invalid choice: 'load'"),
        ((*here, "--seconds", "nan"), "nan is no number of seconds"),
        ((*here, "--json", tmp_path / "no" / "x.json"), "x.json is no file in a folder that is there"),
        ((*here, "--json", tmp_path), "is no file in a folder that is there"),
        ((*here, "--out", "x.png"), "--out is for --plot"),
        ((*here, "llama-9b"), "llama-9b is no folder, no config file, and none of the shapes gpt2-shape, llama-1b"),
        ((*here, Path(tiny).parent), "would both be named"),
        ((*here, "--new-tokens", 5000), "32 + 5000 tokens are 5032, but"),
        (("--plot", "a.json", "--markdown", "a.json"), "not allowed with"),
        (("--markdown", tmp_path / "none.json"), "none.json is no file with runs"),
    ):
        with pytest.raises(SystemExit):
            run("ladder", *arguments)
        assert says in capsys.readouterr().err


NO_RUNS = ["", "[", "[]", "{}", '{"runs": []}', '{"runs": {"a": 1}}', '{"runs": [{"rung": "engine"}]}']


@pytest.mark.parametrize("text", [*NO_RUNS, '{"runs": [{"rung": "stairs", "tokens_per_s": 1.0}]}'])
def test_what_is_no_file_of_the_ladder_is_said_in_a_line(run, capsys, tmp_path, tiny, text):
    """As a run that was ended in the middle of a write leaves it."""
    file = tmp_path / "broken.json"
    file.write_text(text)
    for option in ("--markdown", "--plot", *([] if text == '{"runs": []}' else ["--json"])):
        with pytest.raises(SystemExit):
            run("ladder", "--device", "cpu", "--shapes", tiny, option, file)
        assert "broken.json is no file with runs of the ladder" in capsys.readouterr().err


def test_a_ladder_that_ran_out_of_time_in_a_process_of_its_own_goes_on(run, capsys, tiny, tmp_path, monkeypatch):
    """``--seconds`` was over while that process loaded: it wrote no file, and the others' runs ended in an error."""
    from benchmarks import ladder

    monkeypatch.setattr(ladder.subprocess, "run", lambda *_, **__: Namespace(returncode=0))
    run("ladder", "--shapes", tiny, *LADDER, "--rungs", "expandable")
    assert capsys.readouterr().out.startswith("expandable: left out, --seconds was over before its first run")


def test_config_files_are_known_by_their_folders(run, tiny, tmp_path):
    """All of them are called config.json: the runs of a second model replaced those of the first."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "config.json"
    other.write_text(Path(tiny).read_text().replace('"eos_token_id": ', '"eos_token_id": [], "was": '))
    file = tmp_path / "two.json"
    sizes = ("--device", "cpu", "--batches", 1, "--new-tokens", 2, "--input-len", 4)
    run("ladder", "--shapes", tiny, other, *sizes, "--rungs", "kv-cache", "--json", file)
    assert {r["shape"] for r in json.loads(file.read_text())["runs"]} == {Path(tiny).parent.name, "other"}


def test_the_ladder_goes_past_the_rung_that_the_cpu_has_not(run, capsys, tiny):
    """``--device cpu`` without ``--rungs`` ended in an error in the middle of the ladder."""
    run("ladder", "--shapes", tiny, *LADDER, "--rungs", "graphs")
    assert capsys.readouterr().out.startswith("graphs: left out, there are no CUDA graphs on the CPU")


def test_the_engine_computes_its_prompts_in_every_run_of_the_ladder(tiny, monkeypatch):
    """From two blocks on, it had them in its prefix cache from the warm-up, and the other rungs computed theirs."""
    import cbatch
    from benchmarks import ladder

    made = []

    class Kept(cbatch.LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(cbatch, "LLM", Kept)
    bench = ladder.Bench(tiny, torch.device("cpu"), torch.float32, 150, float("inf"))
    with ladder.engine(bench, 2, 4) as run:
        first, second = (run(bench.prompts(2), 4) for _ in range(2))
        stats = made[0].engine.stats()
    assert first == second
    assert (stats["num_asked_tokens"], stats["num_hit_tokens"]) == (2 * 2 * 150, 0)


def test_what_compiles_on_the_cpu_is_not_timed(tiny, monkeypatch):
    """Nothing is kept there for another number of tokens: 120 s of torch.compile were the seconds of 3 tokens."""
    from contextlib import contextmanager

    from benchmarks import ladder

    seen, timed = [], []

    @contextmanager
    def opened(*_):
        yield lambda ids, count: seen.append(count)

    def measure(bench, run, batch, count):
        timed.append(count in seen)
        return {}

    monkeypatch.setattr(ladder, "opened", opened)
    monkeypatch.setattr(ladder, "measure", measure)
    bench = ladder.Bench(tiny, torch.device("cpu"), torch.float32, 5, float("inf"))
    assert len(list(ladder.climb(bench, "interleaved", Namespace(new_tokens=[3, 6], batches=[1])))) == 2
    assert timed == [True, True]


def climbed(rungs):
    """Runs of a ladder: batch 1 and 8, 50 and 100 tokens, each rung so many times 10 tokens/s a row."""
    names = {"shape": "s", "input_len": 5, "dtype": "bfloat16", "device": "cuda", "first_s": 2.5, "ready_s": 3.0}
    memory = {"peak_mib": 300.0, "reserved_mib": 350.0, "fragmentation_mib": 50.0, "activity_pct": 55.0}
    return [
        names
        | memory
        | {"rung": rung, "batch": batch, "new_tokens": count, "seconds": 1.0, "tokens_per_s": 10.0 * batch * times}
        for rung, times in rungs.items()
        for batch in (1, 8)
        for count in (50, 100)
    ]


def test_the_table_of_the_ladder_says_how_many_times_the_first_rung():
    from benchmarks import ladder

    runs = climbed({"no-cache": 1, "interleaved": 7.5, "engine": 12, "one-stream": 6})
    lines = ladder.markdown(runs[:-1]).splitlines()
    assert "| no KV cache | 10 (×1.00) | 10 (×1.00) | 2.5 | 55.0% | 300 | 350 | 50 |" in lines
    assert "| cbatch's engine | 960 (×12.00) | 960 (×12.00) | 2.5 | 55.0% | 300 | 350 | 50 |" in lines
    assert "| *beside: interleaved, but one stream* | 480 (×6.00) |  | 2.5 | 55.0% | 300 | 350 | 50 |" in lines
    assert "- of that, the second stream alone: ×1.25 (50 tokens), ×1.25 (100 tokens)" in lines
    assert "- the engine over two streams: ×1.60 (50 tokens), ×1.60 (100 tokens)" in lines
    assert not [line for line in lines if "StaticCache over" in line], "which were not measured"
    ups = ladder.speed_ups(climbed({"one-stream": 1, "static": 2, "interleaved": 3}))
    assert sorted(set(ups.values())) == [0.5, 1.0, 1.5], "what is beside the ladder is no first rung"


def test_only_what_is_alike_shares_a_table_of_the_ladder():
    """Two dtypes, or two lengths of prompts, in one file: one's rates stood in the other's row, under its name."""
    from benchmarks import ladder

    runs = climbed({"static": 1, "engine": 12})
    runs += [r | {"dtype": "float32", "tokens_per_s": r["tokens_per_s"] / 2} for r in runs]
    lines = ladder.markdown(runs).splitlines()
    assert [line.partition(";")[0] for line in lines if line.startswith("s, ")] == [
        f"s, batch {batch}, 5 tokens in, {dtype}" for dtype in ("bfloat16", "float32") for batch in (1, 8)
    ]
    for rate in ("120", "960", "60", "480"):
        assert f"| cbatch's engine | {rate} (×12.00) | {rate} (×12.00) | 2.5 | 55.0% | 300 | 350 | 50 |" in lines


@pytest.mark.parametrize("ending", [None, ".svg"])
def test_the_ladder_has_a_picture(run, tmp_path, ending):
    pytest.importorskip("matplotlib", reason="the extra `plot`, which the extra `dev` has too")
    file = tmp_path / "ladder.json"
    file.write_text(json.dumps({"runs": climbed({"no-cache": 1, "interleaved": 7.5, "engine": 12, "graphs": 6})}))
    out = file.with_suffix(ending or ".png")
    run("ladder", "--plot", file, *(["--out", out] if ending else []))
    picture = out.read_bytes()
    assert picture.startswith(b"\x89PNG" if ending is None else b"<?xml")
    assert len(picture) > 10_000


def test_a_number_of_tokens_has_one_shade_in_the_whole_picture(tmp_path, monkeypatch):
    """The legend is in the first panel. One with 200 tokens only had the shade that is there for 400."""
    axes = pytest.importorskip("matplotlib.axes", reason="the extra `plot`, which the extra `dev` has too")
    from benchmarks import ladder

    plain, drawn = axes.Axes.bar, []

    def bar(self, *args, **options):
        drawn.append((options.get("label"), options["color"]))
        return plain(self, *args, **options)

    monkeypatch.setattr(axes.Axes, "bar", bar)
    runs = climbed({"static": 1, "engine": 12})
    ladder.plot([r for r in runs if (r["batch"], r["new_tokens"]) != (8, 100)], tmp_path / "x.png")
    legend = {label: color for label, color in drawn if label}
    assert [colors for label, colors in drawn if not label] == [
        [legend[f"{count} new tokens"]] * 2 for count in (50, 100, 50)
    ]


def test_the_busy_share_counts_what_overlaps_once():
    from benchmarks.common import busy_share

    assert busy_share([(0, 10), (5, 12), (6, 7), (20, 30), (30, 40)]) == (12 + 20) / 40
