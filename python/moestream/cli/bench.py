"""Measure how fast a model runs, in several ways compared within one run.

Each way, called an arm, has its turns in a process of its own, under the limits
given, cold at first, then warm; arms take turns A B A B. Tests, lists and
ranges are those of llama-bench. What figures mean: docs/benchmarking.md.

  stock-mmap, stock-mmap-tuned,
  stock-none, stock-resident         llama-cpp-python
  stream-reactive, stream-prefetch   moestream

Behind colons an arm has options of ExpertStreaming, another layout of a model
(model=FILE), or a slower disk (disk=RATE):
stream-prefetch:cache=3GiB:policy=lru


  moestream bench -m MODEL.gguf -p 0 -n 256 -r 3
  moestream bench -m MODEL.gguf --arms stock-mmap,stream-prefetch \\
      --memory 4GiB,8GiB --disk-bps 500M -o md -o json=run.json -o html=run.html
  moestream bench --compare before.json after.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError, OutputError
from ._interrupt import INTERRUPTED
from ._model import locate
from ._output import Progress, require_writable

if TYPE_CHECKING:
    from ..bench.writers import Writer

FORMATS = ("md", "csv", "json", "jsonl", "sql", "html")


def run(
    *,
    model: Sequence[str] | None,
    hf_repo: str | None,
    hf_file: str | None,
    output: Sequence[str] | None,
    compare: Sequence[str] | None,
    progress: bool,
    no_warmup: bool,
    **options: Any,
) -> int:
    """Runs `moestream.bench.benchmark` for the command line and returns the exit code."""
    if compare is not None:
        return _compare(*compare)
    from ..bench import benchmark

    outputs = _outputs(output or ["md"])
    if any(format == "html" for format, _ in outputs):
        from ..bench.report import require_matplotlib

        require_matplotlib()
    if no_warmup:
        options["warmup"] = 0
    models = [locate(None, hf_repo, hf_file)] if hf_repo is not None else model
    if hf_repo is not None and model:
        raise OptionError("both a model file and -hf are given: name the model once")
    with _told_to_stop(), contextlib.ExitStack() as stack:
        writers = stack.enter_context(_writing(outputs))
        told = stack.enter_context(Progress(lambda: False))
        last = ""

        def tell(doing: str, done: int, total: int) -> None:
            nonlocal last
            told.show("measuring", done, total, unit="turns")
            if progress and doing != last:
                last = doing
                print(f"moestream bench: {done + 1} of {total}: {doing}", file=sys.stderr, flush=True)

        def record_to_all(record: dict[str, Any]) -> None:
            told.hide()
            failed: OSError | None = None
            for writer in writers:  # one with a full disk takes it from no other
                try:
                    writer.record(record)
                except OSError as error:
                    failed = error
            if failed is not None:
                raise failed

        try:
            benchmark(model=models, on_record=record_to_all, progress=tell, **options)
        except KeyboardInterrupt:
            print("moestream: interrupted: what was measured so far is told", file=sys.stderr)
            return INTERRUPTED
    return 0


def _outputs(asked: Sequence[str]) -> list[tuple[str, Path | None]]:
    """(format, file or None for the terminal) of each -o."""
    found = []
    for text in asked:
        format, equals, file = text.partition("=")
        if format not in FORMATS:
            raise OptionError(f"-o {text}: expected {', '.join(FORMATS)}, each with =FILE behind it if wanted")
        if equals:
            require_writable(file)
        elif format == "html":
            raise OptionError("-o html: a report is a file: give -o html=FILE")
        found.append((format, Path(file) if equals else None))
    files = [file for _, file in found if file is not None]
    if twice := next((file for file in files if files.count(file) > 1), None):
        raise OptionError(f"-o: {twice} is given twice; each format needs a file of its own")
    if sum(file is None for _, file in found) > 1:
        raise OptionError("-o: only one format can go to the terminal; give the others a file, as in -o json=FILE")
    return found


@contextlib.contextmanager
def _writing(outputs: Sequence[tuple[str, Path | None]]) -> Iterator[list[Writer]]:
    """Writers of all outputs. Files get their names at the end, also when it comes early: what was measured is kept.

    Raises:
        OutputError: A file cannot be written.
    """
    from ..bench.writers import writer

    with contextlib.ExitStack() as stack:
        writers = []
        for format, file in outputs:
            if format == "html":
                writers.append(stack.enter_context(_Report(file)))
            elif file is not None:
                writers.append(stack.enter_context(_written_to(file, format)))
            else:
                writers.append(stack.enter_context(writer(format, sys.stdout)))
        yield writers


@contextlib.contextmanager
def _written_to(file: Path, format: str) -> Iterator[Writer]:
    """A writer to a file, which stays as it was where nothing was measured, or what was cannot be written whole.

    Raises:
        OutputError: It cannot be written.
    """
    from ..bench.writers import writer

    part = file.with_name(file.name + ".part")
    try:
        stream = open(part, "w", encoding="utf-8", newline="")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from error
    out = writer(format, stream)
    try:
        yield out
    finally:
        try:
            out.close()
            stream.close()
            if out.written:
                os.replace(part, file)
        except OSError as error:
            raise OutputError(f"{file}: cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                stream.close()
            part.unlink(missing_ok=True)


class _Report:
    """Collects records, and writes their page at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: list[dict[str, Any]] = []

    def record(self, record: dict[str, Any]) -> None:
        self._records.append(record)

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, *_: object) -> None:
        from ..bench.report import write_report

        if self._records:
            write_report(self._records, self._file)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, are as good as Ctrl-C: loop devices and cgroups are removed on the way out."""

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    # Who is started by nohup goes on.
    told_by = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in told_by}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _compare(first: str, second: str) -> int:
    from ..bench.compare import compare, comparison_lines, pair_records
    from ..bench.record import read_records

    before, after = read_records(first), read_records(second)
    print("\n".join(comparison_lines(compare(before, after), pair_records(before, after))))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench`. They have llama-bench's names where it has such an option."""
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        metavar="FILE",
        help="GGUF file; may be given several times (default: the shipped one)",
    )
    parser.add_argument("-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help="take it from the Hugging Face Hub")
    parser.add_argument("-hff", "--hf-file", metavar="FILE", help="the file in that repository, instead of a QUANT")
    parser.add_argument(
        "--arms",
        default="stock-mmap-tuned,stream-reactive,stream-prefetch",
        metavar="ARM,...",
        help="ways to run it, NAME[:OPTION=VALUE...] each (default: %(default)s)",
    )
    tests = parser.add_argument_group("tests", "numbers are 512, 128,256, 1-4, 128-512+128 or 1-32*2")
    for short, name, default, what in (
        ("-p", "n-prompt", "512", "tokens of a prompt; 0: no such test"),
        ("-n", "n-gen", "128", "tokens written one by one; 256 or more to see whether the speed is steady"),
        ("-d", "n-depth", "0", "tokens of context before them"),
        ("-b", "batch-size", "2048", "largest batch of a prompt"),
        ("-ub", "ubatch-size", "512", "tokens computed at once at most"),
    ):
        tests.add_argument(short, f"--{name}", default=default, metavar="N", help=f"{what} (default: %(default)s)")
    tests.add_argument(
        "-pg", dest="n_pg", action="append", default=[], metavar="P,N", help="a prompt and what is written behind it"
    )
    tests.add_argument("-t", "--threads", metavar="N", help="(default: one a physical core)")
    tests.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    tests.add_argument(
        "--warmup", type=int, default=256, metavar="N", help="tokens before the tests (default: %(default)s)"
    )
    tests.add_argument("--no-warmup", action="store_true", help="none")
    tests.add_argument(
        "--test-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="when to end a test that is too slow (default: %(default)g)",
    )
    tests.add_argument("--expert-cache", metavar="SIZE,...", help="caches of streamed arms that name none")
    tests.add_argument(
        "-f", "--file", metavar="FILE", help="the text that is read and written (default: that of the package)"
    )
    tests.add_argument("--random", action="store_true", help="random tokens instead, as llama-bench takes")
    limits = parser.add_argument_group("limits, for every arm alike")
    limits.add_argument("--memory", metavar="SIZE,...", help="memory, page cache included: 4GiB (default: no limit)")
    limits.add_argument("--disk-bps", metavar="SIZE,...", help="bytes read a second: 500M (default: no limit)")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="FORMAT[=FILE]",
        help="md, csv, json, jsonl, sql, html=FILE; may be given several times (default: md)",
    )
    parser.add_argument("--progress", action="store_true", help="tell each step on stderr")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="do not measure: is what file B holds faster than what A holds?"
    )
