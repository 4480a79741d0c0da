"""A progress bar over running requests, on stderr. Reads handles; knows no engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cbatch.request import RequestHandle

_SLEEP_S = 0.05  # between two looks: 20 a second, so that watching takes nothing from the engine's thread


def stderr_is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def watch(handles: Sequence[RequestHandle], label: str = "Generating", after_s: float = 0.0) -> None:
    """Waits until all have ended, showing from ``after_s`` seconds on how many have and how fast tokens come.

    Takes the handles' chunks; ``result`` still has everything.

    Raises:
        EngineDeadError, EngineClosedError: the engine ended first.
    """
    started = time.monotonic()
    running = list(handles)
    num_tokens = 0
    with ExitStack() as stack:
        update = None
        while running:
            still = []
            for handle in running:
                try:
                    chunk = handle.next_chunk(timeout=0)
                except TimeoutError:
                    still.append(handle)
                    continue
                num_tokens += len(chunk.token_ids)
                if chunk.finish_reason is None:
                    still.append(handle)
            running = still
            elapsed = time.monotonic() - started
            if update is None and running and elapsed >= after_s:
                update = _bar(stack, label, len(handles))
            if update is not None:
                update(len(handles) - len(running), num_tokens, elapsed)
            if running:
                time.sleep(min(_SLEEP_S, elapsed / 10 + 0.001))  # short work ends at most a tenth late


def _bar(stack: ExitStack, label: str, total: int) -> Callable[[int, int, float], None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = stack.enter_context(
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
    )
    task = progress.add_task(label, total=total, speed="")

    def update(finished: int, num_tokens: int, elapsed: float) -> None:
        speed = f"{num_tokens:,} tokens, {num_tokens / max(elapsed, 1e-9):,.0f}/s"
        progress.update(task, completed=finished, speed=speed)

    return update
