"""The child process of one arm: it loads one model, stock or streamed, and answers token streams with records.

    python worker.py '{"model": "m.gguf", "kind": "stock", "repack": false, "mmap": false, "streaming": {}, ...}'

Started by `session.Session`, which describes the arm as `session.Arm`. Lines of JSON, one each:

    out  the record of the load, or {"refused": why}             once
    in   {"tokens": [...], "at_once": false, ...}: as Session.feed has them, or {"tokenize": "text"}
                                                                 as often as wanted; the end of input ends the process
    out  the record of that feed, the tokens, or {"refused": why}

A process of its own, because peak RSS is a property of a process and a memory limit one of a cgroup. Both kinds run the same code
but for the class they call, so what differs in their records is what streams the experts. It is run as a file, not as a module of
the package: that would import moestream, and a stock arm must be stock down to its libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

if __name__ == "__main__":
    sys.path.pop(0)  # our own folder, whose modules are not meant to be found by plain names
    if json.loads(sys.argv[1])["kind"] == "streamed":
        import moestream  # first, for it loads the OpenMP of llama.cpp with short spins

import llama_cpp
import numpy as np

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who started us
    arm = json.loads(sys.argv[1])
    answers = _take_over_stdout()
    start = time.perf_counter()
    try:
        llm = _load(arm)
    except (ValueError, OSError) as error:  # what moestream raises are such too
        _answer(answers, {"refused": str(error)})
        return
    _answer(answers, {"load_s": time.perf_counter() - start, "openmp": _openmp(), "model": _model(llm), **_memory()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            record = (
                _tokens(llm, **request)
                if "tokenize" in request
                else _feed(llm, streamed=arm["kind"] == "streamed", **request)
            )
        except (ValueError, OSError, RuntimeError) as error:
            record = {"refused": str(error)}
        _answer(answers, record)


def _load(arm: dict[str, Any]) -> llama_cpp.Llama:
    keywords = {
        "n_ctx": arm["n_ctx"],
        "n_batch": arm["n_batch"],
        "n_ubatch": arm["n_ubatch"],
        "n_threads": arm["threads"],
        "n_threads_batch": arm["threads"],
        "verbose": False,
    }
    context = llama_cpp.llama_context_default_params()
    context.n_seq_max, context.kv_unified = arm["sequences"], arm["sequences"] > 1
    with mock.patch.object(llama_cpp.llama_cpp, "llama_context_default_params", lambda: context):
        return _load_with(arm, keywords)


def _load_with(arm: dict[str, Any], keywords: dict[str, Any]) -> llama_cpp.Llama:
    if arm["kind"] == "streamed":
        options = moestream.ExpertStreaming(**arm["streaming"])
        return moestream.Llama(arm["model"], expert_streaming=options, **keywords)
    # What llama_cpp.Llama has no keyword for, it takes from the default parameters.
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = arm["repack"]
    with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", lambda: parameters):
        return llama_cpp.Llama(arm["model"], use_mmap=arm["mmap"], kv_overrides=arm["kv_overrides"] or None, **keywords)


def _model(llm: llama_cpp.Llama) -> dict[str, Any]:
    """As llama.cpp itself describes it."""
    text = ctypes.create_string_buffer(256)
    llama_cpp.llama_model_desc(llm.model, text, len(text))
    return {
        "description": text.value.decode("utf-8", "replace"),
        "size_bytes": llama_cpp.llama_model_size(llm.model),
        "parameters": llama_cpp.llama_model_n_params(llm.model),
        "vocabulary": llm.n_vocab(),
    }


def _tokens(llm: llama_cpp.Llama, *, tokenize: str) -> dict[str, Any]:
    if llama_cpp.llama_vocab_type(llm._model.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        raise ValueError("the model has no tokenizer, so no text can be given to it; use random tokens (--random)")
    return {"tokens": llm.tokenize(tokenize.encode())}


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
    checked: bool,
) -> dict[str, Any]:
    """Evaluate the tokens one by one, or as one prompt, for `seconds` at most. The record is `session.Feed`."""
    if not after_last:
        llm.reset()
    if llm.context_params.n_seq_max > 1:
        llm._ctx.kv_cache_clear()
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
    used, read = resource.getrusage(resource.RUSAGE_SELF), _bytes_read()
    begun = start = time.perf_counter()
    spent = 0.0
    sequences = llm.context_params.n_seq_max
    calls = [tokens] if at_once else [tokens[i : i + sequences] for i in range(0, len(tokens), sequences)]
    for step, call in enumerate(calls):
        start = time.perf_counter()
        if sequences > 1:
            _decode_one_of_each(llm, call, step)
        else:
            llm.eval(call)
        token_s.append(time.perf_counter() - start)
        spent += token_s[-1]
        if checked:
            logits_crc.append(_logits_crc(llm))
            if streamed:
                now = llm.expert_stats()
                misses.append(now.misses - last.misses)
                last = now
        if seconds is not None and spent >= seconds:
            break
    feed_s = time.perf_counter() - begun
    recording.close()
    then = resource.getrusage(resource.RUSAGE_SELF)
    record = {
        "token_s": token_s,
        "feed_s": feed_s,
        "cpu_s": then.ru_utime + then.ru_stime - used.ru_utime - used.ru_stime,
        "major_faults": then.ru_majflt - used.ru_majflt,
        "read_bytes": _bytes_read() - read,
        "logits_crc": logits_crc,
        "misses": misses,
        **_memory(),
    }
    if streamed:
        # reader and direct come from the statistics rather than the options: "auto" has become something by now.
        record["experts"] = dataclasses.asdict(llm.expert_stats().since(before))
    return record


def _decode_one_of_each(llm: llama_cpp.Llama, tokens: list[int], position: int) -> None:
    """One token of each sequence, in one batch."""
    batch = llm._batch.batch
    batch.n_tokens = len(tokens)
    for sequence, token in enumerate(tokens):
        batch.token[sequence], batch.pos[sequence], batch.logits[sequence] = token, position, True
        batch.n_seq_id[sequence], batch.seq_id[sequence][0] = 1, sequence
    llm._ctx.decode(llm._batch)


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


def _bytes_read() -> int:
    """From disks so far, whoever asked for it: reads and page faults."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def _take_over_stdout() -> TextIO:
    """The real standard output, for records alone: whatever else writes there (llama.cpp does) lands in standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
