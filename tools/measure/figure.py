"""One measured value, the bound it is held to, and its line on the screen."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from moestream.errors import MeasurementError

__all__ = ["Figure", "MeasurementError", "note"]


@dataclass(frozen=True)
class Figure:
    """`name value bound ok|short`.

    A figure without a bound informs (`-` and `ok`). One without a value could not be measured, which is `short`: a promise that
    was not tried is not kept.

        Figure("read_bandwidth_over_fio", 0.97, at_least=0.85)
        Figure("load_over_dense_read[plain]", 1.4, below=3.0)
        Figure("load_over_dense_read.streamed[plain]", 0.91, unit="s")
    """

    name: str
    value: float | None
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return (
            (self.at_least is None or self.value >= self.at_least)
            and (self.at_most is None or self.value <= self.at_most)
            and (self.below is None or self.value < self.below)
        )

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "short"

    @property
    def bound(self) -> str:
        for sign, limit in ((">=", self.at_least), ("<=", self.at_most), ("<", self.below)):
            if limit is not None:
                return sign + _with_unit(limit, self.unit)
        return "-"

    def line(self) -> str:
        value = "-" if self.value is None else _with_unit(self.value, self.unit)
        return f"{self.name:<{NAME_COLUMNS}} {value:>{VALUE_COLUMNS}} {self.bound:>{VALUE_COLUMNS}} {self.verdict}"

    def record(self) -> dict:
        return asdict(self) | {"bound": self.bound, "verdict": self.verdict}


def note(text: str) -> None:
    """Tell whoever waits what is going on; standard output is for figures alone."""
    print(f"figures: {text}", file=sys.stderr, flush=True)


# Lines appear as they are measured, minutes apart, so the columns cannot be fitted to what is in them.
NAME_COLUMNS = 52
VALUE_COLUMNS = 14


def _with_unit(number: float, unit: str) -> str:
    if float(number).is_integer() and abs(number) < 1e9:
        digits = str(int(number))
    else:
        digits = f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    return digits + unit
