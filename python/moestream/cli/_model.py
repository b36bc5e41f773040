"""Which model file a command works on: the one named, one from the Hugging Face Hub, or the packaged one."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .. import _hub
from ..errors import OptionError
from ..models import demo_model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help="the GGUF file, or the first of a split set (default: the model shipped with the package)",
    )
    add_hub_arguments(parser)


def add_hub_arguments(parser: argparse.ArgumentParser, how: str = "downloaded once") -> None:
    parser.add_argument(
        "-hf",
        "--hf-repo",
        metavar="USER/REPO[:QUANT]",
        help=f"take it from the Hugging Face Hub, {how} (default QUANT: {_hub.PREFERRED_QUANT}, else the first)",
    )
    parser.add_argument("-hff", "--hf-file", metavar="FILE", help="the file in that repository, instead of a QUANT")


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
    return Path(model) if model is not None else demo_model()


def _download(hf_repo: str, hf_file: str | None) -> Path:
    """Downloads what is not in the Hub's cache on this machine yet; works without a network if all of it is."""
    from huggingface_hub.utils import disable_progress_bars

    repo, _, quant = hf_repo.partition(":")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        chosen = _hub.choose_files(repo, _hub.list_files(repo), quant=quant or None, name=hf_file)
    except OptionError as exc:
        raise OptionError(f"-hf {exc}, with :QUANT if wanted") from exc
    return _hub.download(repo, chosen)[0]
