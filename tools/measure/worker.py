"""The child process of one arm: it loads one model, stock or streamed, and answers token streams with records.

    python -m measure.worker '{"model": "m.gguf", "kind": "stock", "repack": false, "mmap": false, "streaming": {}, ...}'

Started by `arms.Session`, which describes the arm as `arms.Arm`. Lines of JSON, one each:

    out  the record of the load                                  once
    in   {"tokens": [...], "at_once": false, "after_last": false, "seconds": null, ...}: as Session.feed has them
                                                                 as often as wanted; the end of input ends the process
    out  the record of that feed

A process of its own, because peak RSS is a property of a process and a memory limit one of a cgroup. Both kinds run the same code
but for the class they call, so what differs in their records is what streams the experts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

if __name__ == "__main__" and json.loads(sys.argv[1])["kind"] == "streamed":
    # First, for it loads the OpenMP of llama.cpp with short spins. A stock arm must be stock down to its libraries.
    import moestream

import llama_cpp
import numpy as np

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    arm = json.loads(sys.argv[1])
    answers = _take_over_stdout()
    start = time.perf_counter()
    llm = _load(arm)
    _answer(answers, {"load_s": time.perf_counter() - start, "openmp": _openmp(), **_memory()})
    for line in sys.stdin:
        _answer(answers, _feed(llm, streamed=arm["kind"] == "streamed", **json.loads(line)))


def _load(arm: dict[str, Any]) -> llama_cpp.Llama:
    keywords = {
        "n_ctx": arm["n_ctx"],
        "n_batch": arm["n_batch"],
        "n_threads": arm["threads"],
        "n_threads_batch": arm["threads"],
        "verbose": False,
    }
    if arm["kind"] == "streamed":
        options = moestream.ExpertStreaming(**arm["streaming"])
        return moestream.Llama(arm["model"], expert_streaming=options, **keywords)
    # llama_cpp.Llama has no keyword for repacking, and takes all that it does not set itself from the default parameters.
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = arm["repack"]
    with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", lambda: parameters):
        return llama_cpp.Llama(arm["model"], use_mmap=arm["mmap"], **keywords)


def _feed(
    llm: llama_cpp.Llama,
    *,
    streamed: bool,
    tokens: list[int],
    at_once: bool,
    after_last: bool,
    seconds: float | None,
    prefetch: str | None,
    read_rate: float | None,
    recorded: bool,
) -> dict[str, Any]:
    """Evaluate the tokens one by one, or as one prompt, for `seconds` at most.

    The record: `token_s` and `logits_crc` per call, memory, and for a streamed model what its experts did in these calls
    (`experts`) and how many of them each call missed (`misses`).
    """
    if not after_last:
        llm.reset()
    if prefetch is not None:
        llm._engine.set_prefetch(prefetch)
    if read_rate is not None:
        llm._engine.set_read_rate(read_rate)
    recording = contextlib.ExitStack()
    if recorded:
        recording.enter_context(llm.record_timeline())
    before = last = llm.expert_stats() if streamed else None
    token_s: list[float] = []
    logits_crc: list[int] = []
    misses: list[int] = []
    for call in [tokens] if at_once else [[token] for token in tokens]:
        start = time.perf_counter()
        llm.eval(call)
        token_s.append(time.perf_counter() - start)
        logits_crc.append(_logits_crc(llm))
        if streamed:
            now = llm.expert_stats()
            misses.append(now.misses - last.misses)
            last = now
        if seconds is not None and sum(token_s) >= seconds:
            break
    recording.close()
    record = {"token_s": token_s, "logits_crc": logits_crc, "misses": misses, **_memory()}
    if streamed:
        # reader and direct come from the statistics rather than the options: "auto" has become something by now.
        record["experts"] = dataclasses.asdict(last.since(before))
    return record


def _logits_crc(llm: llama_cpp.Llama) -> int:
    logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return zlib.crc32(np.ctypeslib.as_array(logits, shape=(llm.n_vocab(),)))


def _openmp() -> dict[str, str]:
    """By getenv of the C library: the library may have set them after Python copied its environment."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = {name: getenv(name.encode()) for name in OPENMP}
    return {name: value.decode() for name, value in found.items() if value is not None}


def _memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(lines[key].split()[0]) * 1024
        for name, key in (("peak_rss_bytes", "VmHWM"), ("rss_anon_bytes", "RssAnon"))
    }


def _take_over_stdout() -> TextIO:
    """The real standard output, for records alone: whatever else writes there (llama.cpp does) lands in standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, record: dict[str, Any]) -> None:
    print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main()
