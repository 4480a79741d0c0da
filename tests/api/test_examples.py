"""The examples are programs that run, and the server streams, refuses and lets go."""

import ast
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import re
import socket
import sys

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from cbatch.config import EngineConfig
from tests.api.programs import ROOT, run_program
from tests.waiting import wait_until

EXAMPLES, README = ROOT / "examples", ROOT / "README.md"
uvicorn = pytest.importorskip("uvicorn", reason="an extra")


def test_every_example_is_run_here():
    tested = {"offline_generate.py", "chat.py", "async_stream.py", "embed_engine.py", "serve_fastapi.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("offline_generate.py", "length"),
        ("chat.py", "Why is the sea salty? ->"),
        ("async_stream.py", "Once upon a time"),
        ("embed_engine.py", "length\nabort\n"),
    ],
)
def test_example_runs(tiny_model, capsys, name, says):
    done = load(name).main(str(tiny_model))
    if asyncio.iscoroutine(done):
        asyncio.run(done)
    assert says in capsys.readouterr().out


def test_example_is_a_program_and_embedding_needs_no_files():
    done = run_program(EXAMPLES / "embed_engine.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("length\nabort\n")


def test_what_the_readme_shows_runs_as_it_stands(tiny_model, capsys):
    """Each block follows those before it, as a reader types them; `model` and its input are what the reader has."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    has = {"model": model, "input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        code = block.replace('"smollm2-135m"', repr(str(tiny_model)))  # which is random, and here
        if not torch.cuda.is_available():
            code = code.replace(', compile="cudagraphs"', "")
        done = eval(compile(code, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), has)
        if asyncio.iscoroutine(done):
            asyncio.run(done)
    assert len(has["four"].children) == 4 and has["as_json"].structured_outputs.json and has["tokens"].shape[1] > 3
    assert capsys.readouterr().out.count("\n") > 10


def test_options_of_the_readme_are_those_of_the_engine():
    table = README.read_text("utf-8").partition("| option |")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition("|")[2].partition("|")[0])
    }
    assert named == {field.name for field in dataclasses.fields(EngineConfig)}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name.removesuffix('.py')}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    # FastAPI resolves annotations by the module's name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.asynccontextmanager
async def served(tiny_model, monkeypatch):
    """The app behind a real socket: only there can a client go away in the middle."""
    monkeypatch.setenv("CBATCH_MODEL", str(tiny_model))
    module = load("serve_fastapi.py")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(module.app, log_level="warning", lifespan="on"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = listener.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, module.app.state.llm
        server.should_exit = True
        await task


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


async def test_server_streams_refuses_and_aborts_when_the_client_goes_away(tiny_model, monkeypatch):
    async with served(tiny_model, monkeypatch) as (client, llm):
        # Streams: the deltas of many clients at once, each with its end.
        ask = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
        answers = await asyncio.gather(*(client.post("/generate", json=ask) for _ in range(8)))
        for answer in answers:
            assert answer.headers["content-type"].startswith("text/event-stream")
            pieces = events(answer.text)
            assert sum(len(piece["token_ids"]) for piece in pieces) == 12
            assert [piece["finish_reason"] for piece in pieces][-1] == "length"
        assert len({"".join(piece["text"] for piece in events(answer.text)) for answer in answers}) == 1

        # Refuses, with the reason.
        refused = await client.post("/generate", json={**ask, "temperature": -1})
        assert refused.status_code == 400
        assert "temperature=-1.0" in refused.json()["detail"]
        assert (await client.post("/generate", json={**ask, "prompt": "hello " * 3000})).status_code == 400
        assert (await client.post("/generate", json={**ask, "top_p": 0.5})).status_code == 422  # it was ignored

        # Lets go: a client that leaves in the middle frees its place long before its 2,000 tokens are over.
        async with client.stream("POST", "/generate", json={**ask, "max_tokens": 2000}) as response:
            async for _ in response.aiter_lines():
                break
        before = llm.stats()["steps"]
        await asyncio.to_thread(wait_until, lambda: llm.stats()["num_running"] == 0)
        assert llm.stats()["steps"] - before < 1500
        assert (await client.get("/health")).json() == {"healthy": True}
