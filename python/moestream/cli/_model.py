"""Which model file a command works on: the one named, one from the Hugging Face Hub, or the packaged one."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelError, OptionError

_PREFERRED_QUANT = "Q4_K_M"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help="the GGUF file, or the first of a split set (default: the model shipped with the package)",
    )
    add_hub_arguments(parser)


def add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-hf",
        "--hf-repo",
        metavar="USER/REPO[:QUANT]",
        help=f"take it from the Hugging Face Hub, downloaded once (default QUANT: {_PREFERRED_QUANT}, else the first)",
    )
    parser.add_argument("-hff", "--hf-file", metavar="FILE", help="the file in that repository, instead of a QUANT")


def default_model() -> Path:
    """The path of the model that ships with the package.

    Raises:
        OptionError: This build of the package ships none.
    """
    path = importlib.resources.files("moestream") / "models" / "demo.gguf"
    if not path.is_file():
        raise OptionError("no model is shipped with this version of moestream: name one with -m FILE or -hf USER/REPO")
    return Path(str(path))


def locate(model: str | os.PathLike[str] | None, hf_repo: str | None, hf_file: str | None) -> Path:
    """The model file that the options name, downloaded first if it comes from the Hub.

    Raises:
        OptionError: The options contradict each other or name no model.
        ModelError: The Hub does not have it or cannot be reached.
    """
    if model is not None and hf_repo is not None:
        raise OptionError("both a model file and -hf are given: name the model once")
    if hf_file is not None and hf_repo is None:
        raise OptionError("--hf-file names a file in a repository: give that with -hf USER/REPO")
    if hf_repo is not None:
        return _download(hf_repo, hf_file)
    return Path(model) if model is not None else default_model()


def choose_files(files: Sequence[str], *, quant: str | None, name: str | None) -> list[str]:
    """The files of a repository that make up the wanted model: one GGUF, or all shards of a split set in order.

    The rule is llama.cpp's: `name`, or the GGUF of type `quant`, or by default the one of type Q4_K_M, else the first.

    Returns:
        An empty list if the repository has no such model.
    """
    models = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    if name is not None:
        chosen = name if name in files else None
    else:
        wanted = re.compile(rf"(?:^|[-._/]){re.escape(quant or _PREFERRED_QUANT)}(?=[-._/])", re.IGNORECASE)
        matches = [file for file in models if wanted.search(file)]
        if not matches and quant is None:
            matches = models[:1]
        # "Q4_K_M" is also a part of "UD-Q4_K_M"; the shortest name is the plain one.
        chosen = min(matches, key=lambda file: (len(file), file), default=None)
    if chosen is None:
        return []
    if shard := _SHARD.search(chosen):
        stem, count = chosen[: shard.start()], int(shard[2])
        return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    return [chosen]


def _download(hf_repo: str, hf_file: str | None) -> Path:
    """Downloads what is not in the Hub's cache on this machine yet; works without a network if all of it is."""
    import huggingface_hub as hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    repo, _, quant = hf_repo.partition(":")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        try:
            files = [file.rfilename for file in hub.model_info(repo, timeout=10).siblings or ()]
        except (RepositoryNotFoundError, ValueError):
            raise
        except (OSError, HTTPError):  # no network, or the Hub is down: what was downloaded before may be enough
            snapshot = Path(hub.snapshot_download(repo, local_files_only=True))
            files = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()]
        chosen = choose_files(files, quant=quant or None, name=hf_file)
        if not chosen:
            wanted = hf_file or f"GGUF file of type {quant or _PREFERRED_QUANT}"
            there = ", ".join(sorted(file for file in files if file.endswith(".gguf"))) or "no GGUF file at all"
            raise ModelError(f"{repo} has no {wanted}; it has {there}")
        paths = [Path(hub.hf_hub_download(repo, file)) for file in chosen]
        return paths[0]
    except GatedRepoError as exc:
        raise ModelError(f"{repo} is gated: accept its terms at the Hub, then run 'hf auth login'") from exc
    except RepositoryNotFoundError as exc:
        raise ModelError(f"the Hugging Face Hub has no {repo}, or only after 'hf auth login'") from exc
    except LocalEntryNotFoundError as exc:
        raise ModelError(f"cannot reach the Hugging Face Hub, and {repo} was not downloaded before") from exc
    except HFValidationError as exc:
        raise OptionError(f"-hf {hf_repo}: a repository is named USER/REPO, with :QUANT if wanted") from exc
    except (OSError, HTTPError) as exc:
        raise ModelError(f"cannot download from {repo}: {str(exc).splitlines()[0]}") from exc
