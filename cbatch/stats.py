"""Owns the clock of the steps: how long each took on the device and on the host, and how long the device stood idle."""

from __future__ import annotations

import numpy as np

_WINDOW = 4096  # most recent steps kept for the percentiles, which take the caller of ``summary`` 0.15 ms


class StepClock:
    """Figures of the landed steps since ``reset``. ``record`` writes a row; ``summary`` computes, and allocates."""

    def __init__(self) -> None:
        self._rows = np.zeros((_WINDOW, 2))  # step ms, host µs
        self.reset()

    def reset(self) -> None:
        self.num_steps = 0
        self._busy_ms = 0.0
        self._gap_ms = 0.0

    def record(self, step_ms: float, gap_ms: float, host_us: float) -> None:
        """One step: its time on the device, the idle time before it while work was there, and the host's own time."""
        self._rows[self.num_steps % _WINDOW] = (step_ms, host_us)
        self.num_steps += 1
        self._busy_ms += step_ms
        self._gap_ms += gap_ms

    @property
    def activity_pct(self) -> float:
        """Share of the time with work at hand that the device spent inside steps."""
        total = self._busy_ms + self._gap_ms
        return 100.0 * self._busy_ms / total if total else 0.0

    def summary(self) -> dict[str, float]:
        """Percentiles over the last 4,096 steps: of milliseconds on the device, and microseconds of the host."""
        rows = self._rows[: min(self.num_steps, _WINDOW)] if self.num_steps else np.zeros((1, 2))
        p50, p99, p999 = np.percentile(rows, (50, 99, 99.9), axis=0).tolist()
        return {
            "ms_per_step_p50": p50[0],
            "ms_per_step_p99": p99[0],
            "host_us_per_step_p50": p50[1],
            "host_us_per_step_p99": p99[1],
            "host_us_per_step_p999": p999[1],
        }
