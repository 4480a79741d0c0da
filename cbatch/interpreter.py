"""Keeps Python itself out of the loop's way while engines run. Knows nothing of them but their number.

Garbage: a full collection walks every object of the process, which with torch and transformers loaded takes tens of
milliseconds, many decode steps. So what is there when an engine starts is set aside (``gc.freeze``), and collections
walk only what came since.

Threads: one that wants the interpreter lock waits until its holder gives it up, for the switch interval of 5 ms at the
longest: more than a decode step of an 8B model. With 64 threads that read streams the loop came late for a tenth of the
time, so the interval is half a millisecond while engines run.

When the last engine closes, both are as they were.
"""

from __future__ import annotations

import gc
import sys
import threading

SWITCH_INTERVAL = 0.0005  # seconds

_lock = threading.RLock()
_num_engines = 0
_interval_before = 0.0


def hold() -> None:
    """Set aside what lives now, and switch threads sooner. Collects first, which takes some tenths of a second."""
    global _num_engines, _interval_before
    with _lock:
        _num_engines += 1
        gc.collect()
        gc.freeze()
        if _num_engines == 1:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before, SWITCH_INTERVAL))


def release() -> None:
    global _num_engines
    with _lock:
        _num_engines -= 1
        if _num_engines == 0:
            gc.unfreeze()
            sys.setswitchinterval(_interval_before)
