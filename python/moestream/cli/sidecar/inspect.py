"""Show what a sidecar holds, and whether it is for a model.

"a token reads" is what the heads read of their own weights for each token: of
the parts over experts only the rows of those that ran.

  moestream sidecar inspect MODEL.sidecar.gguf
  moestream sidecar inspect MODEL.sidecar.gguf -m MODEL.gguf

With -m the exit code is 1 if it is for another model.
"""

from __future__ import annotations

import argparse
import json as json_text
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...memory import format_size
from .._output import print_columns, print_json, printable
from ..inspect import layer_ranges

if TYPE_CHECKING:
    from ...sidecar import BaseModel, Heads, Lora, Sidecar

_LONGEST = 160  # of a record's text that is shown


@dataclass(frozen=True)
class Inspection:
    """A sidecar, and what it is to a model.

    Attributes:
        model: The model that was asked about.
        misfit: Why it is not for it; "" if it is.
    """

    sidecar: Sidecar
    model: BaseModel | None
    misfit: str


def inspect(*, file: str | os.PathLike[str], model: str | os.PathLike[str] | None = None) -> Inspection:
    """What `moestream sidecar inspect` prints.

    Raises:
        SidecarError: `file` is no sidecar, or a damaged one.
        ModelError: `model` cannot be read.
    """
    from ...errors import SidecarError
    from ...sidecar import BaseModel, Sidecar, check_base

    sidecar = Sidecar.read(file)
    if model is None:
        return Inspection(sidecar, None, "")
    opened = BaseModel.open(model)
    try:
        check_base(sidecar, opened)
    except SidecarError as misfit:
        return Inspection(sidecar, opened, str(misfit))
    return Inspection(sidecar, opened, "")


def run(*, json: bool, **options: Any) -> int:
    """Runs `inspect` for the command line and returns the exit code."""
    inspection = inspect(**options)
    if json:
        print_json(_as_json(inspection))
    else:
        _print(inspection)
    return 1 if inspection.misfit else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `inspect`."""
    parser.add_argument("file", metavar="FILE", help="the sidecar")
    parser.add_argument("-m", "--model", metavar="BASE", help="tell whether it is for this model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _print(inspection: Inspection) -> None:
    sidecar = inspection.sidecar
    print(printable(f"sidecar for {sidecar.base.name} ({sidecar.base.architecture})"))
    print_columns(_facts(inspection), indent=2)


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    sidecar = inspection.sidecar
    yield "base", f"{sidecar.base.hash[:16]} (start of its hash)"
    if inspection.model is not None:
        yield "fits", f"no: {inspection.misfit}" if inspection.misfit else f"yes: {inspection.model.path}"
    if (heads := sidecar.heads) is not None:
        yield (
            "heads",
            f"{len(heads.heads)}, of layers {layer_ranges(heads.owners)}; each predicts the next layer's experts",
        )
        yield (
            "",
            f"width {heads.width} over {heads.columns} columns and {heads.experts} experts, trained with {heads.top_k} used",
        )
        yield (
            "",
            f"{_types(heads)}, {format_size(heads.size_bytes)}; a token reads {format_size(heads.bytes_per_token())}",
        )
    if (lora := sidecar.lora) is not None:
        yield (
            "LoRA",
            f"rank {_ranks(lora)}, alpha {lora.alpha:g}; {len(lora.pairs)} matrices, {format_size(lora.size_bytes)}",
        )
        for kind, layers in _targets(lora).items():
            yield "", f"{kind}{' in layers ' + layer_ranges(layers) if layers else ''}"
    yield "made", f"by {sidecar.tool}"
    for name in ("provenance", "quality"):
        for key, value in getattr(sidecar, name).items():
            text = value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)
            yield name, f"{key}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ... (all of it: --json)'}"


def _types(heads: Heads) -> str:
    counted = Counter(matrix.type_name for head in heads.heads for _, matrix in head.parts())
    return " and ".join(counted)


def _ranks(lora: Lora) -> str:
    ranks = sorted({pair.rank for pair in lora.pairs.values()})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _targets(lora: Lora) -> Mapping[str, list[int]]:
    """Kinds of matrices, with the layers that each is in; none for those outside of layers."""
    kinds: dict[str, list[int]] = {}
    for name in lora.pairs:
        block = re.match(r"blk\.(\d+)\.", name)
        kind = name[block.end() :] if block else name
        kinds.setdefault(kind.removesuffix(".weight"), []).extend([int(block[1])] if block else [])
    return {kind: sorted(layers) for kind, layers in kinds.items()}


def _as_json(inspection: Inspection) -> dict[str, Any]:
    sidecar, model = inspection.sidecar, inspection.model
    heads, lora = sidecar.heads, sidecar.lora
    return {
        "file": str(sidecar.path),
        "base": {
            "hash": sidecar.base.hash,
            "name": sidecar.base.name,
            "architecture": sidecar.base.architecture,
        },
        "fits": None
        if model is None
        else {"model": str(model.path), "fits": not inspection.misfit, "reason": inspection.misfit},
        "heads": heads
        and {
            "owners": list(heads.owners),
            "width": heads.width,
            "experts": heads.experts,
            "columns": heads.columns,
            "top_k": heads.top_k,
            "size_bytes": heads.size_bytes,
            "bytes_per_token": heads.bytes_per_token(),
        },
        "lora": lora
        and {
            "alpha": lora.alpha,
            "rank": lora.rank,
            "tensors": list(lora.pairs),
            "size_bytes": lora.size_bytes,
        },
        "tensors": {name: {"type": matrix.type_name, "ne": list(matrix.ne)} for name, matrix in sidecar.matrices()},
        "tool": sidecar.tool,
        "provenance": dict(sidecar.provenance),
        "quality": dict(sidecar.quality),
    }
