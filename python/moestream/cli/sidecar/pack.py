"""Make a sidecar of trained heads and a LoRA adapter.

Heads are safetensors: layers.N.fc1.weight, .fc2.weight and .linear_init.weight.
A LoRA is an adapter GGUF, a PEFT folder, or safetensors of <module>.lora_A and
.lora_B. Every tensor is taken or refused by name.

  moestream sidecar pack -m MODEL.gguf --heads heads.safetensors \\
      --lora adapter -o MODEL.sidecar.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ...memory import format_size

_TYPES = ("Q8_0", "Q4_0", "F16", "F32")


def run(*, output: str, provenance: str | None, quality: str | None, **options: Any) -> int:
    """Runs `moestream.sidecar.pack` for the command line and returns the exit code."""
    from ...sidecar import pack

    about = {"provenance": _json("--provenance", provenance), "quality": _json("--quality", quality)}
    sidecar = pack(output=output, **about, **options)
    held = []
    if sidecar.heads is not None:
        held.append(f"{len(sidecar.heads.heads)} heads")
    if sidecar.lora is not None:
        held.append(f"a LoRA of {len(sidecar.lora.pairs)} matrices")
    print(f"{output}: {' and '.join(held)} for {sidecar.base.name}, {format_size(Path(output).stat().st_size)}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `pack`."""
    parser.add_argument("-m", "--model", metavar="BASE", required=True, help="the model that they were trained for")
    parser.add_argument("--heads", metavar="FILE", help="safetensors of heads")
    parser.add_argument("--lora", metavar="FILE", help="an adapter GGUF, a PEFT folder, or safetensors")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the sidecar to write")
    parser.add_argument(
        "--type", choices=_TYPES, default="Q8_0", metavar="TYPE", help=f"of heads: {', '.join(_TYPES)} (default: Q8_0)"
    )
    parser.add_argument("--alpha", type=float, metavar="N", help="of a LoRA whose file does not say it")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts a token that the heads were trained with")
    parser.add_argument("--provenance", metavar="FILE", help="a JSON object to keep: data, seeds, steps, licences")
    parser.add_argument("--quality", metavar="FILE", help="a JSON object to keep: what was measured")
    parser.add_argument("--force", action="store_true", help="replace the output if it is there")


def _json(option: str, path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise OptionError(f"{option} {path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise OptionError(f"{option} {path}: is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise OptionError(f"{option} {path}: is no JSON object")
    return value
