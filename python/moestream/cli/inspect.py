"""Show what a GGUF model holds and how much cache its experts want.

Only headers are read; the advice is for this machine as it is now.

  moestream inspect MODEL.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import memory
from .._engine import MARGIN, auto_cache_bytes
from ..memory import format_size
from ._model import add_hub_arguments, locate
from ._output import print_columns, print_json

if TYPE_CHECKING:
    from .. import ExpertMatrix, ModelDescription, MoeLayer

_CONTEXT_ALLOWANCE_BYTES = 512 * 2**20
_WIDTH = 96


@dataclass(frozen=True)
class CacheAdvice:
    """How much memory a model's experts want, and how much of it there is.

    Attributes:
        available_bytes: Memory that this process may take now.
        minimum_bytes: The smallest cache that works: it holds the experts of one token.
        recommended_bytes: All experts, or what the dense part, an allowance for the KV cache and compute buffers, and a
            margin leave of the available memory. May be less than the minimum: then the model does not fit.
        cached_share: Share of the experts that the recommended cache holds, 0 to 1.
    """

    available_bytes: int
    minimum_bytes: int
    recommended_bytes: int
    cached_share: float

    @property
    def fits(self) -> bool:
        return self.recommended_bytes >= self.minimum_bytes


def advise(description: ModelDescription, available_bytes: int) -> CacheAdvice:
    """The cache to give a model on a machine with `available_bytes` of free memory."""
    recommended = auto_cache_bytes(
        available=available_bytes,
        untouched=description.dense_bytes + _CONTEXT_ALLOWANCE_BYTES,
        maximum=description.maximum_cache_bytes,
    )
    return CacheAdvice(
        available_bytes=available_bytes,
        minimum_bytes=description.minimum_cache_bytes,
        recommended_bytes=recommended,
        cached_share=recommended / description.maximum_cache_bytes,
    )


def inspect(
    *, model: str | os.PathLike[str] | None = None, hf_repo: str | None = None, hf_file: str | None = None
) -> tuple[ModelDescription, CacheAdvice]:
    """What a model holds, and the cache to give it on this machine; what `moestream inspect` prints.

    Args:
        model: A GGUF file. By default the one that ships with the package.
        hf_repo: Instead of `model`, "user/repo" or "user/repo:quant" on the Hugging Face Hub.
        hf_file: The file in that repository.

    Raises:
        ModelError: The file is no sound GGUF model.
    """
    from .. import describe

    description = describe(locate(model, hf_repo, hf_file))
    return description, advise(description, memory.available_bytes())


def run(*, json: bool, layers: bool, **options: Any) -> int:
    """Runs `inspect` for the command line and returns the exit code."""
    description, advice = inspect(**options)
    if json:
        print_json(_as_json(description, advice))
        return 0
    print(f"{description.name} ({description.architecture})" if description.name else description.architecture)
    print_columns(_files(description), right=[1], indent=2)
    print()
    print(shape(description))
    print(_layout(description))
    if (beside := Path(description.path).with_suffix(".sidecar.gguf")).is_file():
        print(f"a sidecar lies beside it: {beside.name}; moestream sidecar inspect tells what it holds")
    if layers:
        print()
        print_columns(_every_layer(description.moe_layers), right=[0, 1, -2, -1])
    else:
        for numbers, matrices in _kinds_of_layers(description.moe_layers):
            heading = f"One expert of layer{'s' if len(numbers) > 1 else ''} {layer_ranges(numbers)}"
            print()
            print(textwrap.fill(heading, _WIDTH, subsequent_indent="  "))
            print_columns(_matrices(matrices), right=[3], indent=2)
    print()
    print_columns(_sizes(description), right=[1])
    print()
    print_columns(_cache(advice), right=[1])
    print()
    print(_verdict(description, advice))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `inspect`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="the GGUF file, or the first of a split set (default: the model shipped with the package)",
    )
    add_hub_arguments(parser)
    parser.add_argument("--layers", action="store_true", help="one line per layer, equal layers not summed up")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def shape(description: ModelDescription) -> str:
    """How many layers and experts a model has, in a sentence."""
    moe_layers = description.moe_layers
    which = "all" if len(moe_layers) == description.layers else str(len(moe_layers))
    counts = " or ".join(str(count) for count in sorted({layer.experts for layer in moe_layers}))
    used = description.experts_used
    return f"{description.layers} layers, {which} with experts: {counts} in each, {used} used for a token"


def _layout(description: ModelDescription) -> str:
    """How an expert's bytes lie on the disk, in a sentence."""
    if not description.laid:
        matrices = max(len(layer.matrices) for layer in description.moe_layers)
        return f"stock layout: a missing expert is {matrices} reads; moestream convert makes it one"
    forms = dict.fromkeys(matrix.form for layer in description.moe_layers for matrix in layer.matrices)
    return f"laid: a missing expert is one read; rows are {', '.join(forms)}"


def layer_ranges(layers: Sequence[int]) -> str:
    """Layer numbers in short: [0, 1, 2, 5, 6, 9] is "0-2, 5-6, 9"."""
    ranges = []
    for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        ranges.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(ranges)


def _files(description: ModelDescription) -> Iterator[tuple[str, str]]:
    for file in description.files:
        yield Path(file.path).name, format_size(file.size_bytes)


def _kinds_of_layers(moe_layers: Sequence[MoeLayer]) -> Iterator[tuple[list[int], Sequence[ExpertMatrix]]]:
    """The numbers of the layers whose experts are of one size and type, with the matrices of one such expert."""
    kinds: dict[Sequence[ExpertMatrix], list[int]] = {}
    for layer in moe_layers:
        matrices = tuple(dataclasses.replace(matrix, name=_name_in_layer(matrix)) for matrix in layer.matrices)
        kinds.setdefault(matrices, []).append(layer.layer)
    for matrices, numbers in kinds.items():
        yield numbers, matrices


def _name_in_layer(matrix: ExpertMatrix) -> str:
    """ "ffn_up_exps" of "blk.7.ffn_up_exps.weight"."""
    return re.sub(r"^blk\.\d+\.|\.weight$", "", matrix.name)


def _matrices(matrices: Sequence[ExpertMatrix]) -> Iterator[tuple[str, ...]]:
    for matrix in matrices:
        form = matrix.form if matrix.form != "plain" else ""
        yield matrix.name, matrix.type, f"{matrix.columns} x {matrix.rows}", format_size(matrix.slice_bytes), form
    if len(matrices) > 1:
        yield "together", "", "", format_size(sum(matrix.slice_bytes for matrix in matrices)), ""


def _every_layer(moe_layers: Sequence[MoeLayer]) -> Iterator[tuple[str, ...]]:
    names = list(dict.fromkeys(_name_in_layer(matrix) for layer in moe_layers for matrix in layer.matrices))
    yield "layer", "experts", *names, "one expert", "all experts"
    for layer in moe_layers:
        types = {_name_in_layer(matrix): matrix.type for matrix in layer.matrices}
        yield (
            str(layer.layer),
            str(layer.experts),
            *(types.get(name, "-") for name in names),
            format_size(layer.expert_bytes),
            format_size(layer.expert_bytes * layer.experts),
        )


def _sizes(description: ModelDescription) -> Iterator[tuple[str, ...]]:
    types = sorted(description.types.items(), key=lambda item: -item[1])
    in_types = ", ".join(f"{name} {format_size(size)}" for name, size in types) if len(types) > 1 else types[0][0]
    yield "on disk", format_size(description.bytes_on_disk)
    yield "dense part", format_size(description.dense_bytes), "always in memory"
    yield "experts", format_size(description.expert_bytes), f"cached in memory; {in_types}"


def _cache(advice: CacheAdvice) -> Iterator[tuple[str, ...]]:
    yield "memory available", format_size(advice.available_bytes)
    yield "smallest cache", format_size(advice.minimum_bytes), "the experts of one token"
    if advice.fits:
        yield (
            "recommended cache",
            format_size(advice.recommended_bytes),
            f"{_percent(advice.cached_share)} of the experts",
        )


def _verdict(description: ModelDescription, advice: CacheAdvice) -> str:
    if not advice.fits:
        wanted = description.dense_bytes + _CONTEXT_ALLOWANCE_BYTES + advice.minimum_bytes / (1 - MARGIN)
        return (
            f"Too large for this machine now: with the smallest cache it wants {format_size(int(wanted))} of memory,\n"
            f"of which {format_size(_CONTEXT_ALLOWANCE_BYTES)} for a context."
        )
    if advice.cached_share == 1:
        return "All experts fit: each is read from the disk once."
    return f"{_percent(advice.cached_share)} of the experts fit: the others are read when a token wants them."


def _percent(share: float) -> str:
    """A share as a whole percentage, rounded down: what is not all is never 100%."""
    return f"{math.floor(share * 100)}%"


def _as_json(description: ModelDescription, advice: CacheAdvice) -> dict[str, Any]:
    value = dataclasses.asdict(description)
    value["path"] = str(description.path)
    for file in value["files"]:
        file["path"] = str(file["path"])
    for layer, described in zip(value["moe_layers"], description.moe_layers, strict=True):
        layer["expert_bytes"] = described.expert_bytes
    return {**value, "types": description.types, "cache": {**dataclasses.asdict(advice), "fits": advice.fits}}
