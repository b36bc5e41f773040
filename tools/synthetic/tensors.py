"""Which tensors a model has, as llama.cpp itself sees it.

`tensors(arch, shape)` hands llama.cpp nothing but hyper-parameters (`llama_model_init_from_user`) and notes every
tensor that it creates. So no list of names is kept here, and a new architecture needs only its keys in
`architectures.py`.

llama.cpp allocates what it creates, as F32: 120 GB for a 30B shape. But each dimension of a tensor is an affine
function of the number of experts, of their feed-forward length, and of the vocabulary, so we ask for a few small
models and extrapolate.

llama.cpp aborts on hyper-parameters that it dislikes. It is asked in a process of its own (`python -m synthetic.tensors`,
questions and answers as JSON), and its death becomes a `LlamaCppError` that carries what it said.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from . import architectures
from .architectures import Shape


class LlamaCppError(RuntimeError):
    """llama.cpp refused the hyper-parameters or aborted; the message ends with what it wrote to stderr."""


@functools.cache
def tensors(arch: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and dimensions (ggml's `ne`, a row's length first) of the tensors of a model, in llama.cpp's order.

    Optional tensors that models of this architecture do not have are left out, see `architectures.keeps`.

    Raises:
        ValueError: No such architecture, or not with this shape.
        LlamaCppError: llama.cpp cannot make this model.
    """
    architectures.check(arch, shape)
    small = architectures.smallest_ask(shape)
    steps = {"experts": small.groups * 2, "ff": 32, "vocab": 32}
    larger = [dataclasses.replace(small, **{field: getattr(small, field) + step}) for field, step in steps.items()]
    base, *changed = _ask(arch, [small, *larger])

    dims = {name: list(ne) for name, ne in base.items()}
    for (field, step), answer in zip(steps.items(), changed, strict=True):
        grow = getattr(shape, field) - getattr(small, field)
        for name, ne in dims.items():
            for axis, was in enumerate(base[name]):
                ne[axis] += (answer[name][axis] - was) * grow // step
    if not shape.merged_gate_up:
        dims = _split_gate_up(dims)
    return {name: tuple(ne) for name, ne in dims.items() if architectures.keeps(arch, shape, name)}


def _split_gate_up(dims: dict[str, list[int]]) -> dict[str, list[int]]:
    """Two tensors, and their scales, in place of each merged one: where llama.cpp accepts either it makes that."""
    split: dict[str, list[int]] = {}
    for name, ne in dims.items():
        if "ffn_gate_up_exps.weight" not in name:
            split[name] = ne
            continue
        for half in ("ffn_gate_exps", "ffn_up_exps"):
            weight = name.replace("ffn_gate_up_exps", half)
            split[weight] = [ne[0], ne[1] // 2, ne[2]]
            split[weight.replace(".weight", ".scale")] = [ne[2]]
    return split


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """The installed ggml library that has the GGUF and the quantisation functions."""
    import llama_cpp

    folder = pathlib.Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(p for suffix in ("so", "dylib") for p in folder.glob(f"libggml-base.{suffix}"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufInitParams]
    library.gguf_free.argtypes = [ctypes.c_void_p]
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_n_dims.argtypes = [ctypes.c_void_p]
    return library


def _ask(arch: str, shapes: list[Shape]) -> list[dict[str, list[int]]]:
    question = json.dumps({"arch": arch, "shapes": [dataclasses.asdict(s) for s in shapes]})
    tools = str(pathlib.Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "synthetic.tensors"],
        input=question,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "GGML_NO_BACKTRACE": "1"},
    )
    if done.returncode != 0:
        said = done.stderr.strip()[-3000:]
        raise LlamaCppError(f"llama.cpp cannot make a {arch} model of {shapes[0]} (exit {done.returncode}):\n{said}")
    return json.loads(done.stdout)


# The process that asks ------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """The first members of the public `struct ggml_tensor`."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4)]


class _GgufInitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _created(arch: str, shape: Shape) -> dict[str, list[int]]:
    """Every tensor that llama.cpp creates for these hyper-parameters."""
    import gguf
    import llama_cpp

    base = ggml_base()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "keys.gguf")
        writer = gguf.GGUFWriter(path, arch)
        architectures.add_keys(writer, arch, shape)
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(shape.vocab)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        metadata = base.gguf_init_from_file(os.fsencode(path), _GgufInitParams(True, None))

    created: dict[str, list[int]] = {}

    @llama_cpp.llama_model_set_tensor_data_t
    def note(tensor, _):
        ne = ctypes.cast(tensor, ctypes.POINTER(_Tensor)).contents.ne
        created.setdefault(base.ggml_get_name(tensor).decode(), list(ne[: base.ggml_n_dims(tensor)]))

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_init_from_user(metadata, note, None, params)
    base.gguf_free(metadata)
    if not model:
        raise SystemExit("llama_model_init_from_user gave no model")
    llama_cpp.llama_model_free(model)
    return created


def _answer() -> None:
    import llama_cpp

    # Only llama.cpp's warnings and errors, so that what a failure reports is its reason.
    @llama_cpp.llama_log_callback
    def log(level, text, _):
        if level in (3, 4, 5):  # WARN, ERROR, and CONT, the rest of a line
            os.write(2, text)

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    question = json.load(sys.stdin)
    json.dump([_created(question["arch"], Shape(**shape)) for shape in question["shapes"]], sys.stdout)


if __name__ == "__main__":
    _answer()
