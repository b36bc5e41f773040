"""The `moestream` command as a user runs it: in a process of its own, at a terminal or not."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from typing import Any

# llama_cpp leaves a file open at exit, which is not ours to fail for.
PYTHON = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "moestream"]


def moestream_command(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


def at_terminal(*args: object, columns: int = 80, rows: int = 24, **streams: Any) -> tuple[int, str]:
    """The exit code, and all that is written to a terminal, control sequences included.

    Args:
        streams: `stdout` or `stderr`, if one of them goes elsewhere.
    """
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    streams = {"stdout": side, "stderr": side, **streams}
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*PYTHON, *map(str, args)], stdin=subprocess.DEVNULL, env={**env, "TERM": "xterm"}, **streams
    )
    os.close(side)
    drawn = b""
    try:
        while piece := os.read(terminal, 4096):
            drawn += piece
    except OSError:  # the other side of a terminal is closed
        pass
    os.close(terminal)
    return process.wait(timeout=60), drawn.decode()


def screen(drawn: str) -> list[str]:
    """The rows that are left on a terminal without an end, after what is drawn."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\x1b\r\n]+", drawn):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif part.startswith("\x1b["):
            up, command = int(part[2:-1] or 1), part[-1]
            assert command in "AF", part
            row, column = row - up, 0 if command == "F" else column
            assert row >= 0
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
    return [text.rstrip() for text in rows]
