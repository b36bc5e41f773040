"""What `moestream train sft` and `distill` have in common: options, progress, and what is printed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..._threads import default_threads
from ...train.plans import LoraPlan
from .._interrupt import INTERRUPTED, Interrupt
from .._model import add_model_arguments, locate
from .._output import Progress, print_columns, print_json, require_writable
from .._written import as_json
from ._texts import read_texts, require_packages, tokenised

if TYPE_CHECKING:
    from ...train.recovery import LoraResult

_PLAN = (
    ("steps", int, "at most"),
    ("batch", int, "texts a step"),
    ("prompt_tokens", int, "of each text, by the gate"),
    ("new_tokens", int, "of each text, written"),
    ("texts", int, "that the teacher writes, or that prompts are drawn for; an eighth is for validation"),
    ("temperature", float, "of writing; 0: greedy"),
    ("top_p", float, "of writing; 1: off"),
    ("rank", int, "of a new LoRA"),
    ("alpha", float, "of a new LoRA"),
    ("top_k", int, "distill: tokens of the teacher that are compared one by one"),
    ("learning_rate", float, "at its highest"),
    ("validate_every", int, "steps from one to the next"),
    ("patience", int, "validations without progress, then training ends"),
    ("seed", int, "of all that is drawn"),
)


def train(
    phase: str,
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    hf: str | os.PathLike[str],
    sidecar: str | os.PathLike[str],
    file: Sequence[str | os.PathLike[str]],
    validation: Sequence[str | os.PathLike[str]] | None = None,
    output: str | os.PathLike[str],
    experts_used: int | None = None,
    threads: int | None = None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
    **plan: Any,
) -> LoraResult:
    """What `moestream train sft` and `distill` do, with the long names of their options.

    Args:
        phase: "sft" or "distill".
        model: The GGUF that the sidecar is for. By default the one that ships with the package.
        hf_repo, hf_file: As in `moestream generate`.
        hf: A folder of the model's Hugging Face weights.
        file, validation: Files of text, or of token ids (`.npy`).
        output: The sidecar to write.
        threads: By default one per physical core this process may use.
        sidecar, experts_used, on_validation, progress, should_stop: As in `moestream.train.sft.train_sft`.
        plan: As in `moestream.train.LoraPlan`.

    Raises:
        MoestreamError: The options or the files are no good, or do not belong together.
        moestream.train.recovery.Interrupted: `should_stop` said so.
    """
    require_packages("torch", "transformers", "matplotlib")
    from ...train.distill import train_distill
    from ...train.sft import train_sft

    options = LoraPlan(**plan, threads=default_threads() if threads is None else threads)
    texts = tokenised(read_texts(file), hf)
    held = None if not validation else tokenised(read_texts(validation), hf)
    function = {"sft": train_sft, "distill": train_distill}[phase]
    path = locate(model, hf_repo, hf_file)
    return function(
        hf,
        path,
        sidecar,
        texts,
        output,
        plan=options,
        validation=held,
        experts_used=experts_used,
        on_validation=on_validation,
        progress=progress,
        should_stop=should_stop,
    )


def show(phase: str, *, json: bool, output: str, **options: Any) -> int:
    """Runs a phase, prints what came of it, and returns the exit code."""
    require_writable(output)
    try:
        with Interrupt() as interrupt, Progress(interrupt.requested) as progress:
            names = {"teacher": ("the teacher writes", "texts"), "training": ("training", "steps")}

            def told(what: str, done: int, total: int) -> None:
                name, unit = names[what]
                progress.show(name, done, total, unit=unit)

            result = train(
                phase,
                **options,
                output=output,
                on_validation=progress.validated,
                progress=told,
                should_stop=interrupt.requested,
            )
    except KeyboardInterrupt as stop:
        print(f"moestream: {stop or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    if json:
        print_json({**as_json(result), "output": output})
        return 0
    if result.after is not None:
        print_columns(_table(result), right=(1, 2))
        print()
    first, last = result.history.validation[0][1], min(loss for _, loss in result.history.validation)
    print(
        f"{result.steps} steps in {result.history.seconds:.0f} s; loss on what was held out {first:.4f}, then {last:.4f} at best"
    )
    print(f"{output}: heads and a LoRA; curves: {result.picture}")
    return 0


def _table(result: LoraResult) -> Iterator[tuple[str, ...]]:
    yield ("on validation texts", "perplexity", "KL to the teacher")
    assert result.after is not None
    yield ("teacher", f"{result.after.teacher_perplexity:.3f}", "")
    rows = (
        ("by the gates", result.gate),
        ("by the heads", result.without),
        ("with the LoRA before", result.before),
        ("with the LoRA now", result.after),
    )
    for name, one in rows:
        if one is not None:
            yield (name, f"{one.perplexity:.3f}", f"{one.kl:.4f}")


def add_recovery_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a phase."""
    add_model_arguments(parser)
    parser.add_argument(
        "--hf", metavar="DIR", required=True, help="Hugging Face weights of the same model: the teacher"
    )
    parser.add_argument("--sidecar", metavar="FILE", required=True, help="the sidecar to go on from; it has heads")
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        action="append",
        required=True,
        help="text, or token ids (.npy), that prompts are drawn from; may be given several times",
    )
    parser.add_argument(
        "--validation",
        metavar="FILE",
        action="append",
        help="text to measure perplexity and divergence on, before and after",
    )
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the sidecar to write")
    parser.add_argument(
        "--experts-used",
        type=int,
        metavar="K",
        help="experts that a token of the student takes in each layer (default: the model's own)",
    )
    training = parser.add_argument_group("training")
    for name, kind, what in _PLAN:
        training.add_argument(
            *(("-s",) if name == "seed" else ()),
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(LoraPlan, name),
            metavar="X" if kind is float else "N",
            help=f"{what} (default: %(default)s)",
        )
    training.add_argument(
        "--soft-targets", action="store_true", help="sft: learn the teacher's shares of all tokens, not only its token"
    )
    training.add_argument("--train-heads", action="store_true", help="train the heads too, by the same loss")
    training.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
