"""From demo model B to the sidecar that ships with it: heads, a LoRA that recovers what they cost, and the record of both.

work/heads/data/                     states and routing of training text, 4 GB
work/heads/PHASE.sidecar.gguf        after each of `moestream train heads`, `sft` and `distill`, with its curves beside it
work/qwen3moe.sidecar.gguf           the last of them, with the record
work/qwen3moe-sidecar.png            losses of all phases

The teacher is the Hugging Face folder of tools/train_demo_model, the student its file in Q4_0. What is there is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import moestream
from moestream import ExpertStreaming
from moestream.errors import SidecarError
from moestream.sidecar import Sidecar
from moestream.train import Capture, HeadArrays, HeadPlan, LoraPlan, capture
from moestream.train._gguf import GgufWeights
from moestream.train.accuracy import overlap, predicted
from moestream.train.curves import History, curve_files
from moestream.train.distill import train_distill
from moestream.train.head_arrays import unpacked
from moestream.train.heads import train_heads
from moestream.train.sft import train_sft
from moestream.train.student import Measured, load_lora, load_model, measure

from . import facts, stream
from .config import ModelConfig
from .files import completed
from .release import Data, ReleaseError

KIND = "qwen3moe"
CONTEXT = ModelConfig(KIND).context
CAPTURED_TOKENS, DOCUMENT_TOKENS = 1_000_000, 2048
LEAST_TOKENS = 32
WINDOWS, WINDOW_TOKENS = 32, 256  # those of tools/figures
FEWER = 2  # experts a token
PHASES = ("heads", "sft", "distill")

HEADS = HeadPlan(width=192, steps=4000)
SFT = LoraPlan(
    texts=1536,
    steps=330,
    rank=32,
    alpha=64.0,
    learning_rate=3e-3,
    validate_every=66,
    soft_targets=True,
    train_heads=True,
)
DISTILL = LoraPlan(
    texts=1536, new_tokens=96, batch=16, steps=40, learning_rate=5e-4, validate_every=20, train_heads=True
)


def training_texts(data: Data, starts: npt.NDArray[np.int64], seed: int = 1) -> list[list[int]]:
    """Documents in an order that is drawn, each once, up to CAPTURED_TOKENS; of long ones the beginning.

    Args:
        starts: [documents + 1]: where each begins in `data.train`, and the end. Some documents are there several times.
    """
    texts: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    room = CAPTURED_TOKENS
    for i in np.random.default_rng(seed).permutation(len(starts) - 1):
        text = data.train[starts[i] : min(starts[i + 1], starts[i] + DOCUMENT_TOKENS)].tolist()
        if len(text) < LEAST_TOKENS or tuple(text[:64]) in seen:
            continue
        seen.add(tuple(text[:64]))
        texts.append(text)
        room -= len(text)
        if room <= 0:
            break
    return texts


def validation_windows(data: Data) -> npt.NDArray[np.int64]:
    """[WINDOWS, WINDOW_TOKENS + 1], from all over the validation text."""
    return facts.spread(stream.windows(data.validation, CONTEXT), WINDOWS)[:, : WINDOW_TOKENS + 1]


def train(data: Data, work: Path, threads: int) -> None:
    """All phases; each goes on from its checkpoint.

    Raises:
        ReleaseError: The demo model is not trained yet.
        MoestreamError: A phase fails.
    """
    model, folder, teacher = work / f"{KIND}-Q4_0.gguf", work / "heads", work / KIND
    if not model.exists() or not teacher.exists():
        raise ReleaseError(f"{work}: has no {KIND} yet; run tools/train_demo_model --work {work} first")
    folder.mkdir(exist_ok=True)
    texts = training_texts(data, np.load(work / "train-starts.npy"))
    windows = list(validation_windows(data).tolist())
    out = {phase: folder / f"{phase}.sidecar.gguf" for phase in PHASES}
    if not (folder / "data").exists():
        _capture(model, texts, folder / "data", "training text of the demo models")
    if not out["heads"].exists():
        train_heads(
            folder / "data",
            model,
            out["heads"],
            plan=dataclasses.replace(HEADS, threads=threads),
            provenance={"licences": licences(work)},
            progress=_progress("heads", "training"),
        )
    for phase, before, run, plan in (("sft", "heads", train_sft, SFT), ("distill", "sft", train_distill, DISTILL)):
        if not out[phase].exists():
            run(
                teacher,
                model,
                out[before],
                texts,
                out[phase],
                plan=dataclasses.replace(plan, threads=threads),
                validation=windows,
                progress=_progress(phase),
            )


def finish(data: Data, work: Path) -> Path:
    """Measures what each phase gave, and writes the sidecar with that record and the picture."""
    last = Sidecar.read(work / "heads" / f"{PHASES[-1]}.sidecar.gguf")
    record = measured(data, work)
    sidecar = work / f"{KIND}.sidecar.gguf"
    dataclasses.replace(last, quality={**last.quality, "record": record}).write(sidecar)
    draw(work)
    return sidecar


def ship(work: Path, package: Path) -> None:
    """Puts sidecar and picture into the package and has the card tell of them.

    Raises:
        ReleaseError: The model that ships is another one.
    """
    from . import card

    sidecar, model = work / f"{KIND}.sidecar.gguf", package / f"demo-{KIND}.gguf"
    try:
        found = moestream.sidecar.sidecar_for(model, sidecar)
    except SidecarError as error:
        raise ReleaseError(f"{error}; run tools/train_demo_model --work {work} --ship first") from error
    for source, target in (
        (sidecar, model.with_suffix(".sidecar.gguf")),
        (work / "heads" / "heads.sidecar.gguf", model.with_suffix(".heads.gguf")),
        (work / f"{KIND}-sidecar.png", package / "sidecar.png"),
    ):
        with completed(target) as part:
            part.write_bytes(source.read_bytes())
    readme = package / "README.md"
    with completed(readme) as part:
        part.write_text(card.with_sidecar(readme.read_text(), found), encoding="utf-8")


def licences(work: Path) -> dict[str, str]:
    """Of the text, by source."""
    manifest = json.loads((work / "corpus" / "manifest.json").read_text())
    return {source["name"]: source["licence"] for source in manifest["sources"]}


# Measuring


def measured(data: Data, work: Path) -> dict[str, Any]:
    """What heads predict on the validation text, and perplexity and divergence by what routes: for all owners and the late half.

    Perplexity is that of the student in PyTorch, decoded from each window's second token on.
    """
    model, folder, windows = work / f"{KIND}-Q4_0.gguf", work / "heads", validation_windows(data)
    after = {phase: Sidecar.read(folder / f"{phase}.sidecar.gguf") for phase in PHASES}
    teacher, trained = load_model(work / KIND), {phase: _heads(sidecar) for phase, sidecar in after.items()}
    weights, owners = GgufWeights(model), list(trained["heads"])
    untrained = {
        owner: HeadArrays.untrained(owner, weights.router(owner + 1), HEADS.width or 1, HEADS.seed) for owner in owners
    }
    own = moestream.describe(model).experts_used
    found: dict[str, Any] = {
        "tokens": windows.shape[0] * WINDOW_TOKENS,
        "experts_used": own,
        "predictions": {},
        "routing": [],
    }
    for used in (own, FEWER):
        found["predictions"][str(used)] = _predictions(model, windows, trained, used)

        def student(
            heads: Mapping[int, HeadArrays], phase: str | None, *, gate: bool = False, used: int = used
        ) -> Measured:
            routed = load_model(work / KIND, weights=model, heads=heads, experts_used=used)
            lora = after[phase].lora if phase else None
            if lora is not None:
                load_lora(routed, lora)
            return measure(teacher, routed, windows, gate=gate)

        gates = student({}, None, gate=True)
        found["teacher_perplexity"] = gates.teacher_perplexity
        for chosen in (owners, owners[len(owners) // 2 :]):
            say(f"quality of routing, {used} experts a token, heads of {chosen}")
            rows = {
                "gates": gates,
                "untrained": student({owner: untrained[owner] for owner in chosen}, None),
                **{
                    phase: student({owner: trained[phase][owner] for owner in chosen}, phase)
                    for phase in PHASES
                    if phase == "heads" or chosen == owners
                },
            }
            told = {name: {"perplexity": one.perplexity, "kl": one.kl} for name, one in rows.items()}
            found["routing"].append({"experts_used": used, "owners": chosen, **told})
    return found


def _predictions(
    model: Path, windows: npt.NDArray[np.int64], trained: Mapping[str, Mapping[int, HeadArrays]], used: int
) -> dict[str, dict[str, list[float]]]:
    """[recall, exact-set rate] by owner and predictor; heads are those of phase 1, and as they are after all phases."""
    weights, found = GgufWeights(model), {}
    with tempfile.TemporaryDirectory() as folder:
        data = _capture(model, windows[:, :-1].tolist(), Path(folder) / "data", "validation text", used)
        t = data.pairs()
        for owner, head in trained["heads"].items():
            experts = predicted(data, head, weights, t)
            experts[PHASES[-1]] = predicted(data, trained[PHASES[-1]][owner], weights, t)["head"]
            took = data.experts(owner + 1)[t + 1]
            found[str(owner)] = {name: list(overlap(these, took)) for name, these in experts.items()}
    return found


def _heads(sidecar: Sidecar) -> dict[int, HeadArrays]:
    assert sidecar.heads is not None
    return unpacked(sidecar.heads)


def _capture(model: Path, texts: Sequence[Sequence[int]], out: Path, source: str, used: int | None = None) -> Capture:
    options = {"n_ctx": CONTEXT, "n_ubatch": CONTEXT, "verbose": False}
    with contextlib.closing(
        moestream.Llama(str(model), expert_streaming=ExpertStreaming(experts_used=used), **options)
    ) as llm:
        return capture(llm, texts, out, context=CONTEXT, source=source, progress=_progress("capture", "tokens"))


# Telling


def say(line: str) -> None:
    print(f"train_demo_heads: {line}", file=sys.stderr, flush=True)


def draw(work: Path) -> None:
    """The losses of all phases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"heads": "1: heads", "sft": "2: on the teacher's texts", "distill": "3: on its own texts"}
    figure, panels = pyplot.subplots(1, len(PHASES), figsize=(13, 4), dpi=100, layout="constrained")
    for phase, axes in zip(PHASES, panels, strict=True):
        as_json, _ = curve_files(work / "heads" / f"{phase}.sidecar.gguf", phase)
        history = History.of(json.loads(as_json.read_text())["history"])
        axes.plot(range(1, len(history.train) + 1), history.train, color="tab:blue", alpha=0.4, label="training")
        axes.plot(*zip(*history.validation, strict=True), "o-", markersize=3, color="tab:red", label="validation")
        low, high = np.quantile(history.train[len(history.train) // 50 :], [0.002, 0.998])
        axes.set(xlabel="steps", ylabel="loss, nats a token", title=titles[phase], ylim=(0.97 * low, 1.03 * high))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    pyplot.close(figure)
    with completed(work / f"{KIND}-sidecar.png") as part:
        part.write_bytes(picture.getvalue())


def _progress(phase: str, what: str | None = None) -> Callable[..., None]:
    """For `progress` of capture and the phases: tells every tenth of the way."""
    told: dict[str, int] = {}

    def tell(*reached: Any) -> None:
        name, done, total = (what, *reached) if what else reached
        tenth = 10 * done // max(1, total)
        if told.get(name) != tenth:
            told[name] = tenth
            say(f"{phase}: {name} {done} of {total}")

    return tell
