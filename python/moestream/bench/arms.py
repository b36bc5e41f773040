"""The arms of a benchmark: ways to run a model, by name and options.

stock-mmap                            as users of llama-cpp-python get it
stream-prefetch:cache=3GiB            of ours, with a cache of that size
stream-reactive:experts_used=4        with fewer experts
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..memory import parse_size
from ..options import ExpertStreaming
from .session import STREAMING, Arm

__all__ = ["ARMS", "BenchArm", "parse_arm"]


@dataclass(frozen=True)
class _Kind:
    """What an arm of that name is before its own options."""

    summary: str
    streamed: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    resident: bool = False


ARMS: dict[str, _Kind] = {
    "stock-resident": _Kind(
        "llama-cpp-python, the whole model read into memory and repacked; a record says so if it was not all there",
        streamed=False,
        options={"mmap": False, "repack": True},
        resident=True,
    ),
    "stock-mmap": _Kind(
        "llama-cpp-python as its users get it: the file mapped, weights repacked in memory where the CPU has kernels for it",
        streamed=False,
        options={"mmap": True, "repack": True},
    ),
    "stock-mmap-tuned": _Kind(
        "the same without repacking, so that all weights can be given up and read again",
        streamed=False,
        options={"mmap": True, "repack": False},
    ),
    "stock-none": _Kind(
        "llama-cpp-python with use_mmap=False and without repacking: read into memory, whatever there is of it",
        streamed=False,
        options={"mmap": False, "repack": False},
    ),
    "stream-reactive": _Kind("streamed, experts read when they are wanted", streamed=True, options={"prefetch": "off"}),
    "stream-prefetch": _Kind(
        "streamed, experts read ahead (prefetch=auto)", streamed=True, options={"prefetch": "auto"}
    ),
}
"""By name."""


@dataclass(frozen=True)
class BenchArm:
    """An arm as it was asked for.

    Attributes:
        label: As asked for, `stream-prefetch:cache=3GiB`, files without their folders.
        name: Of ARMS.
        options: Fields of `session.Arm`.
        model: A file of its own (another layout of the same model); None for that of the benchmark.
        read_ahead_kib: Of the device that a mapped file is read from; 0 for that of the disk as it is.
        disk: Bytes a second that reads are held to inside the reader, as a slower disk would bring them; 0 for the disk as it is.
    """

    label: str
    name: str
    options: Mapping[str, Any]
    model: Path | None = None
    read_ahead_kib: int = 0
    disk: int = 0

    @property
    def streamed(self) -> bool:
        return ARMS[self.name].streamed

    @property
    def resident(self) -> bool:
        """Is it meant to have the whole model in memory?"""
        return ARMS[self.name].resident

    @property
    def mapped(self) -> bool:
        return bool(self.options.get("mmap"))

    @property
    def replayed(self) -> Path | None:
        """The trace that its routers follow."""
        return self.options.get("replay")

    def arm(self, model: Path, *, architecture: str, **running: Any) -> Arm:
        """What a child process is told: `running` are the other fields of `session.Arm`."""
        options = {**self.options, **running}
        if not self.streamed and (number := options.pop("experts_used", None)) is not None:
            options["kv_overrides"] = {f"{architecture}.expert_used_count": number}
        return Arm(self.model or model, "streamed" if self.streamed else "stock", **options)


def parse_arm(text: str) -> BenchArm:
    """An arm from NAME[:OPTION=VALUE...].

    Options of streamed arms are those of ExpertStreaming, `model` and `disk` (bytes a second, "500M"); of stock arms `repack`, `experts_used`, `read_ahead`
    (KiB, or "disk") and `model`.

    Raises:
        OptionError: There is no such arm or option, or no such value.
    """
    name, *settings = text.strip().split(":")
    label = [name]
    if name not in ARMS:
        raise OptionError(f"arm {name!r}: there is none of that name; there are {', '.join(ARMS)}")
    kind = ARMS[name]
    known = _STREAMED if kind.streamed else _STOCK
    options: dict[str, Any] = dict(kind.options)
    model, disk, read_ahead_kib = None, 0, 128 if kind.options.get("mmap") else 0
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            raise OptionError(
                f"arm {text!r}: {setting!r} is no option of {name}; it takes {', '.join(f'{known_key}=' for known_key in known)}"
            )
        try:
            parsed = known[key](value)
        except ValueError as error:
            raise OptionError(f"arm {text!r}: {key}={value!r}: {error}") from None
        # Where a file lies is nobody's business who reads a record.
        label.append(f"{key}={parsed.name}" if isinstance(parsed, Path) else setting)
        if key == "model":
            model = parsed
        elif key == "disk":
            disk = parsed
        elif key == "read_ahead":
            read_ahead_kib = parsed
        else:
            options[key] = parsed
    if read_ahead_kib and not options.get("mmap"):
        raise OptionError(f"arm {text!r}: read_ahead= is about mapped files, and {name} maps none")
    if kind.streamed:
        try:
            ExpertStreaming(**{key: value for key, value in options.items() if key in STREAMING})
        except OptionError as error:
            raise OptionError(f"arm {text!r}: {error}") from None
    return BenchArm(":".join(label), name, options, model, read_ahead_kib, disk)


# ------------------------------------------------------------------------------------------------------------------ values


def _switch(value: str) -> bool:
    try:
        return {"on": True, "off": False, "1": True, "0": False}[value]
    except KeyError:
        raise ValueError("expected on or off") from None


def _whole_number(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError("expected a number of at least 1")
    return int(value)


def _read_ahead(value: str) -> int:
    return 0 if value == "disk" else _whole_number(value)


def _direct(value: str) -> bool | str:
    return value if value == "auto" else _switch(value)


def _shares(value: str) -> tuple[float, ...]:
    return tuple(float(share) for share in value.split("/"))


def _file(value: str) -> Path:
    if not Path(value).is_file():
        raise ValueError("there is no such file")
    return Path(value)


def _value_of(name: str, hint: Any) -> Callable[[str], Any]:
    """How a field of ExpertStreaming is written: words are checked by ExpertStreaming itself."""
    special = {"direct": _direct, "replay": _file, "sidecar": _file, "replay_recall": _shares, "experts_used": _whole_number}
    if name in special:
        return special[name]
    return {bool: _switch, float: float, int: _whole_number}.get(hint, str)


_HINTS = typing.get_type_hints(ExpertStreaming)
_STREAMED: dict[str, Callable[[str], Any]] = {
    entry.name: _value_of(entry.name, _HINTS[entry.name])
    for entry in dataclasses.fields(ExpertStreaming)
    if entry.name in STREAMING
} | {"model": _file, "disk": parse_size}
_STOCK: dict[str, Callable[[str], Any]] = {
    "repack": _switch,
    "experts_used": _whole_number,
    "read_ahead": _read_ahead,
    "model": _file,
}
