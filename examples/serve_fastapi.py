"""The engine inside a web server: POST /generate streams tokens, and a client that goes away frees its place.

pip install -e '.[serve]'
CBATCH_MODEL=smollm2-135m python examples/serve_fastapi.py
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Hello", "max_tokens": 32}'
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from cbatch import (
    AsyncLLM,
    EngineOverloadedError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)


class Ask(BaseModel, extra="forbid"):  # what would be ignored is refused
    prompt: str
    max_tokens: int = 64
    temperature: float = 1.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM(os.environ.get("CBATCH_MODEL", "smollm2-135m"), max_queue_size=1000) as app.state.llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(ask: Ask) -> StreamingResponse:
    llm: AsyncLLM = app.state.llm
    try:
        delta = RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, output_kind=delta)
        stream = llm.generate(ask.prompt, params, timeout_s=600)
        first = await anext(stream)  # a bad request is refused here, before the answer has begun
    except InvalidRequestError as error:
        raise HTTPException(400, str(error)) from error
    except EngineOverloadedError as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error

    async def events() -> AsyncIterator[str]:
        async with aclosing(stream):  # the client going away cancels us in here, which aborts the request
            yield event(first)
            async for out in stream:
                yield event(out)

    return StreamingResponse(events(), media_type="text/event-stream")


@app.get("/health")
async def health(response: Response) -> dict[str, bool]:
    healthy: bool = app.state.llm.is_healthy
    response.status_code = 200 if healthy else 503
    return {"healthy": healthy}


def event(out: RequestOutput) -> str:
    answer = out.outputs[0]
    body = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    return f"data: {json.dumps(body)}\n\n"


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, timeout_graceful_shutdown=1)  # s; by default, Ctrl-C waits for all streams to come to their ends
