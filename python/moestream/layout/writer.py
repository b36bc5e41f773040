"""Writing large files so that nothing is lost: into NAME.part, continued after a kill, renamed when all is on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import OptionError, OutputError
from ..memory import format_size
from .gguf_file import Model
from .interleaving import crc32c
from .progress import bytes_bar
from .stream import Piece, run_ahead

__all__ = ["OutputFile", "check_output", "part_path", "plan_hash", "shard_path", "write_files"]

SYNC_BYTES = 512 << 20
SYNC_SECONDS = 20.0


@dataclass(frozen=True)
class OutputFile:
    """A file to write: its header comes first and is known last."""

    path: Path
    size_bytes: int


def part_path(path: Path) -> Path:
    """Where a file is written until it is complete."""
    return path.with_name(path.name + ".part")


def _journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".part.json")


def shard_path(path: Path, number: int, count: int) -> Path:
    """The name of shard `number` (from 0) of `count`; `path` itself if it is the only one."""
    return path if count == 1 else path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}{path.suffix}")


def plan_hash(*parts: object) -> str:
    """Of what decides the bytes of an output; `parts` must have a repr that says all."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def check_output(path: Path, sources: Sequence[Path], *, force: bool) -> None:
    """Raises unless `path` may be written.

    Raises:
        OptionError: It is a file of the source.
        OutputError: It exists, and `force` is not set; or it has no folder to be in.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: is a directory; name the file to write")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: is a device or a pipe; name the file to write")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: you lack the permission to write into {path.parent}")
    for source in sources:
        if path.exists() and source.exists() and os.path.samefile(path, source):
            raise OptionError(f"{path}: is the source itself; give the output another name")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already; give another name, or --force to replace it")


def check_broken_off(out: Path, paths: Sequence[Path], *, resume: bool, force: bool) -> None:
    """Raises OutputError if there is something to continue, and neither of the two ways out was taken."""
    there = [path for path in (*map(part_path, paths), _journal_path(out)) if path.exists()]
    if there and not (resume or force):
        raise OutputError(
            f"{there[0]}: is there from a conversion that was broken off; --resume continues it, --force starts anew"
        )


def write_files(
    out: Path,
    files: Sequence[OutputFile],
    pieces: Sequence[Piece],
    headers: Callable[[np.ndarray], Sequence[bytes]],
    *,
    source: Model,
    plan: str,
    what: str,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
) -> np.ndarray:
    """Writes files and returns the CRC-32C of every row, u32[rows], in the order of the pieces.

    Args:
        out: The name that the user gave: that of the journal.
        pieces: What the files hold behind their headers, file by file, in ascending order.
        headers: The headers of the files, given the checksums.
        source: What is read; it must be the same at the end as at the start.
        plan: `plan_hash` of all that decides the bytes; only an output of the same plan is continued.
        resume: Continue the .part files that are there.
        force: Replace .part files and files that are there.

    Raises:
        OutputError: They exist, or the disk is full: then the .part files stay, for `resume`.
        ModelError: The source cannot be read or has changed.
        OptionError: `resume` of a different conversion.
    """
    for file in files:
        check_output(file.path, [one.path for one in source.files], force=force)
    check_broken_off(out, [file.path for file in files], resume=resume, force=force)
    journal = _Journal(out, plan, [part_path(file.path) for file in files])
    written = journal.read(len(pieces)) if resume else 0
    _check_room(files)
    with contextlib.ExitStack() as opened:
        output = opened.enter_context(_Output(files))
        done = written if output.was_there else 0
        if done == 0:
            output.empty()
            journal.checksums = []
            journal.write(0, [])
        syncs = opened.enter_context(_Syncs(output, journal))
        checksums = journal.checksums[:]
        done_bytes = sum(piece.size for piece in pieces[:done])
        total = sum(piece.size for piece in pieces)
        bar = opened.enter_context(bytes_bar(what, total, progress=progress, done_bytes=done_bytes))
        try:
            buffer_bytes = max((piece.buffer_bytes for piece in pieces), default=0)
            todo = contextlib.closing(run_ahead(pieces[done:], buffer_bytes))  # type: ignore[type-var]
            for number, (piece, buffer) in enumerate(opened.enter_context(todo), done + 1):
                piece.finish(buffer)
                checksums.extend(row_checksums(piece, buffer))
                output.write(piece.file, piece.offset, buffer[: piece.size])
                syncs.wrote(piece.size, number, checksums)
                bar.update(piece.size)
        except BaseException:
            syncs.last()
            raise
        syncs.finish()
        numbers = np.array(checksums, dtype=np.uint32)
        for index, header in enumerate(headers(numbers)):
            output.write(index, 0, np.frombuffer(header, dtype=np.uint8))
        output.sync()
    try:
        source.check_unchanged()
    except BaseException:
        journal.remove()
        raise
    for file in reversed(files):  # the first shard, by which the others are found, comes last
        os.replace(part_path(file.path), file.path)
    _sync_folder(out.parent)
    journal.path.unlink()
    return numbers


def row_checksums(piece: Piece, buffer: np.ndarray) -> Iterator[int]:
    """The checksum of each row of a piece that is made of such."""
    if piece.row_bytes:
        for begin in range(0, piece.size, piece.row_bytes):
            yield crc32c(buffer[begin : begin + piece.row_bytes])


class _Journal:
    """How far an output is: a small file beside it, replaced as a whole."""

    def __init__(self, out: Path, plan: str, parts: Sequence[Path]) -> None:
        self.path = _journal_path(out)
        self.checksums: list[int] = []
        self._plan, self._parts = plan, parts

    def read(self, n_pieces: int) -> int:
        """The number of pieces that are there already.

        Raises:
            OptionError: They are of another plan.
            OutputError: The journal cannot be read.
        """
        if not self.path.exists():
            return 0
        try:
            found = json.loads(self.path.read_text())
            plan, done, checksums = found["plan"], int(found["pieces"]), [int(number) for number in found["checksums"]]
        except (ValueError, KeyError, TypeError) as exc:
            raise OutputError(f"{self.path}: cannot be read: {exc}; --force starts anew") from exc
        if plan != self._plan:
            raise OptionError(
                f"{self.path}: is of another conversion: the source, an option or the version of moestream differs; "
                "give the same as then, or --force to start anew"
            )
        if not 0 < done <= n_pieces:
            return 0
        self.checksums = checksums
        return done

    def write(self, pieces: int, checksums: Sequence[int]) -> None:
        written = self.path.with_name(self.path.name + ".new")
        try:
            written.write_text(json.dumps({"plan": self._plan, "pieces": pieces, "checksums": list(checksums)}))
            os.replace(written, self.path)
        except OSError as exc:
            raise OutputError(f"{written}: cannot be written: {exc.strerror}; make room and try again") from exc

    def remove(self) -> None:
        for path in (*self._parts, self.path, self.path.with_name(self.path.name + ".new")):
            path.unlink(missing_ok=True)


class _Output:
    """The .part files, locked, of their final size from the beginning: what is never written is zero.

    Attributes:
        was_there: Whether all of them were, of that size.
    """

    def __init__(self, files: Sequence[OutputFile]) -> None:
        self._files = files
        self._fds: list[int] = []
        self.was_there = True

    def __enter__(self) -> _Output:
        try:
            for file in self._files:
                path = part_path(file.path)
                try:
                    self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                    fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.was_there &= os.fstat(self._fds[-1]).st_size == file.size_bytes
                    os.ftruncate(self._fds[-1], file.size_bytes)
                except BlockingIOError as exc:
                    raise OutputError(f"{path}: another process is writing it; wait for that one") from exc
                except OSError as exc:
                    self._failed(file, exc)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def empty(self) -> None:
        """Takes away what was written before."""
        for fd, file in zip(self._fds, self._files, strict=True):
            os.ftruncate(fd, 0)
            os.ftruncate(fd, file.size_bytes)

    def write(self, file: int, offset: int, data: np.ndarray) -> None:
        view = memoryview(data)
        try:
            while view:
                n = os.pwrite(self._fds[file], view, offset)
                view, offset = view[n:], offset + n
        except OSError as exc:
            self._failed(self._files[file], exc)

    def sync(self) -> None:
        """Brings what was written to the disk, and lets the system forget it."""
        for fd, file in zip(self._fds, self._files, strict=True):
            try:
                os.fsync(fd)
            except OSError as exc:
                self._failed(file, exc)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _failed(self, file: OutputFile, exc: OSError) -> NoReturn:
        path = part_path(file.path)
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(f"{path}: cannot be written: {exc.strerror}") from exc
        needed = file.size_bytes - _on_disk(path)
        free = shutil.disk_usage(path.parent).free
        raise OutputError(
            f"{path}: {exc.strerror}: {format_size(needed)} are still to be written, {format_size(free)} are free; "
            "make room and continue with --resume"
        ) from exc


class _Syncs:
    """Brings the output to the disk and the journal after it, in a thread, every so many bytes or seconds."""

    def __init__(self, output: _Output, journal: _Journal) -> None:
        self._output, self._journal = output, journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moestream-sync")
        self._running: Future[None] | None = None
        self._bytes, self._since = 0, time.monotonic()
        self._newest: tuple[int, list[int], int] | None = None

    def __enter__(self) -> _Syncs:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()

    def wrote(self, size: int, pieces: int, checksums: list[int]) -> None:
        self._bytes += size
        self._newest = (pieces, checksums, len(checksums))
        if self._bytes < SYNC_BYTES and time.monotonic() - self._since < SYNC_SECONDS:
            return
        self.finish()  # a disk slower than we are is waited for here
        self._running = self._thread.submit(self._sync, pieces, checksums[:])
        self._bytes, self._since = 0, time.monotonic()

    def _sync(self, pieces: int, checksums: list[int]) -> None:
        self._output.sync()
        self._journal.write(pieces, checksums)

    def finish(self) -> None:
        """Waits for what runs, and raises what went wrong in it."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def last(self) -> None:
        """Notes how far it came, if the disk still takes that."""
        with contextlib.suppress(OSError):
            self.finish()
        if self._newest is not None:
            with contextlib.suppress(OSError):
                pieces, checksums, count = self._newest
                self._sync(pieces, checksums[:count])


def _on_disk(path: Path) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _check_room(files: Sequence[OutputFile]) -> None:
    """Raises OutputError unless the disk has room for what is still to be written."""
    needed = sum(max(0, file.size_bytes - _on_disk(part_path(file.path))) for file in files)
    check_room(files[0].path, needed)


def check_room(path: Path, needed_bytes: int) -> None:
    """Raises OutputError unless the disk of `path` has room for so many bytes."""
    free = shutil.disk_usage(path.parent).free
    if needed_bytes > free:
        raise OutputError(
            f"{path}: {format_size(needed_bytes)} are needed, and {path.absolute().parent} has {format_size(free)} free; "
            "make room, or name a file on another disk"
        )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
