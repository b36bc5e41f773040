"""Models from the Hugging Face Hub: which files of a repository make up one, and their download.

The Hub is asked first; where it cannot be reached, what was downloaded before
is enough.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import ModelError, OptionError

__all__ = ["PREFERRED_QUANT", "choose_files", "download", "list_files", "matching_file", "read_range", "split_set"]

PREFERRED_QUANT = "Q4_K_M"
_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def list_files(
    repo: str, *, local_dir: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> list[str]:
    """The names of the files of ``repo``; without a network those that were downloaded before.

    Raises:
        OptionError: ``repo`` is not of the form user/repo.
        ModelError: the Hub does not have it, does not give it, or cannot be reached.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import BadRequestError, HTTPError, RepositoryNotFoundError

    with _told(repo):
        try:
            return [file.rfilename for file in hub.model_info(repo, timeout=10).siblings or ()]
        except (RepositoryNotFoundError, BadRequestError):
            raise
        except (OSError, HTTPError):  # no network, or the Hub is down
            snapshot = Path(
                hub.snapshot_download(repo, local_files_only=True, local_dir=local_dir, cache_dir=cache_dir)
            )
            return [str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()]


def download(
    repo: str,
    files: Sequence[str],
    *,
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Downloads those of ``files`` that are not on this machine yet, into ``local_dir`` or the Hub's cache.

    Raises:
        OptionError, ModelError: as :func:`list_files`.
    """
    import huggingface_hub as hub

    with _told(repo):
        return [Path(hub.hf_hub_download(repo, file, local_dir=local_dir, cache_dir=cache_dir)) for file in files]


def read_range(repo: str, file: str, begin: int, end: int) -> tuple[bytes, int]:
    """Bytes ``begin`` to ``end`` of a file, or up to its end, without downloading it; and the size of the file.

    Raises:
        OptionError, ModelError: as :func:`list_files`; or the server gives whole files only.
    """
    import huggingface_hub as hub
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}"}
    with _told(repo):
        answer = get_session().get(hub.hf_hub_url(repo, file), headers=headers, timeout=30)
        hf_raise_for_status(answer)
    size = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if size is None:
        raise ModelError(f"{repo}, {file}: the server does not give parts of files; download the model, then plan for the file")
    return answer.content, int(size[1])


def choose_files(repo: str, files: Sequence[str], *, quant: str | None = None, name: str | None = None) -> list[str]:
    """The files of a repository that make up the wanted model: one GGUF, or all shards of a split set in order.

    The rule is llama.cpp's: ``name``, or the GGUF of type ``quant``, or by
    default the one of type Q4_K_M, else the first.

    Raises:
        ModelError: ``repo`` has no such model.
    """
    models = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    if name is not None:
        chosen = name if name in files else None
    else:
        wanted = re.compile(rf"(?:^|[-._/]){re.escape(quant or PREFERRED_QUANT)}(?=[-._/])", re.IGNORECASE)
        matches = [file for file in models if wanted.search(file)]
        if not matches and quant is None:
            matches = models[:1]
        # "Q4_K_M" is also a part of "UD-Q4_K_M"; the shortest name is the plain one.
        chosen = min(matches, key=lambda file: (len(file), file), default=None)
    if chosen is None:
        raise ModelError(
            f"{repo} has no {name or f'GGUF file of type {quant or PREFERRED_QUANT}'}; it has {_listed(files)}"
        )
    return split_set(chosen)


def split_set(name: str) -> list[str]:
    """All files of the set that the shard ``name`` is of, in order; a file that is no shard is a set of one."""
    if not (shard := _SHARD.search(name)):
        return [name]
    stem, count = name[: shard.start()], int(shard[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def matching_file(repo: str, files: Sequence[str], pattern: str) -> str:
    """The one file of ``files`` that ``pattern``, a name or a glob pattern, matches; of a split set its first shard.

    Raises:
        ModelError: none matches, or several do.
    """
    matches = [file for file in files if fnmatch.fnmatch(file, pattern)]
    if not matches:
        raise ModelError(f"{repo} has no {pattern}; it has {_listed(files)}")
    if len({split_set(file)[0] for file in matches}) > 1:
        raise ModelError(f"{pattern} matches several files of {repo}: {', '.join(sorted(matches))}; name one of them")
    return split_set(matches[0])[0] if len(matches) > 1 else matches[0]


def _listed(files: Sequence[str]) -> str:
    return ", ".join(sorted(file for file in files if file.endswith(".gguf"))) or "no GGUF file at all"


@contextlib.contextmanager
def _told(repo: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into errors of ours."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as exc:
        raise ModelError(f"{repo} is gated: accept its terms at the Hub, then run 'hf auth login'") from exc
    except RepositoryNotFoundError as exc:
        raise ModelError(f"the Hugging Face Hub has no {repo}, or only after 'hf auth login'") from exc
    except LocalEntryNotFoundError as exc:
        raise ModelError(f"cannot reach the Hugging Face Hub, and {repo} was not downloaded before") from exc
    except HFValidationError as exc:
        raise OptionError(f"{repo}: a repository is named USER/REPO") from exc
    except (OSError, HTTPError) as exc:
        raise ModelError(f"cannot download from {repo}: {str(exc).splitlines()[0]}") from exc
