"""llama.cpp's converter of Hugging Face models: where it is on this machine, fetched if it is nowhere.

It is part of the llama.cpp of every release of llama-cpp-python, but only of its source distribution; pip does not install it.
Looked for are, in this order: the folder that MOESTREAM_LLAMA_CPP names; the user's cache; and the source distribution of exactly
the installed version, at the index that pip is set to, whose checksum for it must be met.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import html.parser
import http.client
import importlib.metadata
import json
import logging
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from tqdm import tqdm

from ..errors import ConverterError

__all__ = ["ENVIRONMENT", "architectures", "find", "pre_tokenizers"]

logger = logging.getLogger("moestream.layout")

ENVIRONMENT = "MOESTREAM_LLAMA_CPP"
_NEEDED = ("convert_hf_to_gguf.py", "conversion/__init__.py", "conversion/base.py", "gguf-py/gguf/__init__.py")
_UNPACKED = ("conversion/", "gguf-py/", "models/templates/", "convert_hf_to_gguf.py", "LICENSE")
_TIMEOUT = 30  # seconds without an answer
_REMEDY = (
    f"or unpack llama.cpp or the source distribution of llama-cpp-python yourself, and name the folder in {ENVIRONMENT}"
)


# Where it is ----------------------------------------------------------------------------------------------------------


def find(*, progress: bool = True) -> Path:
    """The folder of llama.cpp with the converter in it.

    Raises:
        ConverterError: The folder that is named lacks it, or it cannot be fetched.
    """
    if named := os.environ.get(ENVIRONMENT):
        for folder in (Path(named), Path(named, "vendor", "llama.cpp")):
            if not _lacking(folder):
                return folder.absolute()
        raise ConverterError(
            f"{ENVIRONMENT}={named}: no {_lacking(Path(named))} in it; "
            f"name a folder of llama.cpp as of llama-cpp-python {_version()}, or an unpacked source distribution of that"
        )
    folder = _cache() / f"llama.cpp-{_version()}"
    if not folder.exists():
        _fetch(folder, progress=progress)
    if lacking := _lacking(folder):
        raise ConverterError(f"{folder} is incomplete, it lacks {lacking}: delete that folder, and it is fetched again")
    return folder


def architectures(converter: Path) -> set[str]:
    """Names of the models with text that the converter knows, as their config.json has them.

    Raises:
        ConverterError: The converter is of a version that does not say.
    """
    file = converter / "conversion" / "__init__.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "TEXT_MODEL_MAP" for target in targets):
            return set(ast.literal_eval(node.value))
    raise ConverterError(f"{file} has no TEXT_MODEL_MAP: it is not of the llama.cpp of llama-cpp-python {_version()}")


def pre_tokenizers(converter: Path) -> set[str]:
    """Names of the pre-tokenizers that the converter knows."""
    return set(re.findall(r'\bres = "([^"]+)"', (converter / "conversion" / "base.py").read_text(encoding="utf-8")))


def _lacking(folder: Path) -> str | None:
    return next((name for name in _NEEDED if not (folder / name).is_file()), None)


def _version() -> str:
    """Of the installed llama-cpp-python, without what a builder appended ("+cu124")."""
    return importlib.metadata.version("llama-cpp-python").partition("+")[0]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moestream"


# Fetching it ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Release:
    """A source distribution at an index."""

    file: str
    url: str
    sha256: str | None


def _fetch(folder: Path, *, progress: bool) -> None:
    """Makes `folder` from the source distribution, whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".", suffix=".part") as part:
            archive, unpacked = Path(part, "sdist.tar.gz"), Path(part, "unpacked")
            _download(archive, progress=progress)
            _unpack(archive, unpacked)
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    except (OSError, http.client.HTTPException, tarfile.TarError, EOFError) as error:
        raise ConverterError(f"cannot fetch llama.cpp's converter: {error}; try again, {_REMEDY}") from error


def _download(archive: Path, *, progress: bool) -> None:
    settings = _pip_settings()
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise ConverterError(f"cannot fetch llama.cpp's converter: pip is set to no-index; unset that, {_REMEDY}")
    server = _Server(settings)
    release = _release(server, settings)
    if release.sha256 is None:
        raise ConverterError(
            f"cannot fetch llama.cpp's converter: the index has no sha256 for {release.file}; {_REMEDY[3:]}"
        )
    digest = hashlib.sha256()
    with server.open(release.url) as answer, archive.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        logger.warning(
            "fetching llama.cpp's converter (MIT licence), once: %s from %s, %s, to %s",
            release.file,
            urlsplit(release.url).hostname or "a local index",
            f"{size / 1e6:.0f} MB" if size else "of a size it does not say",
            _cache(),
        )
        hidden = not (progress and sys.stderr.isatty())
        with tqdm(total=size or None, unit="B", unit_scale=True, desc="fetching", leave=False, disable=hidden) as bar:
            while block := answer.read(1 << 20):
                out.write(block)
                digest.update(block)
                bar.update(len(block))
    if digest.hexdigest() != release.sha256:
        raise ConverterError(
            f"{release.file} is not what the index says: its sha256 is {digest.hexdigest()}, not {release.sha256}; "
            f"try again, {_REMEDY}"
        )


def _release(server: _Server, settings: Mapping[str, str]) -> _Release:
    """The source distribution of the installed version, of the first index that has it."""
    wanted = f"llama_cpp_python-{_version()}.tar.gz"
    asked, reason = [], "it is not there"
    for index in [settings.get("index-url") or _default_index(), *settings.get("extra-index-url", "").split()]:
        page = index.rstrip("/") + "/llama-cpp-python/"
        asked.append(urlsplit(index).hostname or index)
        try:
            for release in server.releases(page):
                # Before PEP 625, names kept their hyphens.
                if release.file.replace("llama-cpp-python-", "llama_cpp_python-") == wanted:
                    return release
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error)
    raise ConverterError(
        f"cannot fetch llama.cpp's converter: no {wanted} at {', '.join(asked)} ({reason}); "
        f"connect to the network or correct pip's index-url, {_REMEDY}"
    )


def _unpack(archive: Path, folder: Path) -> None:
    """Writes what is needed of the llama.cpp in a source distribution: regular files, below `folder`."""
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            path = PurePosixPath(member.name)
            inner = PurePosixPath(*path.parts[3:])
            inside = path.parts[1:3] == ("vendor", "llama.cpp") and not path.is_absolute() and ".." not in path.parts
            if not inside or not member.isfile():
                continue
            if str(inner).startswith(_UNPACKED) and (content := members.extractfile(member)) is not None:
                target = folder / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as out:
                    shutil.copyfileobj(content, out)
    if lacking := _lacking(folder):
        raise ConverterError(
            f"the source distribution of llama-cpp-python {_version()} has no {lacking}; {_REMEDY[3:]}"
        )


# pip's index ----------------------------------------------------------------------------------------------------------


def _default_index() -> str:
    """The index that pip takes where none is set, by its own help."""
    told = subprocess.run([sys.executable, "-m", "pip", "help", "download"], capture_output=True, text=True)
    if (found := re.search(r"--index-url.*?\(default\s+(https://\S+?)\)", told.stdout, re.DOTALL)) is None:
        raise ConverterError(
            f"cannot fetch llama.cpp's converter: pip does not tell its index; set its index-url, {_REMEDY}"
        )
    return found[1]


def _pip_settings() -> dict[str, str]:
    """What pip is set to, by its configuration files and, before these, the environment; names as those of its options."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    if listed.returncode != 0:
        said = (listed.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConverterError(
            f"cannot fetch llama.cpp's converter: pip does not tell its index ({said}); install pip, {_REMEDY}"
        )
    found: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            if section in found:
                found[section][option] = str(ast.literal_eval(value))
    return found["global"] | found["download"] | found[":env:"]


class _Server:
    """Reads what indexes offer, with the certificates, the proxy and the passwords that pip is set to."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.get("cert")))
        ]
        if proxy := settings.get("proxy"):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self._opener = urllib.request.build_opener(*handlers)
        self._passwords: dict[str, str] = {}

    def open(self, url: str, accept: str = "*/*") -> IO[bytes]:
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._passwords[place] = "Basic " + base64.b64encode(pair.encode()).decode()
        request = urllib.request.Request(parts._replace(netloc=place).geturl(), headers={"Accept": accept})
        if place in self._passwords:
            request.add_unredirected_header("Authorization", self._passwords[place])
        return self._opener.open(request, timeout=_TIMEOUT)

    def releases(self, page: str) -> Iterator[_Release]:
        """All files on a project's page, which may be of either form that pip reads (PEP 691, PEP 503)."""
        if page.startswith("file:"):
            page += "index.html"
        with self.open(page, "application/vnd.pypi.simple.v1+json, text/html;q=0.1") as answer:
            kind, text = answer.headers.get_content_type(), answer.read().decode("utf-8")
        if kind.endswith("json"):
            for file in json.loads(text)["files"]:
                yield _Release(file["filename"], urljoin(page, file["url"]), file.get("hashes", {}).get("sha256"))
            return
        links = _Links()
        links.feed(text)
        for link in links.found:
            url, fragment = urldefrag(urljoin(page, link))
            sha256 = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
            yield _Release(PurePosixPath(unquote(urlsplit(url).path)).name, url, sha256[1] if sha256 else None)


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]
