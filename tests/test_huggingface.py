"""Hugging Face folders as models: what is refused before any work, where the converter comes from, and what it writes."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import logging
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from moestream import ConverterError, ModelError, OptionError
from moestream.layout import _converter, huggingface
from moestream.layout._pre_tokenizer import recognise
from moestream.layout.huggingface import to_gguf

VERSION = version("llama-cpp-python")
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"

# A converter that does as CONVERTER says; its gguf is told from the installed one by its name.
FAKE = {
    "LICENSE": "MIT",
    "conversion/__init__.py": 'TEXT_MODEL_MAP: dict[str, str] = {"Qwen3MoeForCausalLM": "qwen"}\nfrom .base import TextModel\n',
    "conversion/base.py": """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "unknown":
            raise NotImplementedError
        res = "qwen2"
        res = "gpt-2"
        return res
""",
    "gguf-py/gguf/__init__.py": "OURS = True",
    "models/templates/a.jinja": "",
    "convert_hf_to_gguf.py": """
import os, sys
import gguf
from pathlib import Path
from conversion import TextModel
def main():
    assert gguf.OURS and os.environ["HF_HUB_OFFLINE"] == "1"
    folder, _, out, _, dtype = sys.argv[1:]
    out = Path(out.format())
    out.write_text(dtype)
    exec(os.environ.get("CONVERTER", ""), globals() | locals())
""",
}


# Folders --------------------------------------------------------------------------------------------------------------


def safetensors_file(file: Path) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def put(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


QWEN2 = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    },
    "model": {"type": "BPE", "ignore_merges": False, "byte_fallback": False},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Passes for a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    put(folder / "config.json", {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2})
    put(folder / "tokenizer.json", QWEN2)
    safetensors_file(folder / "model.safetensors")
    return folder


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake one, for which nothing has to be installed."""
    root = tmp_path / "llama.cpp"
    for name, text in FAKE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv("MOESTREAM_LLAMA_CPP", str(root))
    monkeypatch.setattr(huggingface, "_IMPORTED", ())
    return root


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_as_config(folder: Path) -> None:
    put(folder / "config.json", [])


def no_architecture(folder: Path) -> None:
    put(folder / "config.json", {"num_experts": 8})


def unknown_architecture(folder: Path) -> None:
    put(folder / "config.json", {"architectures": ["OtherMoeForCausalLM"], "num_experts": 8})


def dense(folder: Path) -> None:
    put(folder / "config.json", {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 0, "num_experts_per_tok": 2})


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    put(folder / "model.safetensors.index.json", {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})


def empty_index(folder: Path) -> None:
    put(folder / "model.safetensors.index.json", {"weight_map": {}})


def cut(file: Path, size_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:size_bytes])


def truncated(folder: Path) -> None:
    cut(folder / "model.safetensors", -1)


def truncated_in_its_header(folder: Path) -> None:
    cut(folder / "model.safetensors", 20)


def longer_than_told(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")


def damaged_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (no_config, "config.json is not there; a Hugging Face model has one: download the whole repository"),
        (broken_config, "config.json is no JSON"),
        (list_as_config, "config.json is no JSON object"),
        (no_architecture, 'config.json has no "architectures"'),
        (
            unknown_architecture,
            "does not know the architecture OtherMoeForCausalLM; tested with moestream are SmallThinker",
        ),
        (dense, "config.json tells of no experts: a dense model"),
        (no_weights, "has no model*.safetensors"),
        (missing_shard, "model-2.safetensors is not there, and model.safetensors.index.json names it; download it"),
        (empty_index, 'model.safetensors.index.json has no "weight_map"'),
        (truncated, "model.safetensors is truncated: "),
        (truncated_in_its_header, "model.safetensors is truncated: 20 bytes, and its header alone has"),
        (longer_than_told, "model.safetensors is damaged: "),
        (no_safetensors, "model.safetensors is no safetensors file"),
        (damaged_header, "model.safetensors is no safetensors file, its header is damaged"),
        (broken_tokenizer, "tokenizer.json is no JSON"),
    ],
)
def test_what_is_no_model_is_refused_and_the_file_named(
    folder: Path, converter: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        to_gguf(folder, tmp_path / "out.gguf")
    assert message in str(refused.value) and str(folder) in str(refused.value)
    assert not list(tmp_path.glob("out*"))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such folder; name one with config.json"):
        to_gguf(tmp_path / "nowhere", tmp_path / "out.gguf")


@pytest.mark.parametrize(
    "config",
    [{"n_routed_experts": 64}, {"ffn_config": {"moe_num_experts": 16}}, {"num_experts": [8, 8]}],
)
def test_experts_are_found_under_whatever_name(folder: Path, converter: Path, tmp_path: Path, config: Any) -> None:
    put(folder / "config.json", {"architectures": ["Qwen3MoeForCausalLM"], **config})
    to_gguf(folder, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "q4_0"}, "dtype='q4_0': it is one of auto, f16, bf16, f32"),
        ({"pre_tokenizer": "qwen9"}, "pre_tokenizer='qwen9': llama.cpp knows gpt-2, qwen2"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    folder: Path, converter: Path, tmp_path: Path, options: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        to_gguf(folder, tmp_path / "out.gguf", **options)


def test_out_needs_a_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no folder .*nowhere"):
        to_gguf(folder, tmp_path / "nowhere" / "out.gguf")


def test_missing_packages_are_named_with_the_extra_that_has_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_IMPORTED", ("json", "no_such_package", "nor_this"))
    with pytest.raises(ConverterError, match=r"needs no_such_package, nor_this: pip install 'moestream\[hf\]'"):
        to_gguf(folder, tmp_path / "out.gguf")


# The converter's process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.gguf", "{ftype} {0}.gguf"])
def test_what_the_converter_wrote_gets_its_name(folder: Path, converter: Path, tmp_path: Path, name: str) -> None:
    to_gguf(folder, tmp_path / name, dtype="bf16")
    assert (tmp_path / name).read_text() == "bf16"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "does, message",
    [
        ("raise ValueError('no such tensor')", "converter failed: ValueError: no such tensor"),
        ("import no_such_package", r"needs no_such_package: pip install 'moestream\[hf\]'"),
        ("print('ERROR:x:Model is not good', file=sys.stderr); sys.exit(1)", "converter failed: x:Model is not good"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL .*when memory is short"),
        ("os.kill(os.getpid(), 15)", "was ended by SIGTERM$"),
    ],
)
def test_why_the_converter_failed_is_told_and_nothing_left(
    folder: Path, converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, message: str
) -> None:
    (tmp_path / "out.gguf").write_text("as it was")
    monkeypatch.setenv("CONVERTER", does)
    with pytest.raises(ConverterError, match=message):
        to_gguf(folder, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "as it was"
    assert not list(tmp_path.glob("*.part"))


ASKS = "out.write_text(TextModel().get_vocab_base_pre({!r}))"


@pytest.mark.parametrize(
    "tokenizer, wanted, taken, told",
    [
        ("known", None, "gpt-2", None),
        ("unknown", None, "qwen2", "pre-tokenizer qwen2, for it has Qwen2's Split expression"),
        ("unknown", "gpt-2", "gpt-2", "pre-tokenizer gpt-2, as the option says"),
        ("known", "qwen2", "qwen2", "pre-tokenizer qwen2, as the option says"),
    ],
)
def test_the_option_goes_before_what_the_converter_knows_and_that_before_what_is_recognised(
    folder: Path,
    converter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tokenizer: str,
    wanted: str | None,
    taken: str,
    told: str | None,
) -> None:
    monkeypatch.setenv("CONVERTER", ASKS.format(tokenizer))
    to_gguf(folder, tmp_path / "out.gguf", pre_tokenizer=wanted)
    assert (tmp_path / "out.gguf").read_text() == taken
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ([] if told is None else [f"{folder / 'tokenizer.json'}: {told}"])


@pytest.mark.parametrize("there", [True, False])
def test_a_tokenizer_that_no_one_knows_is_refused_with_the_option_that_helps(
    folder: Path, converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    put(folder / "tokenizer.json", QWEN2 | {"normalizer": {"type": "Lowercase"}})
    if not there:
        (folder / "tokenizer.json").unlink()
    monkeypatch.setenv("CONVERTER", ASKS.format("unknown"))
    with pytest.raises(OptionError, match=r"tokenizer\.json: .*the option pre_tokenizer \(--pre-tokenizer\)"):
        to_gguf(folder, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out*"))


def test_an_option_that_was_not_needed_is_told(
    folder: Path, converter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to_gguf(folder, tmp_path / "out.gguf", pre_tokenizer="qwen2")
    assert "pre_tokenizer=qwen2 is not used" in caplog.text


# Recognised tokenizers ------------------------------------------------------------------------------------------------

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def changed(path: str, value: Any) -> dict[str, Any]:
    """QWEN2 with another value at a path of keys and indices."""
    result = json.loads(json.dumps(QWEN2))
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = result
    for key in way:
        inner = inner[key]
    inner[last] = value
    return result


SPLIT = "pre_tokenizer.pretokenizers.0"
EXPRESSION = QWEN2["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]  # type: ignore[index]
LLAMA3 = EXPRESSION.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@pytest.mark.parametrize(
    "tokenizer, name",
    [
        (QWEN2, "qwen2"),
        (changed("normalizer", {"type": "NFC"}), "qwen2"),
        (changed(f"{SPLIT}.pattern.Regex", LLAMA3), "dbrx"),
        (changed(f"{SPLIT}.pattern.Regex", LLAMA3) | {"model": {"type": "BPE", "ignore_merges": True}}, "llama-bpe"),
        (QWEN2 | {"pre_tokenizer": BYTES}, "gpt-2"),
        (QWEN2 | {"pre_tokenizer": {k: v for k, v in BYTES.items() if k != "use_regex"}}, "gpt-2"),
        (QWEN2 | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}}, "starcoder"),
        # A little otherwise is not the same.
        (changed("normalizer", {"type": "NFKC"}), None),
        (changed("model.ignore_merges", True), None),
        (changed("model.byte_fallback", True), None),
        (changed("model.type", "Unigram"), None),
        (changed(f"{SPLIT}.pattern.Regex", EXPRESSION + "|x"), None),
        (changed(f"{SPLIT}.behavior", "Removed"), None),
        (changed(f"{SPLIT}.invert", True), None),
        (changed("pre_tokenizer.pretokenizers.1.add_prefix_space", True), None),
        (changed("pre_tokenizer.pretokenizers.1.use_regex", True), None),
        (QWEN2 | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, DIGITS]}}, None),
        (QWEN2 | {"pre_tokenizer": {"type": "Metaspace"}}, None),
        (QWEN2 | {"pre_tokenizer": None}, None),
        ({}, None),
    ],
)
def test_pre_tokenizers_are_recognised_exactly_or_not_at_all(tmp_path: Path, tokenizer: Any, name: str | None) -> None:
    put(tmp_path / "tokenizer.json", tokenizer)
    found = recognise(tmp_path / "tokenizer.json")
    assert (found and found.name) == name


def test_a_normalizer_that_llama_cpp_leaves_out_is_told(tmp_path: Path) -> None:
    put(tmp_path / "tokenizer.json", changed("normalizer", {"type": "NFC"}))
    found = recognise(tmp_path / "tokenizer.json")
    assert found is not None and "llama.cpp leaves out its NFC" in found.why


# Where the converter comes from ---------------------------------------------------------------------------------------


def sdist(files: dict[str, str]) -> bytes:
    """A source distribution, with entries that want to be elsewhere."""
    root = SDIST.removesuffix(".tar.gz")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:

        def add(name: str, text: str = "", kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.type, entry.linkname = len(text), kind, target
            archive.addfile(entry, io.BytesIO(text.encode()))

        add(f"{root}/vendor/llama.cpp/conversion/../../../../../escaped.py", "x")
        add("/vendor/llama.cpp/conversion/absolute.py", "x")
        add(f"{root}/vendor/llama.cpp/conversion/link", kind=tarfile.SYMTYPE, target="/")
        add(f"{root}/vendor/llama.cpp/conversion/link/through.py", "x")
        add(f"{root}/vendor/llama.cpp/src/llama.cpp", "not wanted")
        add(f"{root}/setup.py", "not wanted")
        for name, text in files.items():
            add(f"{root}/vendor/llama.cpp/{name}", text)
    return data.getvalue()


@dataclass
class Index:
    """A package index with one file."""

    address: str = ""
    data: bytes = field(default_factory=lambda: sdist(FAKE))
    form: str = "json"
    sha256: str | None = "right"
    name: str = SDIST
    password: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def page(self) -> tuple[str, str]:
        sha256 = hashlib.sha256(self.data).hexdigest() if self.sha256 == "right" else self.sha256
        if self.form == "json":
            hashes = {"sha256": sha256} if sha256 else {}
            file = {"filename": self.name, "url": f"../../files/{self.name}", "hashes": hashes}
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": [file]})
        fragment = f"#sha256={sha256}" if sha256 else ""
        return (
            "text/html",
            f'<!DOCTYPE html><a name="x"></a><a href="../../files/{self.name}{fragment}">{self.name}</a>',
        )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The one that pip is set to; the cache is empty."""
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            allowed = served.password is None or self.headers.get("Authorization") == "Basic " + served.password
            kind, body, status = "text/plain", b"", 200 if allowed else 401
            if allowed and self.path == "/simple/llama-cpp-python/":
                kind, text = served.page()
                body = text.encode()
            elif allowed and self.path == f"/files/{served.name}":
                body = served.data
            elif allowed:
                status = 404
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_converter, "_pip_settings", lambda: served.settings)
    for name in ("MOESTREAM_LLAMA_CPP", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served.address = f"127.0.0.1:{server.server_address[1]}"
        served.settings["index-url"] = f"http://{served.address}/simple"
        yield served
        server.shutdown()


def files_below(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("form", ["json", "html"])
def test_the_converter_is_fetched_once_and_only_what_is_needed_of_it(
    index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    index.form = form
    found = _converter.find()
    assert found == tmp_path / "cache" / "moestream" / f"llama.cpp-{VERSION}"
    assert files_below(tmp_path) - {f"cache/moestream/llama.cpp-{VERSION}/{name}" for name in FAKE} == {
        f"cache/moestream/llama.cpp-{VERSION}/conversion/link/through.py"
    }
    assert _converter.architectures(found) == {"Qwen3MoeForCausalLM"}
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"MIT licence), once: {SDIST} from 127.0.0.1, 0 MB, to {tmp_path}" in told
    asked = len(index.requests)
    assert _converter.find() == found and len(index.requests) == asked == 2


def test_another_index_is_asked_where_the_first_has_it_not(index: Index) -> None:
    index.settings |= {
        "index-url": f"http://{index.address}/other",
        "extra-index-url": f"http://{index.address}/empty http://{index.address}/simple/",
    }
    assert _converter.find().is_dir()


def test_an_index_in_files_is_read(index: Index, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "llama-cpp-python" / "index.html"
    page.parent.mkdir(parents=True)
    (page.parent / SDIST).write_bytes(index.data)
    page.write_text(f'<a href="{SDIST}#sha256={hashlib.sha256(index.data).hexdigest()}">x</a>')
    index.settings["index-url"] = (tmp_path / "simple").as_uri()
    assert _converter.find().is_dir() and index.requests == []


def test_a_password_is_sent_and_not_shown(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    index.password = base64.b64encode(b"me:se cret").decode()
    index.settings["index-url"] = f"http://me:se%20cret@{index.address}/simple"
    _converter.find()
    assert "cret" not in caplog.text
    index.name = "other"
    with pytest.raises(ConverterError) as failed:
        _converter._release(_converter._Server({}), index.settings)
    assert "cret" not in str(failed.value)


@pytest.mark.parametrize(
    "spoiled, message",
    [
        ({"sha256": "0" * 64}, f"{SDIST} is not what the index says: its sha256 is "),
        ({"sha256": None}, f"the index has no sha256 for {SDIST}"),
        ({"name": "llama_cpp_python-0.0.1.tar.gz"}, f"no {SDIST} at 127.0.0.1 (it is not there)"),
        ({"password": "x"}, f"no {SDIST} at 127.0.0.1 (HTTP Error 401: Unauthorized)"),
        ({"data": sdist({})}, "has no convert_hf_to_gguf.py"),
        ({"data": sdist(FAKE)[:-200]}, "cannot fetch llama.cpp's converter: "),
        ({"data": gzip.compress(b"no archive" * 100)}, "cannot fetch llama.cpp's converter: "),
    ],
)
def test_what_cannot_be_trusted_or_had_is_refused_and_nothing_kept(
    index: Index, tmp_path: Path, spoiled: dict[str, Any], message: str
) -> None:
    for name, value in spoiled.items():
        setattr(index, name, value)
    with pytest.raises(ConverterError) as refused:
        _converter.find()
    assert message in str(refused.value) and "MOESTREAM_LLAMA_CPP" in str(refused.value)
    assert not list((tmp_path / "cache" / "moestream").iterdir())


def test_without_a_network_the_remedy_is_named(index: Index) -> None:
    index.settings["index-url"] = "http://127.0.0.1:1/simple"
    with pytest.raises(ConverterError, match="(?s)Connection refused.*connect to the network .*MOESTREAM_LLAMA_CPP"):
        _converter.find()


def test_no_index_is_obeyed(index: Index) -> None:
    index.settings["no-index"] = "1"
    with pytest.raises(ConverterError, match="pip is set to no-index.*MOESTREAM_LLAMA_CPP"):
        _converter.find()
    assert index.requests == []


def test_where_no_index_is_set_it_is_the_one_that_pips_help_names(monkeypatch: pytest.MonkeyPatch) -> None:
    help = SimpleNamespace(stdout="  -i, --index-url <url>  Base URL (default\n      https://index.example/simple). This\n")
    monkeypatch.setattr(_converter.subprocess, "run", lambda *args, **options: help)
    assert _converter._default_index() == "https://index.example/simple"
    help.stdout = "usage"
    with pytest.raises(ConverterError, match="pip does not tell its index; set its index-url, or unpack"):
        _converter._default_index()


def test_settings_are_those_of_pip_and_the_environment_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://a\nextra-index-url =\n  http://b\n  http://c\nproxy = x\n[download]\nproxy = y\n"
        "[install]\nproxy = z\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://d")
    found = _converter._pip_settings()
    assert found["extra-index-url"].split() == ["http://b", "http://c"]
    assert (found["index-url"], found["proxy"]) == ("http://d", "y")


def test_without_pip_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESTREAM_LLAMA_CPP", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConverterError, match="pip does not tell its index .*MOESTREAM_LLAMA_CPP"):
        _converter.find()


@pytest.mark.parametrize("below", ["", "vendor/llama.cpp"])
def test_a_folder_that_is_named_goes_before_all(
    index: Index, converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    if below:
        (tmp_path / "sdist" / "vendor").mkdir(parents=True)
        converter.rename(tmp_path / "sdist" / below)
        monkeypatch.setenv("MOESTREAM_LLAMA_CPP", str(tmp_path / "sdist"))
    assert _converter.find() == (tmp_path / "sdist" / below if below else converter)
    assert index.requests == []


def test_a_named_folder_without_a_converter_is_refused(index: Index, converter: Path) -> None:
    (converter / "conversion" / "base.py").unlink()
    with pytest.raises(ConverterError, match="MOESTREAM_LLAMA_CPP=.*: no conversion/base.py in it; name a folder of"):
        _converter.find()


def test_a_cache_that_is_incomplete_is_refused(index: Index) -> None:
    (folder := _converter.find()).joinpath("conversion", "__init__.py").unlink()
    with pytest.raises(ConverterError, match=f"{folder} is incomplete, it lacks conversion/__init__.py: delete that"):
        _converter.find()


def test_a_converter_that_does_not_tell_what_it_knows_is_refused(folder: Path, converter: Path, tmp_path: Path) -> None:
    (converter / "conversion" / "__init__.py").write_text("x = 1")
    with pytest.raises(ConverterError, match="__init__.py has no TEXT_MODEL_MAP"):
        to_gguf(folder, tmp_path / "out.gguf")


# llama.cpp's own converter --------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> None:
    """Skips where it, or what it imports, is not there: a test fetches nothing."""
    if missing := [name for name in huggingface._IMPORTED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}, of the extra hf")
    folder = _converter._cache() / f"llama.cpp-{VERSION}"
    if not (os.environ.get("MOESTREAM_LLAMA_CPP") or folder.is_dir()):
        pytest.skip(f"needs llama.cpp's converter: MOESTREAM_LLAMA_CPP, or {folder}")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json that the converter does not know."""
    pytest.importorskip("tokenizers", reason="needs tokenizers, of the extra hf")
    from measure.families import Bench

    return Bench(tmp_path_factory.mktemp("words"), windows=1).words


@pytest.mark.parametrize("kind", ["smallthinker", "qwen3moe"])
def test_a_demo_models_folder_gives_the_tensors_and_tokens_of_its_own_export(
    real: None, tmp_path: Path, words: Path, kind: str
) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors, of the extra hf")
    import tokenizers

    from demo_model import export
    from demo_model.config import ModelConfig

    config = ModelConfig(kind, vocab_size=512, n_layers=2, d_model=64, head_dim=32, n_experts=8, top_k=2, d_expert=32)
    numbers = np.random.default_rng(0)
    state = {t.name: numbers.standard_normal(t.shape, dtype=np.float32) for t in export.tensors(config)}
    folder = export.to_hugging_face(config, state, words, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    ours = export.to_gguf(config, state, words, tmp_path / "ours.gguf", name="x", description="x", license="MIT")
    to_gguf(folder, tmp_path / "theirs.gguf")

    expected, found = (gguf.GGUFReader(path) for path in (ours, tmp_path / "theirs.gguf"))
    assert {t.name: (t.tensor_type, t.data.tobytes()) for t in found.tensors} == {
        t.name: (t.tensor_type, t.data.tobytes()) for t in expected.tensors
    }
    assert found.fields["tokenizer.chat_template"].contents() == "{{ messages[0]['content'] }}"
    text = "It's 1234567 o'clock,\r\n\n  don't WE'VE \tit?  naïve 漢字 🦙 "
    with contextlib.closing(llama_cpp.Llama(str(tmp_path / "theirs.gguf"), vocab_only=True, verbose=False)) as llm:
        tokens = llm.tokenize(text.encode())
    assert tokens == tokenizers.Tokenizer.from_file(str(words)).encode(text).ids


def test_mxfp4_experts_of_gpt_oss_keep_their_values(real: None, tmp_path: Path, words: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from measure.families import save_random

    save_random("GptOss", words, folder := tmp_path / "model")
    weights = load_file(file := folder / "model.safetensors")
    numbers = np.random.default_rng(0)
    expected = {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = numbers.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = numbers.integers(120, 130, (experts, rows, columns // 32), dtype=np.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)[nibbles & 7] * np.where(nibbles & 8, -1, 1)
        matrix = (values * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(experts, rows, columns)
        layer = name.split(".")[2]
        if "gate_up" in name:
            expected[f"blk.{layer}.ffn_gate_exps.weight"] = matrix[:, ::2]
            expected[f"blk.{layer}.ffn_up_exps.weight"] = matrix[:, 1::2]
        else:
            expected[f"blk.{layer}.ffn_down_exps.weight"] = matrix
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    put(folder / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    to_gguf(folder, tmp_path / "out.gguf")

    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors if t.name in expected}
    assert len(found) == len(expected) == 6
    for name, tensor in found.items():
        assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
        np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected[name])


def test_a_tokenizer_of_another_kind_is_refused_by_the_converter_and_taken_with_the_option(
    real: None, tmp_path: Path, words: Path
) -> None:
    from measure.families import save_random

    save_random("Mixtral", words, folder := tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    put(folder / "tokenizer.json", tokenizer | {"normalizer": {"type": "NFKC"}})
    with pytest.raises(OptionError, match="the option pre_tokenizer"):
        to_gguf(folder, tmp_path / "out.gguf")
    to_gguf(folder, tmp_path / "out.gguf", pre_tokenizer="qwen2")
    assert gguf.GGUFReader(tmp_path / "out.gguf").fields["tokenizer.ggml.pre"].contents() == "qwen2"
