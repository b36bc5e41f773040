"""Convert a model to a laid file: everything of one expert in one run of bytes.

SOURCE is a GGUF, the first shard of a split one, a laid file (which is laid for
another machine), or a folder from Hugging Face. Without TYPE a quantised source
keeps its types, and another becomes Q4_0; TYPE is one of llama.cpp's.

  moestream convert model.gguf laid.gguf
  moestream convert model-f16.gguf laid.gguf Q4_K_M --imatrix imatrix.gguf
  moestream convert -hf allenai/OLMoE-1B-7B-0924 olmoe.gguf Q4_0
  moestream convert model.gguf laid.gguf --dry-run
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _hub
from ..errors import OptionError
from ..layout import Conversion, ConversionPlan
from ..layout import convert as convert_model
from ..layout.interleaving import TARGETS
from ..memory import format_size, parse_size
from ._model import add_hub_arguments, locate
from ._output import print_columns, print_json
from ._written import as_json, written

_SAFETENSORS = (".safetensors", ".json", ".txt", ".jinja", ".model", ".tiktoken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `convert`."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="what to convert; not with -hf")
    parser.add_argument("out", nargs="?", metavar="OUT.gguf", help="the file to write")
    parser.add_argument("type", nargs="?", metavar="TYPE", help="what to quantise to, such as Q4_0 or Q4_K_M")
    add_hub_arguments(parser)
    parser.add_argument(
        "--target",
        default="native",
        choices=["native", *TARGETS],
        metavar="TARGET",
        help=f"the machine whose kernels it is for: native (this one, the default), {', '.join(TARGETS)}",
    )
    parser.add_argument("--imatrix", metavar="FILE", help="importance of inputs, from llama-imatrix, for quantising")
    parser.add_argument(
        "--neuron-major",
        action="store_true",
        help="store the down matrices transposed, for models with ReLU, whose zero activations then need not be read",
    )
    parser.add_argument(
        "--allow-requantize", action="store_true", help="quantise what is quantised already: it loses quality twice"
    )
    parser.add_argument(
        "--pre-tokenizer",
        metavar="NAME",
        help="of a folder whose tokenizer is not known: llama.cpp's name of how it cuts text into words",
    )
    parser.add_argument("--check-tensors", action="store_true", help="refuse weights that are no numbers")
    parser.add_argument(
        "--split-max-size", metavar="SIZE", help="write shards of at most this size, such as 5G or 4GiB"
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="for quantising (default: all)")
    add_output_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of commands that write a large file."""
    parser.add_argument("--force", action="store_true", help="replace the file if it is there, and start anew")
    parser.add_argument("--resume", action="store_true", help="continue what was broken off, from its .part")


def run(
    *,
    json: bool,
    source: str | None,
    out: str | None,
    type: str | None,
    hf_repo: str | None,
    hf_file: str | None,
    split_max_size: str | None,
    **options: Any,
) -> int:
    """Runs `convert` for the command line and returns the exit code."""
    names = [name for name in (source, out, type) if name is not None]
    if hf_repo is not None:  # it takes the place of the first name
        names.insert(0, "")
    elif hf_file is not None:
        raise OptionError("--hf-file names a file in a repository: give that with -hf USER/REPO")
    if not 2 <= len(names) <= 3:
        raise OptionError("expected SOURCE OUT.gguf [TYPE], or -hf USER/REPO OUT.gguf [TYPE]")
    path = _from_hub(hf_repo, hf_file) if hf_repo is not None else Path(names[0])
    split_max_bytes = parse_size(split_max_size) if split_max_size is not None else None
    result = convert_model(path, *names[1:], split_max_bytes=split_max_bytes, **options)
    if json:
        print_json(as_json(result))
        return 0
    if isinstance(result, ConversionPlan):
        _print_plan(result)
        return 0
    for note in result.plan.notes:
        print(f"note: {note}")
    print(_result(result))
    return 0


def _from_hub(hf_repo: str, hf_file: str | None) -> Path:
    """A GGUF of the repository, or, where it has none, the folder of its safetensors."""
    repo, _, quant = hf_repo.partition(":")
    files = _hub.list_files(repo)
    if hf_file is not None or quant or any(file.endswith(".gguf") for file in files):
        return locate(None, hf_repo, hf_file)
    wanted = [file for file in files if "/" not in file and file.endswith(_SAFETENSORS)]
    if not any(file.endswith(".safetensors") for file in wanted):
        raise OptionError(f"-hf {repo}: has neither GGUF nor safetensors files")
    return _hub.download(repo, wanted)[0].parent


def _result(result: Conversion) -> str:
    target = result.plan.target
    return f"{written(result.paths, result.size_bytes, result.seconds)}: {result.records} records for {target}"


def _print_plan(plan: ConversionPlan) -> None:
    becomes = f", quantised to {plan.type}" if plan.type else ", types kept"
    print(f"{os.fspath(plan.source)} ({plan.architecture}){becomes}, laid for {plan.target}")
    print()
    print_columns(_parts(plan), right=[3, 4], indent=2)
    print()
    print_columns(_sizes(plan), right=[1])
    for note in plan.notes:
        print(f"note: {note}")


def _parts(plan: ConversionPlan) -> Iterator[tuple[str, ...]]:
    for part in plan.parts:
        yield (
            part.matrix,
            part.type,
            part.form,
            format_size(part.bytes),
            f"{part.bits_per_weight:.2f}",
            "bits per weight",
        )
    yield "padding", "", "", format_size(plan.padding_bytes)
    yield "records", "", "", format_size(plan.record_bytes), f"{plan.bits_per_weight:.2f}", "bits per weight"


def _sizes(plan: ConversionPlan) -> Iterator[tuple[str, ...]]:
    shards = f"in {len(plan.paths)} shards" if len(plan.paths) > 1 else ""
    yield "experts", str(plan.records), f"{format_size(plan.record_bytes / plan.records)} each, on average"
    yield "dense part", format_size(plan.dense_bytes)
    yield "to write", format_size(plan.final_bytes), shards
    if plan.temporary_bytes:
        yield "on the way", format_size(plan.temporary_bytes), "beside it, deleted at the end"
    enough = plan.free_bytes >= plan.final_bytes + plan.temporary_bytes
    yield "free", format_size(plan.free_bytes), "" if enough else "which is not enough"
