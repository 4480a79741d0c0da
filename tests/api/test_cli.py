"""The command line on a tiny model: what is printed, what is written, and how it says no."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import cbatch
from cbatch import cli
from tests.api.programs import ROOT, environment, run_program
from tests.api.test_bench import FIELDS


@pytest.fixture
def run(monkeypatch):
    """Calls the program in this process; rich prints to what the runner captures, wide enough not to break lines."""
    from rich.console import Console

    def call(*arguments, stdin=None):
        class Late(Console):  # looks sys.stdout up when it prints: the runner swaps it
            pass

        monkeypatch.setattr(cli, "out", Late(width=160))
        monkeypatch.setattr(cli, "err", Late(width=160, stderr=True))
        return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)

    return call


def one_line(done):
    """Whether a command said no as it should."""
    return done.exit_code == 1 and done.stderr.startswith("cbatch: ") and done.stderr.count("\n") == 1


def test_version(run):
    assert run("--version").stdout == f"cbatch {cbatch.__version__}\n"


def test_runs_as_a_module_uninstalled():
    done = run_program("-m", "cbatch", "--version")
    assert (done.returncode, done.stdout) == (0, f"cbatch {cbatch.__version__}\n")


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["bench"], ["bench", "throughput"], ["demo"]])
def test_help_of_every_command(run, command):
    assert "Usage:" in run(*command, "--help").stdout


def test_help_names_the_extra_for_grammars(run):
    """In brackets, as pip takes it, rich took it for markup, and the help said "needs cbatch"."""
    assert "'grammar'" in run("generate", "--help").stdout


def test_generate_ends_before_a_stop_string(run, tiny_model):
    options = ("--model", tiny_model, "--max-tokens", 30, "--temperature", 0)
    text = run("generate", "hello", *options).stdout.removesuffix("\n")
    stop = text[5:8]
    before = text[: text.index(stop)]
    assert run("generate", "hello", *options, "--stop", "never!", "--stop", stop).stdout == before + "\n"
    answer = json.loads(run("generate", "hello", *options, "--stop", stop, "--json").stdout)
    assert (answer["text"], answer["finish_reason"]) == (before, "stop")
    assert one_line(run("generate", "hello", *options, "--stop", ""))


def test_generate_keeps_to_a_structure(run, tiny_model, tmp_path):
    pytest.importorskip("llguidance")
    options = ("--model", tiny_model, "--max-tokens", 60, "--seed", 1)
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [{"a": 1}, [true]]}')
    assert json.loads(run("generate", "hello", *options, "--json-schema", schema).stdout) in ({"a": 1}, [True])
    assert run("generate", "hello", *options, "--choice", "yes", "--choice", "no").stdout in ("yes\n", "no\n")
    assert run("generate", "hello", *options, "--regex", "[ab]{3}c").stdout.rstrip("\n")[3:] == "c"
    both = run("generate", "hello", *options, "--regex", "a", "--choice", "b")
    assert one_line(both) and "exactly one" in both.stderr
    schema.write_text("{")
    assert one_line(run("generate", "hello", *options, "--json-schema", schema))


def test_generate_prints_one_answer_as_it_comes(run, tiny_model):
    options = ("--model", tiny_model, "--max-tokens", 5, "--temperature", 0)
    answer = run("generate", "hello", *options)
    assert answer.exit_code == 0, answer.output
    as_json = run("generate", "hello", *options, "--json")
    (line,) = as_json.stdout.splitlines()
    line = json.loads(line)
    assert answer.stdout == line["text"] + "\n"
    assert line["prompt"] == "hello"
    assert len(line["token_ids"]) == 5
    assert line["finish_reason"] == "length"


def test_generate_takes_penalties_and_gives_several_answers(run, tiny_model):
    options = ("--model", tiny_model, "--max-tokens", 8, "--seed", 1)
    shape = ("--min-p", 0.1, "--repetition-penalty", 1.5, "--presence-penalty", 1, "--frequency-penalty", 0.5, "-n", 3)
    answer = run("generate", "hello", *options, *shape, "--json")
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [len(line["token_ids"]) for line in lines] == [8, 8, 8]
    assert len({tuple(line["token_ids"]) for line in lines}) == 3
    assert run("generate", "hello", *options, *shape).stdout.count("hello") >= 3
    refused = run("generate", "hello", *options, "--presence-penalty", 3)
    assert one_line(refused) and "presence_penalty=3.0" in refused.stderr


def test_generate_answers_many_and_reads_stdin(run, tiny_model):
    options = ("--model", tiny_model, "--max-tokens", 3, "--seed", 1, "--json")
    many = run("generate", "hello", "world", *options)
    assert [json.loads(line)["prompt"] for line in many.stdout.splitlines()] == ["hello", "world"]
    assert run("generate", *options, stdin="hello\n\nworld\n").stdout == many.stdout
    plain = run("generate", "hello", "[b]", "--chat", "--model", tiny_model, "--max-tokens", 3)
    assert plain.exit_code == 0, plain.output
    assert "hello\n" in plain.stdout
    assert "[b]\n" in plain.stdout


def test_chat_keeps_the_conversation(run, tiny_model, monkeypatch):
    asked = []
    encode = cli._encode

    def spy(engine, prompts):
        asked.extend(prompts)
        return encode(engine, prompts)

    monkeypatch.setattr(cli, "_encode", spy)
    talk = run("chat", "--model", tiny_model, "--system", "Be kind.", "--max-tokens", 4, stdin="hello\n\nagain\n")
    assert talk.exit_code == 0, talk.output
    roles = [[message["role"] for message in conversation] for conversation in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert asked[1][1]["content"] == "hello"


def test_chat_forgets_the_oldest_when_it_grows_too_long(run, tiny_model, monkeypatch):
    """A conversation outgrows any context; what is said now must still be answered."""
    turns = "".join(f"hello number {i}\n" for i in range(8))
    talk = run("chat", "--model", tiny_model, "--max-model-len", 100, "--max-tokens", 8, stdin=turns)
    assert talk.exit_code == 0, talk.output


def test_chat_goes_on_after_a_message_that_is_too_long(run, tiny_model, monkeypatch):
    """It ended the conversation of whoever had pasted too much."""
    asked = []
    encode = cli._encode
    monkeypatch.setattr(cli, "_encode", lambda engine, prompts: asked.extend(prompts) or encode(engine, prompts))
    turns = "hello\n" + "hello " * 200 + "\nagain\n"
    talk = run("chat", "--model", tiny_model, "--max-model-len", 100, "--max-tokens", 4, stdin=turns)
    assert talk.exit_code == 0, talk.output
    assert talk.stderr.count("max_model_len is 100") == 1
    assert [message["content"] for message in asked[-1]][::2] == ["hello", "again"]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_bench_writes_a_run_for_each_schedule(run, tiny_model, tmp_path, load_format):
    file = tmp_path / "figures.json"
    sizes = ("--num-requests", 3, "--input-len", 7, "--output-len", 4, "--num-blocks", 50, "--block-size", 8)
    done = run(
        *("bench", "throughput", "--model", tiny_model, "--schedule", "both", "--load-format", load_format),
        *(*sizes, "--json", file),
    )
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    assert [r["schedule"] for r in written["runs"]] == ["async", "sync"]
    for figures in written["runs"]:
        assert figures.keys() >= FIELDS
        assert (figures["num_requests"], figures["failed"]) == (3, 0)
        assert (figures["input_tokens"], figures["output_tokens"]) == (21, 12)
    assert written["environment"]["torch"]
    assert "schedule=async" in done.stdout
    assert "CPU lane activity" in done.stdout


def test_bench_draws_a_timeline_of_both_schedules(run, tiny_model, tmp_path):
    options = ("--model", tiny_model, "--num-requests", 3, "--input-len", 7, "--num-blocks", 50, "--block-size", 8)
    options = ("bench", "throughput", *options, "--timeline", tmp_path / "page.html")
    done = run(*options, "--output-len", 12, "--schedule", "both", "--timeline-steps", 4)
    assert done.exit_code == 0, done.output
    assert "page.trace.json" in done.stdout
    events = json.loads((tmp_path / "page.trace.json").read_text())["traceEvents"]
    computed = [e for e in events if e.get("cat") == "compute"]
    assert [e["pid"] for e in computed] == [1] * 4 + [2] * 4
    assert all(e["args"] == {"tokens": 3, "rows": 3} for e in computed)  # decoding alone
    assert '"schedule":"sync"' in (tmp_path / "page.html").read_text()
    assert "too few steps" in run(*options, "--output-len", 1).stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "hello\n\nworld\n"),
        ("prompts.json", '["hello", [1, 2, 3]]'),
        ("prompts.jsonl", '"hello"\n{"prompt": "world"}\n'),
    ],
)
def test_bench_takes_prompts_of_a_file(run, tiny_model, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    options = ("--model", tiny_model, "--prompts", tmp_path / name, "--output-len", 3, "--json", tmp_path / "out.json")
    assert run("bench", "throughput", *options).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["num_requests"] == 2
    assert run("bench", "throughput", *options, "--num-requests", 5).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["num_requests"] == 5


@pytest.fixture
def never_loaded(monkeypatch):
    """Loading takes up to minutes: what is wrong on the command line is to be said before."""
    from cbatch.engine import Engine

    def from_model(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Engine, "from_model", from_model)


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b'["caf\xe9"]', b"[" * 100_000])
def test_file_without_prompts_is_refused(run, never_loaded, tmp_path, content):
    (tmp_path / "prompts.json").write_bytes(content)
    done = run("bench", "throughput", "--prompts", tmp_path / "prompts.json")
    assert one_line(done) and "prompts.json" in done.stderr
    assert (b"caf" in content) == ("is not UTF-8: invalid continuation byte at byte 5" in done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "throughput", "--json"],
        ["bench", "throughput", "--timeline"],
        ["demo", "--json"],
    ],
)
def test_file_that_cannot_be_written_is_told_before_the_measuring(run, never_loaded, tmp_path, arguments):
    done = run(*arguments, tmp_path / "none" / "x.json")
    assert one_line(done) and "x.json cannot be written: No such file or directory" in done.stderr
    assert isinstance(run(*arguments, tmp_path / "x.json").exception, AssertionError)  # this one went on to load
    assert list(tmp_path.iterdir()) == []  # and left nothing that looks like a result


@pytest.mark.parametrize("stdin", ["", "\n\n"])
def test_no_prompt_at_all_is_an_error(run, never_loaded, stdin):
    done = run("generate", stdin=stdin)
    assert one_line(done) and "no prompt" in done.stderr


def test_a_byte_that_is_no_text_is_replaced(run, tiny_model):
    """Typed by accident or pasted, it ended a conversation with a traceback."""
    options = ("--model", tiny_model, "--max-tokens", 3)
    talk = run("chat", *options, stdin=b"hel\xfflo\nagain\n")
    assert talk.exit_code == 0, talk.output
    assert len(talk.stdout.splitlines()) >= 2
    answer = run("generate", *options, "--json", stdin=b"hel\xfflo\n")
    assert json.loads(answer.stdout)["prompt"] == "hel\ufffdlo"


@pytest.mark.parametrize(
    ("redirected", "says"),
    [("<&- >&- 2>&-", ""), (">/dev/full", "cbatch: [Errno 28] No space left on device\n")],
    ids=["closed", "full"],
)
def test_streams_that_are_closed_or_full_end_nothing_with_a_traceback(tiny_model, redirected, says):
    """A service manager may start a program with none of the three, and then each is None in Python."""
    arguments = ("-m", "cbatch", "generate", "hello", "--model", str(tiny_model), "--max-tokens", "3")
    shell = ["sh", "-c", f'exec "$0" "$@" {redirected}', sys.executable, *arguments]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, env=environment())
    assert (done.returncode, done.stderr) == (1 if says else 0, says)


def test_what_users_write_is_printed_as_it_is(run, tiny_model):
    """Not as a language of rich's: no emoji, no styles, no line that ends where the terminal would."""
    prompt = "I :heart: [bold]you[/bold], " + "very much " * 30
    done = run("generate", prompt, "hello", "--model", tiny_model, "--max-tokens", 3)
    assert prompt in done.stdout
    assert "no model folder at './:heart:[red]'" in run("generate", "hello", "--model", "./:heart:[red]").stderr


def test_failed_requests_are_told_and_end_the_bench_with_an_error(run, tiny_model, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps([[1], [1] * 60]))
    options = ("--prompts", tmp_path / "prompts.json", "--max-model-len", 50, "--output-len", 3)
    done = run("bench", "throughput", "--model", tiny_model, *options)
    assert done.exit_code == 1
    assert "1 failed" in done.stderr
    assert "max_model_len is 50" in done.stderr


def test_demo_shows_three_answers_and_both_schedules(run, tiny_model, tmp_path):
    done = run("demo", "--model", tiny_model, "--max-tokens", 4, "--json", tmp_path / "demo.json")
    assert done.exit_code == 0, done.output
    prompts = json.loads(cli.DEMO_PROMPTS.read_text(encoding="utf-8"))
    assert len(prompts) == 32
    assert all(prompt in done.stdout for prompt in prompts[:3])
    assert prompts[3] not in done.stdout
    for label in ("schedule=async", "schedule=sync", "requests", "output tokens/s", "time to first token, p99"):
        assert label in done.stdout
    assert "Same tokens under both schedules: 32 of 32" in done.stdout
    assert "32/32" in done.stderr
    assert [r["num_requests"] for r in json.loads((tmp_path / "demo.json").read_text())["runs"]] == [32, 32]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "hello", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "hello", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "hello", "--dtype", "float7"], "float7"),
        (["bench", "throughput", "--max-num-seqs", "0"], "max_num_seqs"),
        (["bench", "throughput", "--max-model-len", "100000"], "100000"),
    ],
)
def test_errors_are_one_line_without_a_traceback(run, tiny_model, arguments, says):
    done = run(*arguments, "--model", tiny_model)
    assert one_line(done) and says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "hello", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "hello", "--top-p", "2"], "top_p=2.0"),
        (["chat", "--top-k", "-5"], "top_k=-5"),
        (["chat", "--seed", 2**64], "seed="),
        (["bench", "throughput", "--temperature", "nan"], "temperature=nan"),
        (["bench", "throughput", "--depth", "1"], "depth is 1"),
        # Each of these was ignored.
        (["bench", "throughput", "--depth", "3", "--schedule", "sync"], "depth is 3"),
        (["bench", "throughput", "--chat"], "--chat without --prompts"),
        (["bench", "throughput", "--input-len", "5", "--prompts", __file__], "--input-len with --prompts"),
        (["bench", "throughput", "--timeline-steps", "5"], "--timeline-steps without --timeline"),
        (["generate", "hello", "--device", "gpu"], "device is 'gpu'"),
        (["demo", "--device", "cuda:99"], "device is 'cuda:99'"),
    ],
)
def test_wrong_values_are_told_before_a_model_is_loaded(run, never_loaded, arguments, says):
    done = run(*arguments)
    assert one_line(done) and says in done.stderr


def test_unknown_model_says_what_was_tried(run, tmp_path):
    done = run("generate", "hello", "--model", tmp_path / "no-such-model")
    assert done.exit_code == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.output


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment(TERM="dumb"),
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def read_until(self, condition, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not condition(self.seen):
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    assert condition(self.seen), self.seen
                    return

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self.master)


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(tiny_model):
    terminal = Terminal("-m", "cbatch", "chat", "--model", tiny_model, "--max-tokens", 1900, "--temperature", 0)
    try:
        terminal.read_until(lambda seen: "> " in seen)
        terminal.type("hello\n")
        start = len(terminal.seen)
        terminal.read_until(lambda seen: len(seen) > start + 40)  # it is answering
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(lambda seen: seen.count("> ") >= 2)
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen


def test_ctrl_c_during_the_imports_is_quiet(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    done = subprocess.run(
        [sys.executable, "-m", "cbatch", "generate", "hello"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_generate_in_under_two_seconds(tiny_model):
    options = ("--model", tiny_model, "--max-tokens", 2000, "--temperature", 0)
    terminal = Terminal("-m", "cbatch", "generate", "hello", *options)
    try:
        terminal.read_until(lambda seen: len(seen) > 40)
        terminal.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert terminal.process.wait(20) in (0, 130)  # 0: it was through already
        assert time.monotonic() - started < 2
    finally:
        terminal.close()
    assert "Traceback" not in terminal.seen
