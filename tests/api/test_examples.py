"""The examples are programs that run, and the server streams, refuses and lets go."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import sys

import httpx
import pytest

from tests.api.programs import ROOT, run_program

EXAMPLES = ROOT / "examples"
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

        # Lets go: a client that leaves in the middle frees its place long before its 2,000 tokens are over.
        async with client.stream("POST", "/generate", json={**ask, "max_tokens": 2000}) as response:
            async for _ in response.aiter_lines():
                break
        before = llm.stats()["steps"]
        for _ in range(400):
            if llm.stats()["num_running"] == 0:
                break
            await asyncio.sleep(0.01)
        assert llm.stats()["num_running"] == 0
        assert llm.stats()["steps"] - before < 1500
        assert (await client.get("/health")).json() == {"healthy": True}
