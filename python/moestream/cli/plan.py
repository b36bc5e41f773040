"""Tell whether a model will run well on this machine, before it is downloaded.

Only headers are read, also of a model on the Hugging Face Hub. How fast this
machine is has been measured by `moestream probe`; how often an expert is found
in memory is replayed from a routing (--trace, or one made up with published
locality).

  found    experts in memory when a token wants them
  hidden   experts that could be read while a layer's attention is computed;
           they are where a router knows before it (SmallThinker)
  bubble   what a layer still waits then, with the cache of the verdict

  moestream plan MODEL.gguf --memory 8GiB
  moestream plan -hf user/repo:Q4_K_M
  moestream plan qwen3-30b-a3b --disk 3.5G --memory-bandwidth 50G
  moestream plan --layers 48 --experts 128 --top-k 8 --d-model 2048 \\
      --expert-ff 768
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..memory import format_size
from ._model import add_hub_arguments
from ._output import print_columns, print_json

if TYPE_CHECKING:
    from .. import Forecast, Plan

_WIDTH = 96
_SHAPE = ("model", "hf_repo", "hf_file", "layers", "experts", "top_k", "d_model", "expert_ff", "type", "heads", "kv_heads",
          "head_dim", "vocab", "dense_bytes")  # fmt: skip


def run(*, json: bool, **options: Any) -> int:
    """Runs `moestream.plan` for the command line and returns the exit code."""
    from .. import model_shape, plan

    shape = model_shape(**{name: options.pop(name) for name in _SHAPE})
    found = plan(shape, **options)
    if json:
        print_json(found.as_dict())
        return 0
    print(f"{shape.name} ({shape.architecture})" if shape.architecture else shape.name)
    print_columns(_wrapped(_facts(found)), indent=2)
    print()
    rows = list(_curve(found))
    print_columns(rows, right=range(len(rows[0]) - 1))
    print()
    print_columns(_contexts(found), right=range(7))
    print()
    for sentence in found.verdict:
        print(textwrap.fill(sentence, _WIDTH))
    if found.notes:
        print()
    for note in found.notes:
        print(textwrap.fill(f"note: {note}", _WIDTH, subsequent_indent="      "))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plan`."""
    from ..planner.planning import CONTEXT, DEPTH
    from ..planner.shape import PRESETS

    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"the GGUF file, or the first of a split set, or one of {', '.join(PRESETS)}",
    )
    add_hub_arguments(parser, "only the bytes of its header are read")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--memory", metavar="SIZE", help="that may be taken (default: what is available)")
    machine.add_argument(
        "--disk", metavar="BYTES", help="the most it reads in a second, like 3.5G (default: as measured)"
    )
    machine.add_argument("--probe", metavar="FILE", help="what `moestream probe` measured, here or elsewhere")
    machine.add_argument(
        "--memory-bandwidth", metavar="BYTES", help="in place of a probe, with --disk: the processor is then assumed"
    )
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument("--cache", metavar="SIZE|SHARE%", help="only this one, like 3GiB or 30%%")
    wanted.add_argument(
        "-c", "--context", type=int, default=CONTEXT, metavar="N", help="tokens to have room for (default: %(default)s)"
    )
    wanted.add_argument(
        "-d",
        "--depth",
        type=int,
        default=DEPTH,
        metavar="N",
        help="of these, before those whose speed is told (default: %(default)s)",
    )
    wanted.add_argument("--trace", metavar="FILE", help="a routing of this model (moestream trace record)")
    sizes = parser.add_argument_group("a model's sizes, without a file")
    for name, help in (
        ("layers", "layers"),
        ("experts", "experts in each"),
        ("top-k", "of these, used for a token"),
        ("d-model", "length of the hidden state"),
        ("expert-ff", "feed-forward length of an expert"),
        ("heads", "attention heads"),
        ("kv-heads", "of keys and values"),
        ("head-dim", "length of a head"),
        ("vocab", "tokens"),
        ("dense-bytes", "size of all that is not experts"),
    ):
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=help)
    sizes.add_argument("--type", metavar="TYPE", help="quantisation (default: Q4_0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _wrapped(facts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in facts:
        for line in textwrap.wrap(value, _WIDTH - 12):
            yield name, line
            name = ""


def _facts(found: Plan) -> Iterator[tuple[str, str]]:
    shape, memory = found.shape, found.memory
    yield "from", shape.origin
    with_experts = "" if shape.moe_layers == shape.layers else f", {shape.moe_layers} of them with experts"
    yield (
        "model",
        f"{shape.layers} layers{with_experts}; {shape.top_k} of {shape.experts} experts of {format_size(shape.expert_bytes)} used",
    )
    yield (
        "on disk",
        f"{format_size(shape.bytes_on_disk)}: {format_size(shape.all_expert_bytes)} of experts, {format_size(shape.dense_bytes)} dense",
    )
    yield (
        "in memory",
        f"{format_size(memory.dense_bytes)} dense + {format_size(memory.kv_bytes)} for {found.context:,} tokens + "
        f"{format_size(memory.buffer_bytes)} buffers + cache",
    )
    yield (
        "available",
        f"{format_size(memory.available_bytes)}; the smallest cache is {format_size(shape.minimum_cache_bytes)}",
    )
    yield "machine", found.machine
    yield "disk", f"{found.disk / 1e9:.3g} GB/s with this model's reads"
    if found.chosen:
        yield "computing", f"{found.chosen.compute_s * 1e3:.1f} ms a token, after {found.depth:,} others"
    yield "routing", found.routing


def _curve(found: Plan) -> Iterator[list[str]]:
    yield ["cache", "size", "resident", "found", "read/token", "reading", "waiting", "tok/s", "low-high", ""]
    rows = [list(row) for row in found.caches]
    chosen = found.chosen
    if chosen is not None and all(row is not chosen for _, row in rows):
        rows = sorted([*rows, [chosen.cache_share, chosen]], key=lambda row: row[0])
    for share, row in rows:
        if row is None:
            yield [f"{share:.0%}", *["-"] * 8, "too small"]
        else:
            yield _cells(found, row)


def _cells(found: Plan, row: Forecast) -> list[str]:
    from ..planner.verdict import span

    about = (
        "does not fit"
        if not found.fits(row)
        else "recommended"
        if row is found.chosen and len(found.caches) > 1
        else ""
    )
    return [
        f"{row.cache_share:.0%}",
        format_size(row.cache_bytes),
        format_size(found.memory.resident_bytes(row.cache_bytes)),
        f"{row.hit_rate:.1%}",
        format_size(row.read_bytes),
        f"{row.read_s * 1e3:.1f} ms",
        f"{row.wait_s * 1e3:.1f} ms",
        f"{row.tokens_per_s:.3g}",
        span(row),
        about,
    ]


def _contexts(found: Plan) -> Iterator[list[str]]:
    yield ["context", "KV cache", "attention/layer", "hidden", "bubble/layer", "nothing cached", "tok/s"]
    for row in found.contexts:
        yield [
            f"{row.context:,}",
            format_size(row.kv_bytes),
            f"{row.attention_s * 1e3:.2f} ms",
            f"{min(row.hidden, found.shape.top_k)} of {found.shape.top_k}",
            f"{row.bubble_s * 1e3:.2f} ms",
            f"{row.wait_s * 1e3:.2f} ms",
            f"{row.tokens_per_s:.3g}" if row.tokens_per_s else "-",
        ]
