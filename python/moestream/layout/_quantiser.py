"""The process that llama.cpp quantises in: an order as JSON on stdin, the log on stdout, the exit code is llama.cpp's."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ..errors import MoestreamError
from .imatrix import read_imatrix
from .quantise import REFUSED

_DEFAULT_BUFFER_BYTES = 8 << 30


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    os.write(1, text)


def _params(order: dict[str, Any], imatrix: dict[str, np.ndarray]) -> tuple[Any, list[Any]]:
    """The parameters, and what must live as long as they do.

    Raises:
        MoestreamError: They are not laid out as llama-cpp-python has them.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    if params.max_buf_size != _DEFAULT_BUFFER_BYTES or params.nthread != 0 or not params.quantize_output_tensor:
        raise MoestreamError(
            "the parameters of llama_model_quantize are not where llama-cpp-python says: reinstall llama-cpp-python"
        )
    params.nthread = order["threads"]
    params.ftype = order["type"]
    params.allow_requantize = order["allow_requantize"]
    params.dry_run = order["dry_run"]
    params.max_buf_size = order["max_buf_size"]
    alive: list[Any] = [imatrix]
    if imatrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
        for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
            entry.name = name.encode()
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entry.size = values.size
        params.imatrix = entries
        alive.append(entries)
    if order["keep"]:
        overrides = (llama_cpp.llama_model_tensor_override * 2)()
        overrides[0].pattern = order["keep"].encode()
        overrides[0].type = order["keep_type"]
        params.tt_overrides = overrides
        alive.append(overrides)
    return params, alive


def main() -> int:
    order = json.load(sys.stdin)
    with contextlib.suppress(OSError, AttributeError):  # nobody would want the result
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    try:
        imatrix = read_imatrix(Path(order["imatrix"])) if order["imatrix"] else {}
        params, alive = _params(order, imatrix)
    except MoestreamError as exc:
        print(exc, flush=True)
        return REFUSED
    code = llama_cpp.llama_model_quantize(os.fsencode(order["source"]), os.fsencode(order["out"]), ctypes.byref(params))
    del alive
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
