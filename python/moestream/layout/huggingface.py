"""Models as Hugging Face folders: safetensors, configuration and tokenizer, to a stock GGUF in 16 or 32 bits.

    to_gguf(Path("OLMoE-1B-7B"), Path("olmoe-BF16.gguf"))

llama.cpp's own converter does the work, in a process of its own (`_convert_hf.py`), and decides all names and types: routers and
norms are F32. It writes a tensor at a time, so that memory holds one at most, whatever the model's size.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConverterError, ModelError, OptionError
from . import _converter
from ._convert_hf import EVENT
from ._pre_tokenizer import PreTokenizer, recognise

__all__ = ["DTYPES", "TESTED", "to_gguf"]

logger = logging.getLogger("moestream.layout")

DTYPES = ("auto", "f16", "bf16", "f32")
TESTED = (
    "SmallThinkerForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "GraniteMoeForCausalLM",
    "GptOssForCausalLM",
)
"""Architectures whose logits `tools/figures families` compares; the converter knows more."""

_IMPORTED = ("torch", "transformers", "safetensors", "sentencepiece", "tokenizers", "yaml")
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_LINES = 200  # of the converter's log that are kept


def to_gguf(
    folder: Path, out: Path, *, dtype: str = "auto", progress: bool = True, pre_tokenizer: str | None = None
) -> None:
    """Writes a model with experts as one stock GGUF, its tokenizer and chat template with it.

    Args:
        folder: Has config.json, *.safetensors and the files of the tokenizer.
        out: Written under the name with ".part" appended, then renamed; replaced if it exists.
        dtype: Type of the matrices: "f16", "bf16", "f32", or "auto", that of the folder (F16 for one in F32). What the folder
            has in MXFP4 stays so.
        progress: Draw bars on stderr, if it is a terminal.
        pre_tokenizer: llama.cpp's name of how the tokenizer cuts text into words, for tokenizers that are not recognised.

    Raises:
        OptionError: No such dtype, no such pre_tokenizer, or a tokenizer that needs `pre_tokenizer` to be given.
        ModelError: The folder is no model, is damaged, or is of a model without experts or of an unknown architecture.
        ConverterError: The converter or a package that it needs is not there, or it failed.
    """
    folder, out = Path(os.path.abspath(folder)), Path(os.path.abspath(out))
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: it is one of {', '.join(DTYPES)}")
    if not out.parent.is_dir():
        raise OptionError(f"{out}: there is no folder {out.parent}")
    config = _config(folder)
    _check_experts(folder, config)
    _check_shards(folder)
    _check_packages()
    converter = _converter.find(progress=progress)
    _check_architecture(folder, config, converter)
    if pre_tokenizer is not None and pre_tokenizer not in (names := _converter.pre_tokenizers(converter)):
        raise OptionError(f"pre_tokenizer={pre_tokenizer!r}: llama.cpp knows {', '.join(sorted(names))}")

    part = out.with_name(out.name + ".part")
    try:
        _convert(converter, folder, part, dtype, pre_tokenizer, progress=progress)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


# What can be told before any work -------------------------------------------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; name one with config.json and *.safetensors")
    return _json(folder / "config.json", "a Hugging Face model has one: download the whole repository")


def _json(file: Path, remedy: str) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(f"{file} is not there; {remedy}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is no JSON object; download it again")
    return value


def _check_experts(folder: Path, config: dict[str, Any]) -> None:
    """No two architectures call the number of experts the same, but all have "expert" in it."""
    counts = [
        count
        for key, value in _entries(config)
        if "expert" in key and "per_tok" not in key
        for count in (value if isinstance(value, list) else [value])
    ]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        raise ModelError(
            f"{folder / 'config.json'} tells of no experts: a dense model, which moestream has nothing to stream of; "
            "llama.cpp runs it as it is"
        )


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield key, value


def _check_architecture(folder: Path, config: dict[str, Any], converter: Path) -> None:
    inner = [part for part in config.values() if isinstance(part, dict)]
    names = [name for part in (config, *inner) for name in part.get("architectures") or ()]
    if not names:
        raise ModelError(f'{folder / "config.json"} has no "architectures"; download it again')
    known = _converter.architectures(converter)
    if not known.intersection(names):
        raise ModelError(
            f"{folder / 'config.json'}: llama.cpp's converter does not know the architecture {names[0]}; "
            f"tested with moestream are {', '.join(TESTED)}, and all {len(known)} that it knows are in "
            f"{converter / 'conversion' / '__init__.py'}"
        )


def _check_shards(folder: Path) -> None:
    index = folder / _INDEX
    if index.is_file():
        named = _json(index, "").get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ModelError(f'{index} has no "weight_map"; download it again')
        shards = [folder / str(name) for name in sorted(set(named.values()))]
    else:
        shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        raise ModelError(
            f"{folder} has no model*.safetensors; other forms of weights are not read: "
            "save the model with save_pretrained() of transformers, which writes that"
        )
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{shard} is not there, and {_INDEX} names it; download it")
        _check_length(shard)


def _check_length(file: Path) -> None:
    """A safetensors file is: length of the header, header, data; the last tensor ends with the file."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if size < 8 or length > _LONGEST_HEADER:
            raise ModelError(f"{file} is no safetensors file; download it again")
        header = content.read(length)
    if len(header) < length:
        raise ModelError(f"{file} is truncated: {size} bytes, and its header alone has {8 + length}; download it again")
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is no safetensors file, its header is damaged; download it again") from error
    if size != end:
        what = "truncated" if size < end else "damaged"
        raise ModelError(f"{file} is {what}: {size} bytes, and its header tells of {end}; download it again")


def _check_packages() -> None:
    if missing := [name for name in _IMPORTED if importlib.util.find_spec(name) is None]:
        raise _missing(", ".join(missing))


def _missing(names: str) -> ConverterError:
    return ConverterError(f"llama.cpp's converter needs {names}: pip install 'moestream[hf]'")


# The work -------------------------------------------------------------------------------------------------------------


def _convert(
    converter: Path, folder: Path, out: Path, dtype: str, pre_tokenizer: str | None, *, progress: bool
) -> None:
    recognised = _recognised(folder)
    request = {
        "converter": str(converter),
        "folder": str(folder),
        # The converter fills in what is in braces.
        "out": str(out.with_name(out.name.replace("{", "{{").replace("}", "}}"))),
        "dtype": dtype,
        "pre_tokenizer": pre_tokenizer,
        "recognised": recognised.name if recognised else None,
    }
    # Nothing is looked up elsewhere for what is in the folder; and no other gguf than the converter's.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop("NO_LOCAL_GGUF", None)
    log: deque[str] = deque(maxlen=_LINES)
    told: dict[str, Any] = {}
    hidden = not (progress and sys.stderr.isatty())
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("_convert_hf.py")), json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
    )
    assert child.stdout is not None
    try:
        with child.stdout, tqdm(unit="B", unit_scale=True, desc=folder.name, leave=False, disable=hidden) as bar:
            for line in child.stdout:
                if not line.startswith(EVENT):
                    log.append(line.rstrip())
                    logger.debug("%s", line.rstrip())
                    continue
                told |= (event := json.loads(line.removeprefix(EVENT)))
                if "written" in event:
                    bar.total = event["total"]
                    bar.update(event["written"] - bar.n)
        status = child.wait()
    finally:
        child.kill()
        child.wait()
    _report(folder, told, recognised, pre_tokenizer)
    if status != 0:
        raise _failure(folder, status, told, log)


def _recognised(folder: Path) -> PreTokenizer | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return recognise(file)
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); download it again") from error


def _report(folder: Path, told: dict[str, Any], recognised: PreTokenizer | None, wanted: str | None) -> None:
    """Says which pre-tokenizer was taken and why, unless the converter knew the tokenizer."""
    file = folder / "tokenizer.json"
    if told.get("how") == "wanted":
        logger.warning("%s: pre-tokenizer %s, as the option says", file, wanted)
    elif wanted is not None and "error" not in told:
        logger.warning("%s: pre_tokenizer=%s is not used, for this tokenizer is no byte-level BPE", folder, wanted)
    elif told.get("how") == "recognised" and recognised is None:
        raise OptionError(
            f"{file}: llama.cpp's converter does not know this tokenizer, and its pre_tokenizer is none that is recognised; "
            "name the one of llama.cpp that cuts text the same way with the option pre_tokenizer (--pre-tokenizer)"
        )
    elif recognised is not None and told.get("how") == "recognised":
        logger.warning("%s: pre-tokenizer %s, for it has %s", file, recognised.name, recognised.why)


def _failure(folder: Path, status: int, told: dict[str, Any], log: deque[str]) -> ConverterError:
    if "missing" in told:
        return _missing(told["missing"])
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (the system ends processes so when memory is short)" if name == "SIGKILL" else ""
        return ConverterError(f"{folder}: llama.cpp's converter was ended by {name}{hint}")
    errors = [line.partition(":")[2] for line in log if line.startswith(("ERROR:", "WARNING:"))][-3:]
    said = [told["error"]] if "error" in told else errors or list(log)[-3:]
    return ConverterError(f"{folder}: llama.cpp's converter failed: {' / '.join(said)}")
