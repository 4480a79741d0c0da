"""Keeps Python's garbage collector out of the loop's way while engines run. Knows nothing of them but their number.

A full collection walks every object of the process, which with torch and transformers loaded takes tens of
milliseconds, many decode steps. So what is there when an engine starts is set aside (``gc.freeze``), and collections
walk only what came since. When the last engine closes, everything is collectable again.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.RLock()
_num_engines = 0


def hold() -> None:
    """Set aside what lives now. Collects first, so that no garbage is kept; takes some tenths of a second.

    Also what was set aside before: where engines replace each other, there is always one, and that would pile up.
    """
    global _num_engines
    gc.unfreeze()
    gc.collect()  # without the lock: a finalizer may close an engine and wait for its thread, which takes it at the end
    with _lock:
        _num_engines += 1
        gc.freeze()


def release() -> None:
    global _num_engines
    with _lock:
        _num_engines -= 1
        if _num_engines == 0:
            gc.unfreeze()
