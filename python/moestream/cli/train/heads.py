"""Train heads on captured data: phase 1.

A head of layer N says at a token which experts layer N + 1 will take at the
next. Told are, of the experts then taken, how many were among as many
predicted (recall) and for how many tokens all were (exact): by the head; by
the router of N + 1 on layer N's state at the next token, which a head does not
know (lookahead); by the token before (repeat); and by what a head begins as.
Heads that find, beyond chance, less than --keep of what the best finds are
left out, unless --owners names layers. OUT.heads.json and OUT.heads.png are
the curves.

  moestream train heads -m MODEL.gguf -d data -o MODEL.sidecar.gguf
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..._threads import default_threads
from ...train.plans import HeadPlan
from .._interrupt import INTERRUPTED, Interrupt
from .._model import add_model_arguments, locate
from .._output import Progress, print_columns, print_json, require_writable
from .._written import as_json
from ._texts import layers, require_packages

if TYPE_CHECKING:
    from ...train.heads import HeadsResult


def heads(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    owners: str | None = None,
    keep: float = 0.5,
    type: str = "Q8_0",
    width: int | None = None,
    steps: int = HeadPlan.steps,
    batch: int = HeadPlan.batch,
    learning_rate: float = HeadPlan.learning_rate,
    validate_every: int = HeadPlan.validate_every,
    patience: int = HeadPlan.patience,
    seed: int = HeadPlan.seed,
    threads: int | None = None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> HeadsResult:
    """Trains heads; what `moestream train heads` does, with the long names of its options.

    Args:
        model: The GGUF that was captured. By default the one that ships with the package.
        hf_repo, hf_file: As in `moestream generate`.
        data: The folder of captured data.
        output: The sidecar to write.
        owners: Layers whose heads are trained and kept, like "6-38".
        keep, on_validation, progress, should_stop: As in `moestream.train.heads.train_heads`.
        type: Of the heads in the sidecar: Q8_0, Q4_0, F16 or F32.
        width, steps, batch, learning_rate, validate_every, patience, seed: As in `moestream.train.heads.HeadPlan`.
        threads: By default one per physical core this process may use.

    Raises:
        MoestreamError: The options, the data or the model are no good.
        moestream.train.heads.Interrupted: `should_stop` said so.
    """
    require_packages("torch", "matplotlib")
    from ...train.heads import train_heads

    plan = HeadPlan(
        width=width,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        validate_every=validate_every,
        patience=patience,
        seed=seed,
        threads=default_threads() if threads is None else threads,
    )
    return train_heads(
        data,
        locate(model, hf_repo, hf_file),
        output,
        plan=plan,
        owners=layers(owners),
        keep=keep,
        kind=type,
        on_validation=on_validation,
        progress=progress,
        should_stop=should_stop,
    )


def run(*, json: bool, output: str, **options: Any) -> int:
    """Runs `heads` for the command line and returns the exit code."""
    require_writable(output)
    try:
        with Interrupt() as interrupt, Progress(interrupt.requested) as progress:
            result = heads(
                **options,
                output=output,
                on_validation=progress.validated,
                progress=lambda done, total: progress.show("training", done, total, unit="steps"),
                should_stop=interrupt.requested,
            )
    except KeyboardInterrupt as stop:
        print(f"moestream: {stop or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    if json:
        print_json({**as_json(result), "output": output})
        return 0
    print_columns(_table(result), right=range(1, 10))
    kept = [owner.layer for owner in result.owners if owner.kept]
    print(
        f"\n{result.steps} steps on {result.train_tokens:,} tokens in {result.history.seconds:.0f} s; measured on {result.validation_tokens:,}"
    )
    print(f"{output}: heads of layers {', '.join(map(str, kept))}; curves: {result.picture}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heads`."""
    add_model_arguments(parser)
    parser.add_argument(
        "-d", "--data", metavar="DATA", required=True, help="the folder that `moestream train capture` made"
    )
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the sidecar to write")
    parser.add_argument(
        "--owners",
        metavar="LAYERS",
        help="layers to train heads of, and to keep, like 6-38 (default: all, and --keep decides)",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the best head's finds that one must find (default: %(default)s)",
    )
    parser.add_argument(
        "--type",
        choices=("Q8_0", "Q4_0", "F16", "F32"),
        default="Q8_0",
        help="of the heads in the sidecar (default: %(default)s)",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--width", type=int, metavar="N", help="of the hidden layer (default: a quarter of the state's, 32 at least)"
    )
    training.add_argument(
        "--steps", type=int, default=HeadPlan.steps, metavar="N", help="at most (default: %(default)s)"
    )
    training.add_argument(
        "--batch", type=int, default=HeadPlan.batch, metavar="N", help="tokens a step (default: %(default)s)"
    )
    training.add_argument(
        "--learning-rate",
        type=float,
        default=HeadPlan.learning_rate,
        metavar="X",
        help="at its highest (default: %(default)s)",
    )
    training.add_argument(
        "--validate-every", type=int, default=HeadPlan.validate_every, metavar="N", help="steps from one to the next (default: %(default)s)"
    )
    training.add_argument(
        "--patience",
        type=int,
        default=HeadPlan.patience,
        metavar="N",
        help="validations without progress, then training ends (default: %(default)s)",
    )
    training.add_argument("-s", "--seed", type=int, default=HeadPlan.seed, metavar="N", help="of all that is drawn (default: %(default)s)")
    training.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _table(result: HeadsResult) -> Iterator[tuple[str, ...]]:
    yield ("layer", "loss", "recall", "exact", "lookahead", "exact", "repeat", "exact", "untrained", "exact", "")
    for owner in result.owners:
        shares = (
            *(owner.recall, owner.exact, owner.lookahead_recall, owner.lookahead_exact),
            *(owner.repeat_recall, owner.repeat_exact, owner.untrained_recall, owner.untrained_exact),
        )
        told = ("-" if share is None else f"{share:.1%}" for share in shares)
        yield (str(owner.layer), f"{owner.loss:.3f}", *told, "" if owner.kept else "left out")
