"""The command line: generate, chat, bench, demo. Reads options, prints; everything that works stands elsewhere.

Torch loads only when a command runs, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import cbatch
from cbatch.errors import CBatchError, ConfigError, InvalidRequestError, PromptTooLongError

if TYPE_CHECKING:
    from cbatch.engine import Engine
    from cbatch.sampling_params import SamplingParams, StructuredOutputsParams
    from cbatch.timeline import Timeline

DEMO = "smollm2-135m"
DEMO_PROMPTS = Path(__file__).resolve().parent / "data" / "demo_prompts.json"
DEMO_MAX_TOKENS = 96

app = typer.Typer(
    help="Continuous batching for language models: many requests at once on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
# What users and models wrote is printed as a Text: in a plain string, rich would take "[b]" and ":heart:" for its own.
out, err = Console(), Console(stderr=True)


class Schedule(StrEnum):
    asynchronous = "async"
    sync = "sync"
    both = "both"


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


ModelName = Annotated[str, typer.Option("--model", help="Alias, folder, hub name, or the name of a shipped shape.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; the GPU if there is one when left out.")]
DType = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16, float16.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence, prompt and answer together.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that together have this share.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Sample from tokens with this share of the likeliest one's.")]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1, nothing is said twice soon.")]
Presence = Annotated[float | None, typer.Option("--presence-penalty", help="Above 0, what was said comes less often.")]
Frequency = Annotated[float | None, typer.Option("--frequency-penalty", help="The same, for each time it was said.")]
Stop = Annotated[list[str] | None, typer.Option(help="End an answer before this text; may be given several times.")]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Answer with JSON by the schema in this file; needs the extra 'grammar'."
    ),
]
Regex = Annotated[str | None, typer.Option(help="Answer with a text that this matches as a whole; likewise.")]
Choice = Annotated[list[str] | None, typer.Option(help="Answer with one of these; likewise.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures to this file.")]


def _plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that we raise on purpose end a command with one line, Ctrl-C at once with the shell's own code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CBatchError as error:
            _say(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            # The engine is closed by now, and taking torch apart would keep the terminal for another second (0.8 s on
            # two idle cores, 2.5 s on busy ones).
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # as from `cbatch generate ... | head`
                _say(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail once more
            raise typer.Exit(1) from None

    return run


def _say(error: Exception) -> None:
    err.print(Text.assemble(("cbatch:", "red"), " ", " ".join(str(error).split())), soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cbatch {cbatch.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a byte that is no text, or text of no such byte, ends nothing
            stream.reconfigure(errors="replace")


@app.command()
@_plain_errors
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to go on with; lines of stdin if none.")] = None,
    model: ModelName = DEMO,
    chat: Annotated[bool, typer.Option("--chat", help="Ask each as a user's message, by the chat template.")] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    n: Annotated[int | None, typer.Option("-n", "--n", help="Answers to each prompt.")] = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    device: Device = None,
    dtype: DType = "auto",
    max_model_len: MaxModelLen = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")] = False,
) -> None:
    """Generate text for one prompt, shown as it comes, or for many at once."""
    given = _given(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop or None,
        structured_outputs=_structure(json_schema, regex, choice or None),
    )
    texts = list(prompts) if prompts else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise InvalidRequestError("no prompt: give one as an argument, or one a line on stdin")
    with _engine(model, device=device, dtype=dtype, max_model_len=max_model_len) as engine:
        params = _params(engine, given)
        encoded = _encode(engine, [_message(text) if chat else text for text in texts])
        if len(encoded) == 1 and params.n == 1 and not as_json:
            if _print_stream(engine, encoded[0], params)[1]:
                raise KeyboardInterrupt
            return
        from cbatch.progress import stderr_is_terminal, watch

        handles = [engine.submit(prompt, params) for prompt in encoded]
        if stderr_is_terminal():
            watch([child for handle in handles for child in handle.children], after_s=1.0)
        for number, (text, handle) in enumerate(zip(texts, handles, strict=True)):
            for answer in handle.result().outputs:
                if as_json:
                    line = {"prompt": text, "text": answer.text, "token_ids": answer.token_ids}
                    typer.echo(json.dumps(line | {"finish_reason": answer.finish_reason}, ensure_ascii=False))
                else:
                    out.print(Text.assemble("\n" if number or answer.index else "", (text, "bold")), soft_wrap=True)
                    typer.echo(answer.text)


@app.command()
@_plain_errors
def chat(
    model: ModelName = DEMO,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    device: Device = None,
    dtype: DType = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D leaves, an empty line is ignored."""
    given = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with _engine(model, device=device, dtype=dtype, max_model_len=max_model_len) as engine:
        params = _params(engine, given)
        opening = [{"role": "system", "content": system}] if system else []
        messages: list[dict[str, str]] = []
        err.print(Text(f"{engine.model.name}. Ctrl-C stops an answer, Ctrl-D leaves.", "dim"))
        while True:
            try:
                text = _ask("> ")
            except EOFError:
                err.print()
                return
            except KeyboardInterrupt:
                err.print("\n[dim]Ctrl-D leaves.[/dim]")
                continue
            if not text.strip():
                continue
            messages += _message(text)
            for start in range(0, len(messages), 2):  # the oldest question goes with its answer until the rest fits
                try:
                    answer, _ = _print_stream(engine, _encode(engine, [[*opening, *messages[start:]]])[0], params)
                except PromptTooLongError as error:
                    too_long = error
                    continue
                messages = [*messages[start:], {"role": "assistant", "content": answer}]
                break
            else:  # what was said now is too long by itself: it is forgotten, and all else is kept
                _say(too_long)
                messages.pop()


@bench.command()
@_plain_errors
def throughput(
    model: ModelName = DEMO,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="How many; 32, or as many as the file has, when left out.")
    ] = None,
    input_len: Annotated[int | None, typer.Option(min=1, help="Tokens of each random prompt: 128 if left out.")] = None,
    output_len: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A JSON list, or a text a line; instead of random ones."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompts are users' messages.")] = False,
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Go on to the full length; the default for random prompts.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    schedule: Annotated[Schedule, typer.Option(help="Which, or one after the other.")] = Schedule.asynchronous,
    device: Device = None,
    dtype: DType = "auto",
    load_format: Annotated[LoadFormat, typer.Option(help="dummy: random weights of a config.")] = LoadFormat.auto,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens of one step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of the pool.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the card's memory to use.")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Whether prompts share what they begin with; on by default.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Steps in flight under the async schedule.")] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    attention: Annotated[str | None, typer.Option(help="auto, torch, triton.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts and weights.")] = 0,
    json_file: JsonFile = None,
    timeline: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw steps of decoding on this page, FILE.html; FILE.trace.json beside it."),
    ] = None,
    timeline_steps: Annotated[int | None, typer.Option(min=1, help="How many steps: 24 if left out.")] = None,
) -> None:
    """Submit many requests at once and measure."""
    from cbatch.bench import environment, random_prompts, run_throughput, warm_up
    from cbatch.sampling_params import SamplingParams

    if chat and prompts is None:
        raise ConfigError("--chat without --prompts: random ones are no messages")
    if input_len is not None and prompts is not None:
        raise ConfigError("--input-len with --prompts: it is the length of random ones")
    if timeline_steps is not None and timeline is None:
        raise ConfigError("--timeline-steps without --timeline")
    _check_writable(json_file, timeline)
    options = {
        "device": device,
        "dtype": dtype,
        "load_format": load_format.value,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_prefix_caching": enable_prefix_caching,
        "attention": attention,
        "enforce_eager": enforce_eager,
        "seed": seed,
    }
    names = ["async", "sync"] if schedule is Schedule.both else [schedule.value]
    given = None if prompts is None else _read_prompts(prompts)
    params = SamplingParams(
        temperature=temperature,
        max_tokens=output_len,
        ignore_eos=given is None if ignore_eos is None else ignore_eos,
        detokenize=False,
        seed=seed,
    )
    runs: list[dict[str, Any]] = []
    timelines: list[Timeline] = []
    loaded: Any = model
    for name in names:
        options["depth"] = None if schedule is Schedule.both and name == "sync" else depth
        with _engine(loaded, schedule=name, **options) as engine:
            loaded = engine.model  # loaded once for both
            options["load_format"] = "auto"
            if not runs:
                if given is None:
                    encoded = random_prompts(num_requests or 32, input_len or 128, engine.model.vocab_size, seed)
                else:
                    encoded = _encode(engine, [_message(prompt) if chat else prompt for prompt in given])
                    count = num_requests or len(encoded)
                    encoded = [encoded[i % len(encoded)] for i in range(count)]
            warm_up(engine, encoded)
            steps = (timeline_steps or 24) if timeline is not None else 0
            result = run_throughput(engine, encoded, params, progress=f"schedule={name}", timeline_steps=steps)
            runs.append(result.figures)
            facts = environment(engine.config.device or "cpu")
        if result.timeline is not None:  # it has ended, with the engine if not before
            result.timeline.device = facts["device_name"]
            timelines.append(result.timeline)
        if result.first_error is not None:
            failed = f"{result.figures['failed']} failed:"
            err.print(Text.assemble((failed, "yellow"), f" {result.first_error}"), soft_wrap=True)
    out.print(_table(runs))
    if json_file is not None:
        _write_json(json_file, facts, runs)
    if timeline is not None:
        _write_timelines(timeline, timelines)
    if any(run["failed"] for run in runs):
        raise typer.Exit(1)


@app.command()
@_plain_errors
def demo(
    model: ModelName = DEMO,
    device: Device = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = DEMO_MAX_TOKENS,
    json_file: JsonFile = None,
) -> None:
    """The main job: 32 chat prompts at once, three of the answers, and the figures beside those of schedule=sync."""
    from cbatch.bench import environment, run_throughput, warm_up
    from cbatch.sampling_params import SamplingParams

    _check_writable(json_file)
    texts = [str(text) for text in json.loads(DEMO_PROMPTS.read_text(encoding="utf-8"))]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    results = []
    loaded: Any = model
    tokenizer = None
    for name in ("async", "sync"):
        with _engine(loaded, tokenizer, device=device, schedule=name, max_num_seqs=len(texts)) as engine:
            loaded, tokenizer = engine.model, engine.tokenizer
            facts = environment(engine.config.device or "cpu")
            encoded = _encode(engine, [_message(text) for text in texts])
            warm_up(engine, encoded)
            label = f"{len(texts)} prompts, schedule={name}"
            results.append(run_throughput(engine, encoded, params, progress=label))
        if results[-1].first_error is not None:
            raise results[-1].first_error
        if name == "async":
            for text, output in list(zip(texts, results[0].outputs, strict=True))[:3]:
                assert output is not None
                answer = output.outputs[0]
                more = " \u2026" if answer.finish_reason == "length" else ""
                out.print(Text.assemble("\n", (text, "bold"), "\n", answer.text.strip(), (more, "dim")))
            out.print()
    runs = [result.figures for result in results]
    out.print(_table(runs))
    same = sum(
        a is not None and b is not None and a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(results[0].outputs, results[1].outputs, strict=True)
    )
    out.print(f"{facts['device_name']}. Same tokens under both schedules: {same} of {len(texts)}.", highlight=False)
    if json_file is not None:
        _write_json(json_file, facts, runs)


@contextmanager
def _engine(model: Any, tokenizer: Any = None, **options: Any) -> Iterator[Engine]:
    """An engine for one command; says what takes long before it takes long. An option that is None is left out."""
    import logging

    from transformers.utils.logging import disable_progress_bar

    from cbatch.config import EngineConfig, find_device
    from cbatch.engine import Engine

    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what fails in the end, our error says
    given = {name: value for name, value in options.items() if value is not None}
    find_device(EngineConfig.from_options(given).device)  # what is wrong with them is said before anything is loaded
    if model == DEMO and given.get("load_format") != "dummy":
        from cbatch.models.demo import ensure_demo_model

        ensure_demo_model(progress=lambda line: err.print(Text(line, "dim")))
    with Engine.from_model(model, tokenizer, **given) as engine:
        yield engine


def _given(**fields: Any) -> dict[str, Any]:
    """The sampling parameters that the command line has, checked while no model has been loaded yet."""
    from cbatch.sampling_params import SamplingParams

    given = {name: value for name, value in fields.items() if value is not None}
    SamplingParams(**given)
    return given


def _structure(schema: Path | None, regex: str | None, choice: list[str] | None) -> StructuredOutputsParams | None:
    from cbatch.sampling_params import StructuredOutputsParams

    if schema is None and regex is None and choice is None:
        return None
    text = None if schema is None else schema.read_text(encoding="utf-8", errors="replace")
    return StructuredOutputsParams(json=text, regex=regex, choice=choice)


def _params(engine: Engine, given: dict[str, Any]) -> SamplingParams:
    """What the model asks for, but for what the command line says; the command line alone if it says how to sample."""
    from cbatch.sampling_params import SamplingParams

    try:
        return dataclasses.replace(engine.default_sampling_params, **given)
    except InvalidRequestError:  # the model's generation_config asks for what is not supported
        if "temperature" not in given:
            raise
        return SamplingParams(**given)


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _encode(engine: Engine, prompts: Sequence[Any]) -> list[list[int]]:
    """Token ids of texts, of lists of ids, and of conversations."""
    from cbatch.prompts import PromptLike, encode_chat

    encoded = []
    for prompt in prompts:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            encoded.append(encode_chat(engine.tokenizer, prompt)[1])
        else:
            encoded.append(PromptLike(prompt).encode(engine.tokenizer))
    return encoded


def _print_stream(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[str, bool]:
    """Prints an answer as it comes; returns it, and whether Ctrl-C ended it."""
    from cbatch.detokenizer import Detokenizer

    handle = engine.submit(prompt, params)
    detokenizer = Detokenizer(engine.tokenizer, prompt, params)
    answer, finish = "", None
    try:
        while finish is None:
            chunk = handle.next_chunk()
            finish = chunk.finish_reason
            text = detokenizer.push(chunk.token_ids, finish) if chunk.text is None else chunk.text
            typer.echo(text, nl=False)
            answer += text
            sys.stdout.flush()
    except KeyboardInterrupt:
        handle.abort()
    typer.echo()
    return answer, finish is None


def _ask(prompt: str) -> str:
    """A line of input, editable where the terminal and Python's build allow."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - its import is what makes `input` editable
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _read_prompts(path: Path) -> list[Any]:
    """Prompts of a file: a JSON list, JSON lines, or a text a line."""
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            prompts = json.loads(content)
        elif path.suffix == ".jsonl":
            prompts = [json.loads(line) for line in content.splitlines() if line.strip()]
        else:
            prompts = [line for line in content.splitlines() if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(prompts, list) or not prompts:
        raise InvalidRequestError(f"{path} holds no list of prompts")
    return prompts


def _check_writable(*files: Path | None) -> None:
    """Open what will be written in the end: that it cannot be is said now, not after the measuring."""
    for file in files:
        if file is not None:
            with _writing(file):
                there = file.exists()
                file.open("a").close()
                if not there:
                    file.unlink()


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _write_json(file: Path, facts: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    with _writing(file):
        file.write_text(json.dumps({"environment": facts, "runs": runs}, indent=2) + "\n")


def _write_timelines(page: Path, timelines: Sequence[Timeline]) -> None:
    from cbatch.timeline import write_html, write_perfetto

    if not any(timeline.spans for timeline in timelines):
        err.print("[yellow]No timeline:[/yellow] there were too few steps of decoding.")
        return
    trace = page.with_suffix(".trace.json")
    with _writing(page):
        write_html(page, timelines)
        write_perfetto(trace, timelines)
    out.print(Text(f"Timeline: {page}, and for ui.perfetto.dev {trace}"), soft_wrap=True)


def _table(runs: Sequence[dict[str, Any]]) -> Any:
    """The figures of runs, side by side."""
    from rich.table import Table

    first = runs[0]
    activity = {"gpu": "GPU activity", "cpu_lane": "CPU lane activity"}[first["activity_kind"]]
    title = Text(f"{first['model']}, {first['dtype']}, {first['device']}", "table.title")
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(f"schedule={run['schedule']}", justify="right")
    for label, name, style in (
        ("requests", "num_requests", "{:,}"),
        ("failed", "failed", "{:,}"),
        ("output tokens", "output_tokens", "{:,}"),
        ("output tokens/s", "output_tokens_per_s", "{:,.1f}"),
        ("total tokens/s", "total_tokens_per_s", "{:,.1f}"),
        ("time to first token, p50 (ms)", "ttft_ms_p50", "{:,.1f}"),
        ("time to first token, p99 (ms)", "ttft_ms_p99", "{:,.1f}"),
        ("time per output token, p50 (ms)", "tpot_ms_p50", "{:,.2f}"),
        ("time per output token, p99 (ms)", "tpot_ms_p99", "{:,.2f}"),
        ("step, p50 (ms)", "ms_per_step_p50", "{:,.2f}"),
        ("host time of a step, p50 (µs)", "host_us_per_step_p50", "{:,.0f}"),
        (f"{activity} (%)", "activity_pct", "{:.1f}"),
    ):
        if name == "failed" and not any(run["failed"] for run in runs):
            continue
        table.add_row(label, *("-" if run[name] is None else style.format(run[name]) for run in runs))
    return table
