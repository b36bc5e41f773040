"""Converting a model to a laid file: from Hugging Face, to another type, into records; each stage only where it is needed."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ModelError, OptionError, OutputError
from . import ggml
from .format import NEURON_MAJOR
from .gguf_file import Model
from .lay import LayPlan, NeuronMajor, check_relaid, lay, plan_lay, resolve_target
from .quantise import TYPES, Quantisation, file_type, quantise
from .source import ExpertTensor, Source, open_source
from .writer import check_broken_off, check_output, check_room, part_path, plan_hash

__all__ = ["Conversion", "ConversionPlan", "PartKind", "convert"]

DEFAULT_TYPE = "Q4_0"
RELU_ARCHITECTURES = ("smallthinker",)
_DOWN = r"^blk\.[0-9]+\.ffn_down_exps\.weight$"


@dataclass(frozen=True)
class PartKind:
    """Parts of records that are alike.

    Attributes:
        matrix: "gate", "up", "down" or "gate_up".
        type: As stored, such as "Q4_0".
        form: "plain", "neuron-major", or the name of an interleaving.
        count: How many experts have such a part.
        bytes: All of them.
        weights: Their values.
    """

    matrix: str
    type: str
    form: str
    count: int
    bytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion will write. Sizes are in bytes.

    Attributes:
        paths: The files.
        type: What the source is quantised to first, None if it keeps its types.
        target: The machine that the records are for.
        dense_bytes: Of what every token needs.
        padding_bytes: Of records, without their parts.
        records, record_bytes: How many experts, and the bytes of all their records.
        final_bytes: Of the files.
        temporary_bytes: Of what is deleted at the end, beside the files.
        free_bytes: On that disk now.
        notes: What is not as it was asked for, and why; one sentence each.
    """

    source: Path
    paths: tuple[Path, ...]
    architecture: str
    type: str | None
    target: str
    parts: tuple[PartKind, ...]
    dense_bytes: int
    padding_bytes: int
    records: int
    record_bytes: int
    final_bytes: int
    temporary_bytes: int
    free_bytes: int
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of the experts, padding counted."""
        return 8 * self.record_bytes / sum(part.weights for part in self.parts)


@dataclass(frozen=True)
class Conversion:
    """What a conversion has written, `size_bytes` in `paths`."""

    plan: ConversionPlan
    paths: tuple[Path, ...]
    size_bytes: int
    records: int
    seconds: float


@dataclass(frozen=True)
class _Options:
    """What the caller wants, checked as far as it can be without the source."""

    source: Path
    out: Path
    type: str | None
    target: str
    imatrix: Path | None
    neuron_major: bool
    allow_requantize: bool
    split_max_bytes: int | None
    force: bool
    resume: bool
    progress: bool
    threads: int
    pre_tokenizer: str | None

    def deciding(self) -> tuple[object, ...]:
        """Of these, what decides the bytes of a quantised file."""
        imatrix = None
        if self.imatrix is not None:
            status = self.imatrix.stat()
            imatrix = (str(self.imatrix.absolute()), status.st_size, status.st_mtime_ns)
        return self.type, self.neuron_major, imatrix


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str | None = None,
    *,
    target: str = "native",
    imatrix: str | os.PathLike[str] | None = None,
    neuron_major: bool = False,
    allow_requantize: bool = False,
    check_tensors: bool = False,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
    split_max_bytes: int | None = None,
    threads: int = 0,
    pre_tokenizer: str | None = None,
    progress: bool = True,
) -> Conversion | ConversionPlan:
    """Writes a laid file: one record per expert, in the order that a machine's kernels want. See docs/layout.md.

        convert("model.gguf", "laid.gguf")
        convert("model-f16.gguf", "laid.gguf", "Q4_K_M", imatrix="imatrix.gguf")

    Memory is a few records, whatever the model's size. The file is written as `OUT.part` and renamed when all of it is
    on the disk.

    Args:
        source: A stock GGUF, the first of a split set, a laid file (which is laid for another target), or a folder from
            Hugging Face.
        out: The file to write.
        type: What to quantise to, such as "Q4_0" or "Q4_K_M". None: a quantised source keeps its types, another becomes
            Q4_0.
        target: The machine it is for: "native", "plain" (any), "x86-avx2", ...
        imatrix: How much inputs matter, a file of llama-imatrix, for quantising.
        neuron_major: Store the down matrices transposed, for models whose activation gives zeros.
        allow_requantize: Quantise what is quantised already, which loses quality twice.
        check_tensors: Refuse weights that are no numbers.
        dry_run: Write nothing and return the plan.
        force: Replace what is there.
        resume: Continue a conversion that was broken off.
        split_max_bytes: Write shards of at most this size.
        threads: For quantising; 0 is as many as there are processors.
        pre_tokenizer: Of a Hugging Face folder whose tokenizer is not known: llama.cpp's name of how it cuts text into
            words.
        progress: Draw a bar on stderr if that is a terminal.

    Raises:
        OptionError: Options that contradict each other or the source.
        ModelError: A source that is damaged, changes while it is read, or cannot be converted.
        OutputError: `out` exists, or the disk is full.
    """
    options = _Options(
        source=Path(source),
        out=Path(out),
        type=type.upper() if type is not None else None,
        target=target,
        imatrix=Path(imatrix) if imatrix is not None else None,
        neuron_major=neuron_major,
        allow_requantize=allow_requantize,
        split_max_bytes=split_max_bytes,
        force=force,
        resume=resume,
        progress=progress,
        threads=threads,
        pre_tokenizer=pre_tokenizer,
    )
    began = time.monotonic()
    _check_options(options, dry_run)
    with _Temporaries(options) as temporaries:
        stock, from_folder = options.source, options.source.is_dir()
        if from_folder:
            stock = temporaries.of_folder()
        work = _Work(options, open_source(stock), from_folder)
        if dry_run:
            return work.plan
        check_broken_off(options.out, work.plan.paths, resume=resume, force=force)
        laid = work.laid
        if work.type is not None:
            check_room(options.out, work.plan.final_bytes + work.plan.temporary_bytes - temporaries.there())
            laid = work.lay_plan(work.quantised(temporaries.quantised(stock, work)))
        result = lay(
            laid, check_tensors=check_tensors, resume=resume, force=force, progress=progress, options=options.deciding()
        )
    return Conversion(work.plan, result.paths, result.size_bytes, result.records, time.monotonic() - began)


def _check_options(options: _Options, dry_run: bool) -> None:
    """What can be refused before anything is read."""
    resolve_target(options.target)
    if options.type is not None:
        file_type(options.type)
    if options.force and options.resume:
        raise OptionError("--force starts anew and --resume continues: give one of them")
    if options.imatrix is not None and not options.imatrix.is_file():
        raise ModelError(f"{options.imatrix}: no such file; check the path of the importance matrix")
    if options.pre_tokenizer is not None and not options.source.is_dir():
        raise OptionError(f"--pre-tokenizer: {options.source} is a GGUF, which has its tokenizer; leave it out")
    if options.source.is_dir() and dry_run:
        raise OptionError(
            f"{options.source}: --dry-run plans from the header of a GGUF, which a Hugging Face folder has not; "
            "convert it without, or give a GGUF"
        )
    if not dry_run:
        check_output(options.out, [options.source], force=options.force)


# ------------------------------------------------------------------ what is to be done


class _Work:
    """Decides the stages for a source.

    Attributes:
        type: What to quantise to first, None if the types are kept.
        laid: The plan of the laid file; of sizes alone if it is still to be quantised.
        plan: What the user is told.
    """

    def __init__(self, options: _Options, source: Source, from_folder: bool) -> None:
        self._options, self._source = options, source
        self._fallbacks: tuple[str, ...] = ()
        self._from_folder = from_folder
        self.type = _type_wanted(options, source)
        if options.imatrix is not None and self.type is None:
            raise OptionError("--imatrix: nothing is quantised, so it would not be used; leave it out, or name a TYPE")
        if options.neuron_major:
            _check_neuron_major(options, source)
        expected = source
        if self.type is not None:
            if source.tables is not None:
                raise OptionError(
                    f"{options.source}: is a laid file, which is not quantised to {self.type}; give its stock file back "
                    "first, with: moestream export"
                )
            would = self._quantise(source.model.path, options.out, self.type, dry_run=True)
            self._fallbacks = would.fallbacks
            expected = _as_quantised(source, would)
        self.laid = self.lay_plan(expected)
        if self.type is None:
            check_relaid(self.laid)
        self.plan = self._plan(expected)

    @property
    def stock(self) -> Model:
        """The files that are quantised."""
        return self._source.model

    def quantised(self, path: Path) -> Source:
        """The source after it was quantised into `path`."""
        return open_source(path)

    def quantise_into(self, path: Path, stock: Path) -> None:
        assert self.type is not None
        self._quantise(stock, path, self.type, dry_run=False)

    def _quantise(self, stock: Path, out: Path, type: str, *, dry_run: bool) -> Quantisation:
        options = self._options
        down = next((t.type for t in self._source.experts.values() if t.matrix == "down"), ggml.F16)
        return quantise(
            stock,
            out,
            type,
            imatrix=options.imatrix,
            allow_requantize=options.allow_requantize,
            keep=_DOWN if options.neuron_major else None,
            keep_type=down,
            threads=options.threads,
            dry_run=dry_run,
            progress=options.progress,
        )

    def lay_plan(self, source: Source) -> LayPlan:
        """How a source of the right types is laid."""
        options = self._options
        kept = self.type is None and not self._from_folder
        return plan_lay(
            source,
            options.out,
            target=options.target,
            split_max_bytes=options.split_max_bytes,
            neuron_major=_neuron_major(source) if options.neuron_major else None,
            source_name=None if kept else options.source.name,
            source_sha256=None if kept else self._source.sha256,
        )

    def _plan(self, expected: Source) -> ConversionPlan:
        laid, out = self.laid, self._options.out
        parts = tuple(_part_kinds(laid))
        records = sum(layer.record_bytes * layer.experts for layer in laid.tables.layers)
        temporary = 0
        if self.type is not None:
            temporary = sum(t.size_bytes for t in expected.dense.values())
            temporary += sum(t.slices.bytes * t.experts for t in expected.experts.values())
        if self._from_folder:
            temporary += self._source.model.first.size_bytes
        return ConversionPlan(
            source=self._options.source,
            paths=laid.paths,
            architecture=laid.tables.architecture,
            type=self.type,
            target=laid.tables.target,
            parts=parts,
            dense_bytes=sum(tensor.size_bytes for tensor in expected.dense.values()),
            padding_bytes=records - sum(part.bytes for part in parts),
            records=laid.tables.n_records,
            record_bytes=records,
            final_bytes=laid.size_bytes,
            temporary_bytes=temporary,
            free_bytes=shutil.disk_usage(out.absolute().parent).free if out.absolute().parent.is_dir() else 0,
            notes=(*self._fallbacks, *laid.notes),
        )


def _type_wanted(options: _Options, source: Source) -> str | None:
    """What to quantise to; None if the source has these types already."""
    types = {tensor.type for tensor in source.experts.values()}
    quantised = types - set(ggml.UNQUANTISED)
    wanted = options.type
    if wanted is None:
        return None if quantised or source.tables is not None else DEFAULT_TYPE
    if {ggml.type_name(type) for type in types} == {wanted.removesuffix("_MOE")}:
        return None
    if source.model.first.integer("general.file_type", -1) == TYPES[wanted] and quantised:
        return None
    if quantised and not options.allow_requantize and source.tables is None:
        names = ", ".join(sorted(map(ggml.type_name, quantised)))
        raise OptionError(
            f"{options.source}: its experts are {names} already, and quantising them again to {wanted} loses quality a "
            "second time; start from an F16 or BF16 model, or accept the loss with --allow-requantize"
        )
    return wanted


def _as_quantised(source: Source, would: Quantisation) -> Source:
    """The source with the types that llama.cpp says it would give it; its data is nowhere yet."""
    dense = {}
    for name, tensor in source.dense.items():
        type = _type_of(would, name, tensor.type)
        dense[name] = replace(
            tensor, type=type, size_bytes=ggml.row_bytes(type, tensor.ne[0]) * math.prod(tensor.ne[1:])
        )
    experts = {}
    for name, expert in source.experts.items():
        type = _type_of(would, name, expert.type)
        size = ggml.row_bytes(type, expert.columns) * expert.rows
        experts[name] = replace(expert, type=type, slices=replace(expert.slices, bytes=size, stride=size))
    return replace(source, dense=dense, experts=experts)


def _type_of(would: Quantisation, name: str, otherwise: int) -> int:
    found = ggml.type_named(would.types.get(name, ""))
    return otherwise if found is None else found


def _part_kinds(laid: LayPlan) -> Iterator[PartKind]:
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for layer in laid.tables.layers:
        for part in layer.parts:
            interleaving = laid.tables.interleaving(part)
            form = interleaving.name if interleaving else "neuron-major" if part.form == NEURON_MAJOR else "plain"
            sums = kinds.setdefault((part.matrix, ggml.type_name(part.type), form), [0, 0, 0])
            for i, more in enumerate((1, part.bytes, part.columns * part.rows)):
                sums[i] += more * layer.experts
    for (matrix, type, form), (count, size, weights) in kinds.items():
        yield PartKind(matrix, type, form, count, size, weights)


# ------------------------------------------------------------------ neuron-major


def _check_neuron_major(options: _Options, source: Source) -> None:
    if source.architecture not in RELU_ARCHITECTURES:
        raise OptionError(
            f"--neuron-major: {source.architecture} has no ReLU, so its activations are not zero and no row could be left "
            f"out; it is for {', '.join(RELU_ARCHITECTURES)}"
        )
    for tensor in source.experts.values():
        if tensor.matrix != "down" or tensor.form == NEURON_MAJOR or tensor.type in ggml.UNQUANTISED:
            continue
        if not options.allow_requantize:
            raise OptionError(
                f"--neuron-major: {tensor.name} is {ggml.type_name(tensor.type)} already, and quantising it again along the "
                "other side adds error to what it has lost; start from an F16 or BF16 model, or accept that with "
                "--allow-requantize"
            )


def _neuron_major(source: Source) -> NeuronMajor:
    """Every down matrix, in the type that the other matrices of its layer have: their rows are as long as its columns."""
    types: dict[str, int] = {}
    for tensors in source.blocks().values():
        for tensor in tensors:
            if tensor.matrix == "down" and tensor.form != NEURON_MAJOR:
                types[tensor.name] = _type_beside(tensor, tensors)
    return NeuronMajor(types)


def _type_beside(down: ExpertTensor, tensors: list[ExpertTensor]) -> int:
    type = next((tensor.type for tensor in tensors if tensor.matrix != "down"), down.type)
    if ggml.needs_imatrix(type):
        raise OptionError(
            f"--neuron-major: {down.name} would be {ggml.type_name(type)}, which needs an importance matrix of its rows, "
            "and llama-imatrix gives one of its columns; choose another TYPE"
        )
    return type


# ------------------------------------------------------------------ what is made on the way


@dataclass
class _Temporaries:
    """Stock files beside the output, which are deleted when that is complete. A complete one is kept for --resume."""

    options: _Options
    made: list[Path] = field(default_factory=list)

    def __enter__(self) -> _Temporaries:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if exc is None:
            for path in self.made:
                path.unlink(missing_ok=True)
                _note_path(path).unlink(missing_ok=True)

    def there(self) -> int:
        """Bytes of what was made already."""
        return sum(path.stat().st_size for path in self.made if path.exists())

    def of_folder(self) -> Path:
        """The folder from Hugging Face as a GGUF."""
        from .huggingface import to_gguf

        folder, path = self.options.source, part_path(self.options.out.with_name(self.options.out.name + ".hf"))
        files = sorted(file for file in folder.iterdir() if file.is_file())
        key = plan_hash(
            self.options.pre_tokenizer,
            [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        )
        weights = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
        check_room(path, weights - (path.stat().st_size if path.exists() else 0))
        progress, pre_tokenizer = self.options.progress, self.options.pre_tokenizer
        return self._make(path, key, lambda: to_gguf(folder, path, progress=progress, pre_tokenizer=pre_tokenizer))

    def quantised(self, stock: Path, work: _Work) -> Path:
        """The stock model `stock`, quantised."""
        path = part_path(self.options.out.with_name(self.options.out.name + ".stock"))
        source = work.stock
        key = plan_hash(self.options.deciding(), work.type, source.sha256, [file.identity for file in source.files])

        def make() -> None:
            work.quantise_into(path, stock)
            source.check_unchanged()

        return self._make(path, key, make)

    def _make(self, path: Path, key: str, make: Callable[[], None]) -> Path:
        """Makes a file unless it is there already, complete and the same; tells the next run when it is."""
        note = _note_path(path)
        if (path.exists() or note.exists()) and not (self.options.resume or self.options.force):
            raise OutputError(
                f"{path}: is there from a conversion that was broken off; --resume continues it, --force starts anew"
            )
        self.made.append(path)
        if self.options.resume and path.exists() and _noted(note) == key:
            return path
        for old in (note, path):
            old.unlink(missing_ok=True)
        try:
            make()
            with open(path, "rb+") as written:
                os.fsync(written.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        note.write_text(json.dumps({"plan": key}))
        return path


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _noted(note: Path) -> str | None:
    try:
        return str(json.loads(note.read_text())["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
