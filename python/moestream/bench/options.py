"""Numbers as llama-bench takes them: lists between commas, and ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import OptionError

__all__ = ["numbers", "pair"]

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?:([+*])([0-9]+))?)?")
_MOST = 1000  # numbers of one range


def numbers(option: str, value: str | int | Sequence[int | str], *, least: int = 0) -> tuple[int, ...]:
    """The numbers of "512", "128,256", "1-4" (1 2 3 4), "128-512+128" or "1-32*2" (1 2 4 ... 32), each once.

    Args:
        option: Named in errors.
        value: Such a text, a number, or several of either.
        least: What each must be at least.

    Raises:
        OptionError: Not such a text, a range that never ends, or a number below `least`.
    """
    parts = [value] if isinstance(value, (str, int)) else list(value)
    found: list[int] = []
    for part in parts:
        for item in str(part).split(","):
            found += _item(option, item.strip())
    if not found:
        raise OptionError(f"{option}: no number is given")
    if low := [number for number in found if number < least]:
        raise OptionError(f"{option} {low[0]}: must be at least {least}")
    return tuple(dict.fromkeys(found))


def _item(option: str, text: str) -> list[int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise OptionError(
            f"{option} {text!r}: expected numbers such as 512, 128,256, or a range such as 1-4, 128-512+128 or 1-32*2"
        )
    first, last, step_kind, step = match[1], match[2], match[3] or "+", match[4] or "1"
    if last is None:
        return [int(first)]
    at, end, by = int(first), int(last), int(step)
    if at > end:
        raise OptionError(f"{option} {text!r}: the range ends before it begins")
    if (step_kind == "+" and by < 1) or (step_kind == "*" and (by < 2 or at < 1)):
        raise OptionError(f"{option} {text!r}: the range never comes to its end")
    found = []
    while at <= end:
        found.append(at)
        at = at + by if step_kind == "+" else at * by
        if len(found) > _MOST:
            raise OptionError(f"{option} {text!r}: more than {_MOST} numbers")
    return found


def pair(option: str, value: str | tuple[int, int]) -> tuple[int, int]:
    """The two numbers of "512,128": a prompt, and what is written after it.

    Raises:
        OptionError: Not two numbers of at least 1.
    """
    parts = value.split(",") if isinstance(value, str) else [str(number) for number in value]
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"{option} {value!r}: expected a prompt's tokens and those written after it, such as 512,128")
    return int(parts[0]), int(parts[1])
