"""Heads and LoRA adapters as others publish them, made into what a sidecar holds. What cannot be taken is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OptionError, SidecarError
from ..layout import ggml
from .adapter import read_adapter, require_alpha, scaled
from .base import BaseModel, require_fit
from .format import HEAD_TYPES, Head, Heads, Lora, LoraPair, Matrix, valid_alpha
from .safetensors_file import SafetensorsFile, write_safetensors

__all__ = ["lora_files", "read_heads", "read_lora", "write_heads"]

Values = npt.NDArray[np.floating[Any]]

_HEAD_NAME = re.compile(r"layers\.(\d+)\.(fc1|fc2|linear_init)\.weight")
_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"


# ------------------------------------------------------------------ heads


def read_heads(
    path: str | os.PathLike[str], model: BaseModel, *, type: str = "Q8_0", top_k: int | None = None
) -> Heads:
    """Heads from a safetensors file: `layers.N.fc1.weight`, `.fc2.weight` and `.linear_init.weight`, N being the owner.

    With d the embedding length, E the experts and w the width: fc1 is [w, d + 2E], fc2 [E, w], linear_init [E, d + 2E].

    Args:
        model: The model that they are for.
        type: What to store them as: one of `HEAD_TYPES`.
        top_k: Experts a token that they were trained with; by default what the file says of itself, else the model's.

    Raises:
        OptionError: No such type, or more experts a token than there are.
        SidecarError: A damaged file, one with other tensors, or heads that do not fit the model.
    """
    if type not in HEAD_TYPES:
        raise OptionError(f"--type {type}: heads are stored as {', '.join(HEAD_TYPES)}")
    file = SafetensorsFile.open(path)
    by_owner: dict[int, dict[str, str]] = {}
    for name in file.shapes:
        if not (found := _HEAD_NAME.fullmatch(name)):
            raise SidecarError(
                f"{file.path}: {name} is no part of a head: those are layers.N.fc1.weight, .fc2.weight and "
                ".linear_init.weight; a LoRA goes to --lora"
            )
        by_owner.setdefault(int(found[1]), {})[found[2]] = name
    if not by_owner:
        raise SidecarError(f"{file.path}: holds no heads")
    d, experts = model.number("embedding_length"), model.number("expert_count")
    trained = _top_k(file, top_k, experts) or model.number("expert_used_count")
    width = 0
    heads = []
    for owner, names in sorted(by_owner.items()):
        for part in ("linear_init", "fc1", "fc2"):
            if part not in names:
                raise SidecarError(f"{file.path}: the head of layer {owner} lacks layers.{owner}.{part}.weight")
        width = width or max(1, *file.shapes[names["fc1"]][:1])
        wanted = {"linear_init": (experts, d + 2 * experts), "fc1": (width, d + 2 * experts), "fc2": (experts, width)}
        for part, shape in wanted.items():
            if file.shapes[names[part]] != shape:
                raise SidecarError(
                    f"{file.path}: {names[part]} is {list(file.shapes[names[part]])}, but heads of width {width} for "
                    f"{model.path} (d {d}, {experts} experts) have {list(shape)}"
                )
        values = {part: _finite(file, names[part]) for part in wanted}
        heads.append(
            Head.of(
                owner,
                linear=values["linear_init"],
                fc1=values["fc1"],
                fc2=values["fc2"],
                columns=d,
                type=HEAD_TYPES[type],
            )
        )
    done = Heads(width, experts, d, trained, tuple(heads))
    require_fit(file.path, done, None, model)
    return done


def _top_k(file: SafetensorsFile, given: int | None, experts: int) -> int | None:
    """What is given, else what the file says; None if neither is."""
    said = file.about.get("top_k")
    if given is None and said is None:
        return None
    if given is None and not (said.isdecimal() and len(said) <= 9):
        raise SidecarError(f"{file.path}: says that its top_k is {said!r}; give it with --top-k K")
    number = int(said) if given is None else given
    if not 1 <= number <= experts:
        raise OptionError(f"--top-k {number}: a token takes 1 to {experts} experts of this model")
    return number


def write_heads(path: str | os.PathLike[str], heads: Heads) -> None:
    """Writes heads as `read_heads` takes them, in F32.

    Raises:
        OutputError: It cannot be written.
    """
    tensors = {}
    for head in heads.heads:
        linear, fc1, fc2 = head.matrices()
        tensors[f"layers.{head.owner}.linear_init.weight"] = linear
        tensors[f"layers.{head.owner}.fc1.weight"] = fc1
        tensors[f"layers.{head.owner}.fc2.weight"] = fc2
    write_safetensors(path, tensors, {"top_k": str(heads.top_k)})


# ------------------------------------------------------------------ LoRA


def read_lora(path: str | os.PathLike[str], model: BaseModel, *, alpha: float | None = None) -> Lora:
    """A LoRA for a model: from an adapter GGUF, a PEFT folder, or a safetensors file of `<module>.lora_A` and `.lora_B`.

    Modules have the names of Hugging Face's `transformers`; they become those of the model's tensors, and where llama.cpp
    orders rows or columns differently, B or A follows.

    Args:
        alpha: What is divided by the rank. Needed where the file does not say it; refused where it does.

    Raises:
        OptionError: `alpha` is missing, contradicts the file, or is none.
        SidecarError: A damaged file, or a tensor that cannot be applied, by name.
    """
    where = Path(path)
    if alpha is not None and not valid_alpha(alpha):
        raise OptionError(f"--alpha {alpha:g}: give a number above 0")
    if where.is_dir():
        lora = _peft(where, model, alpha)
    elif where.suffix == ".gguf" or _magic(where) == b"GGUF":
        if alpha is not None:
            raise OptionError(f"--alpha {alpha:g}: {where} says itself what its alpha is; leave --alpha out")
        architecture, lora = read_adapter(where)
        if architecture != model.architecture:
            raise SidecarError(
                f"{where}: is for a model of the architecture {architecture}, but {model.path} is {model.architecture}"
            )
    elif (where.parent / _CONFIG).is_file() and where.name == _ADAPTER:
        lora = _peft(where.parent, model, alpha)
    else:
        file = SafetensorsFile.open(where)
        said = _number(file.about.get("lora_alpha", file.about.get("alpha")))
        if said is not None and alpha is not None and alpha != said:
            raise OptionError(f"--alpha {alpha:g}: {where} says that it is {said:g}; leave --alpha out")
        chosen = alpha if alpha is not None else said
        if chosen is None:
            raise OptionError(f"{where}: does not say with which alpha it was trained: give --alpha N")
        require_alpha(where, chosen)
        lora = _converted(file, model, lambda _, rank: chosen / rank)
    require_fit(where, None, lora, model)
    return lora


def lora_files(path: str | os.PathLike[str]) -> list[Path]:
    """What a LoRA at a path is read from, its matrices last: of a PEFT folder two files."""
    where = Path(path)
    return [where / _CONFIG, where / _ADAPTER] if where.is_dir() else [where]


@dataclass(frozen=True)
class _Peft:
    """What an adapter_config.json says of the scale of each module."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rslora: bool

    def scale(self, module: str, rank: int) -> float:
        alpha = next((value for key, value in self.alphas.items() if _is_called(module, key)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def rank_of(self, module: str) -> int:
        return next((value for key, value in self.ranks.items() if _is_called(module, key)), self.rank)


def _is_called(module: str, pattern: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None


def _peft(folder: Path, model: BaseModel, alpha: float | None) -> Lora:
    config = _peft_config(folder / _CONFIG)
    if alpha is not None:
        raise OptionError(f"--alpha {alpha:g}: {folder / _CONFIG} says what it is; leave --alpha out")
    path = folder / _ADAPTER
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise SidecarError(
            f"{folder}: holds adapter_model.bin, which may run code when it is read; save it as {_ADAPTER}"
        )
    file = SafetensorsFile.open(path)

    def scale(module: str, rank: int) -> float:
        if rank != config.rank_of(module):
            raise SidecarError(
                f"{path}: the LoRA of {module} has rank {rank}, but {_CONFIG} says {config.rank_of(module)}; "
                "one of the two is of another adapter"
            )
        return config.scale(module, rank)

    return _converted(file, model, scale)


def _peft_config(path: Path) -> _Peft:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except OSError as exc:
        raise SidecarError(f"{path}: cannot be read: {exc.strerror}; a PEFT folder has one") from exc
    except (ValueError, RecursionError) as exc:
        raise SidecarError(f"{path}: is no JSON object: {exc}") from exc
    if config.get("peft_type") != "LORA":
        raise SidecarError(f"{path}: is an adapter of the kind {config.get('peft_type')}; only LORA can be applied")
    if config.get("bias", "none") != "none":
        raise SidecarError(f"{path}: bias={config['bias']!r}: trained biases cannot be applied; train with bias='none'")
    for name in ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "fan_in_fan_out", "megatron_config",
                 "alora_invocation_tokens", "trainable_token_indices", "use_qalora", "arrow_config"):  # fmt: skip
        if config.get(name):
            raise SidecarError(f"{path}: {name}={config[name]!r} changes what a LoRA does and cannot be applied")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise SidecarError(
            f"{path}: init_lora_weights={start!r} changed the weights of the base, which this model does not have; "
            "convert the adapter to an ordinary one when saving it (path_initial_model_for_weight_conversion)"
        )
    try:
        made = _Peft(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            ranks={str(key): int(value) for key, value in (config.get("rank_pattern") or {}).items()},
            alphas={str(key): float(value) for key, value in (config.get("alpha_pattern") or {}).items()},
            rslora=bool(config.get("use_rslora")),
        )
        for pattern in (*made.ranks, *made.alphas):
            re.compile(pattern)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, re.error) as exc:
        raise SidecarError(
            f"{path}: r, lora_alpha, rank_pattern or alpha_pattern is missing or malformed: {exc}"
        ) from exc
    for value in (made.alpha, *made.alphas.values()):
        require_alpha(path, value)
    return made


def _converted(file: SafetensorsFile, model: BaseModel, scale: Callable[[str, int], float]) -> Lora:
    """The LoRA of a safetensors file.

    Args:
        scale: Of module and rank, what B A is multiplied with.
    """
    halves: dict[str, dict[str, str]] = {}
    for name in file.shapes:
        found = re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?(?:\.weight)?", name)
        if not found:
            raise SidecarError(f"{file.path}: {name} is no lora_A or lora_B, and cannot be applied: {_why(name)}")
        if (first := halves.setdefault(found[1], {}).setdefault(found[2], name)) != name:
            raise SidecarError(f"{file.path}: {first} and {name} are both lora_{found[2]} of {found[1]}")
    if not halves:
        raise SidecarError(f"{file.path}: holds no LoRA")
    names = _TensorNames(file.path, model)
    pairs: dict[str, LoraPair] = {}
    scales: dict[str, float] = {}
    for module, both in halves.items():
        for half in "AB":
            if half not in both:
                raise SidecarError(f"{file.path}: {module} has no lora_{half}")
        shape_a, shape_b = file.shapes[both["A"]], file.shapes[both["B"]]
        if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1] or not shape_a[0]:
            raise SidecarError(
                f"{file.path}: {both['A']} is {list(shape_a)} and {both['B']} {list(shape_b)}, but they must be "
                "[rank, inputs] and [outputs, rank]"
            )
        module = module.removeprefix("base_model.model.")
        factor = scale(module, shape_a[0])
        for tensor, a, b in names.placed(module, _finite(file, both["A"]), _finite(file, both["B"])):
            if tensor in pairs:
                raise SidecarError(f"{file.path}: {module} and another module are both {tensor}")
            pairs[tensor] = LoraPair(Matrix.of(a, _lora_type(a)), Matrix.of(b, _lora_type(b)))
            scales[tensor] = factor
    return scaled(pairs, scales)


def _why(name: str) -> str:
    if "lora_embedding" in name or "embed_tokens" in name:
        return "LoRA of embeddings is taken from adapter GGUFs only (llama.cpp's convert_lora_to_gguf.py makes them)"
    if "magnitude" in name:
        return "it is of DoRA; train with use_dora=False"
    if name.endswith("bias"):
        return "train with bias='none'"
    return "merge it into the base, or train without it"


def _lora_type(values: Values) -> int:
    return ggml.F16 if values.dtype == np.float16 else ggml.F32


# ------------------------------------------------------------------ names and order of rows

_UNCHANGED = frozenset(
    "afmoe dots1 ernie4_5-moe glm4moe gpt-oss grovemoe hunyuan-moe lfm2moe llama4 minimax-m2 olmoe phimoe qwen2moe "
    "qwen35moe qwen3moe qwen3next qwen3vlmoe smallthinker".split()
)
"""Architectures whose attention and shared experts llama.cpp's converter leaves in the order that they have."""
_PERMUTED = frozenset(("arctic", "deepseek", "granitemoe", "llama"))
"""Those of which it brings the rows of Q and K into another order, for another way of rotating."""


class _TensorNames:
    """From modules of `transformers` to tensors of a model, and the order of rows and columns that they have there."""

    def __init__(self, path: Path, model: BaseModel) -> None:
        import gguf

        self._path, self._model, architecture = path, model, model.architecture
        found = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
        if not found or architecture not in _UNCHANGED | _PERMUTED:
            raise SidecarError(
                f"{path}: in which order llama.cpp keeps the rows of {architecture} models is not known here: convert the "
                "adapter with llama.cpp's convert_lora_to_gguf.py, and give that GGUF"
            )
        self._map = gguf.get_tensor_name_map(found[0], model.number("block_count"))

    def placed(self, module: str, a: Values, b: Values) -> Iterator[tuple[str, Values, Values]]:
        """The tensors that a module is, with A and B of each."""
        if re.search(r"\.experts(\.|$)", module):
            raise SidecarError(
                f"{self._path}: {module}: LoRA of streamed experts is taken from adapter GGUFs only: convert the adapter "
                "with llama.cpp's convert_lora_to_gguf.py, and give that GGUF"
            )
        plain = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", module)
        block = re.match(r"model\.layers\.(\d+)\.", plain)
        layer = int(block[1]) if block else 0
        if plain.endswith(".linear_attn.in_proj_qkvz") and self._model.architecture == "qwen3next":
            self._require_rows(module, b, 2 * self._key_heads * self._key_length + 2 * self._value_rows)
            qkv, z = self._split_qkvz()
            yield f"blk.{layer}.attn_qkv.weight", a, b[qkv]
            yield f"blk.{layer}.attn_gate.weight", a, b[z]
            return
        name = self._map.get_name(plain)
        if name is None:
            raise SidecarError(
                f"{self._path}: {module}: models of the architecture {self._model.architecture} have no tensor of that "
                "name; train without it"
            )
        if self._model.architecture in _PERMUTED and plain.endswith((".self_attn.q_proj", ".self_attn.k_proj")):
            b = self._rotated(module, b, self._heads(plain.endswith("q_proj"), layer))
        elif self._model.architecture == "qwen35moe" and ".linear_attn." in plain:
            a, b = self._tiled(module, plain.rsplit(".", 1)[1], a, b)
        yield f"{name}.weight", a, b

    def _heads(self, query: bool, layer: int) -> int:
        of_queries = self._model.number("attention.head_count", layer)
        return of_queries if query else self._model.number("attention.head_count_kv", layer) or of_queries

    def _rotated(self, module: str, b: Values, heads: int) -> Values:
        """B with the two halves of each head, which rotate into each other, interleaved row by row."""
        if b.shape[0] % (2 * heads):
            raise SidecarError(f"{self._path}: {module}: {b.shape[0]} rows are not those of {heads} heads")
        return b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)

    # Gated delta net: `transformers` keeps the value heads of one key head together, llama.cpp lays the first value heads
    # of all key heads side by side, then the second ones (Qwen3.5), or takes Q, K, V, Z of each key head apart (Qwen3-Next).

    @property
    def _key_heads(self) -> int:
        return self._model.number("ssm.group_count")

    @property
    def _key_length(self) -> int:
        return self._model.number("ssm.state_size")

    @property
    def _value_rows(self) -> int:
        return self._model.number("ssm.inner_size")

    def _tiled(self, module: str, part: str, a: Values, b: Values) -> tuple[Values, Values]:
        value_heads = self._model.number("ssm.time_step_rank")
        shape = (self._key_heads, value_heads // self._key_heads)
        of_heads = np.arange(value_heads).reshape(shape).T.reshape(-1)
        of_values = np.arange(self._value_rows).reshape(value_heads, -1)[of_heads].reshape(-1)
        keys = 2 * self._key_heads * self._key_length
        rows = {
            "in_proj_qkv": np.concatenate([np.arange(keys), keys + of_values]),
            "in_proj_z": of_values,
            "in_proj_a": of_heads,
            "in_proj_b": of_heads,
        }
        if part == "out_proj":
            if a.shape[1] != len(of_values):
                raise SidecarError(f"{self._path}: {module}: A has {a.shape[1]} columns, not {len(of_values)}")
            return a[:, of_values], b
        if part not in rows:
            raise SidecarError(f"{self._path}: {module}: is none of {', '.join(rows)} and out_proj; train without it")
        self._require_rows(module, b, len(rows[part]))
        return a, b[rows[part]]

    def _split_qkvz(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which rows of Qwen3-Next's in_proj_qkvz are Q, K and V, and which are Z."""
        heads, length, values = self._key_heads, self._key_length, self._value_rows // self._key_heads
        rows = np.arange(heads * 2 * (length + values)).reshape(heads, -1)
        q, k, v, z = np.split(rows, np.cumsum([length, length, values]), axis=1)
        return np.concatenate([q.reshape(-1), k.reshape(-1), v.reshape(-1)]), z.reshape(-1)

    def _require_rows(self, module: str, b: Values, rows: int) -> None:
        if b.shape[0] != rows:
            raise SidecarError(
                f"{self._path}: {module}: B has {b.shape[0]} rows, but the module of this model has {rows}"
            )


# ------------------------------------------------------------------


def _finite(file: SafetensorsFile, name: str) -> Values:
    values = file.read(name)
    if not np.isfinite(values).all():
        raise SidecarError(f"{file.path}: {name} holds values that are no numbers (NaN or infinite); train it anew")
    return values


def _magic(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError as exc:
        raise SidecarError(f"{path}: cannot be read: {exc.strerror}; check the path") from exc


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
