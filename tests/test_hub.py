"""Models from the Hugging Face Hub, through `Llama.from_pretrained` and `-hf`. The Hub is a fake one."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

import fake_hub
import moestream
from factory import make
from fake_hub import REPO
from isolation import isolated
from moestream._hub import choose_files, matching_file

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is in the repository: a model, one in two shards in a folder of its own, and a text."""
    folder = tmp_path_factory.mktemp("models")
    whole, first = make(folder, "qwen3moe", "Q4_0"), make(folder, "qwen3moe", "Q8_0", split=2)
    second = first.with_name(first.name.replace("-00001-", "-00002-"))
    (folder / "README.md").write_text("A model.")
    return {
        "README.md": folder / "README.md",
        "m-Q4_0.gguf": whole,
        "Q8_0/m-Q8_0-00001-of-00002.gguf": first,
        "Q8_0/m-Q8_0-00002-of-00002.gguf": second,
    }


@pytest.fixture
def hub(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with fake_hub.serving(files) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield address


def _load(*args: Any, **kwargs: Any) -> str:
    """The path of the model that was loaded, or the error."""
    options = {"n_ctx": 64, "n_threads": 1, "verbose": False, "expert_streaming": True, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with contextlib.closing(moestream.Llama.from_pretrained(*args, **options)) as llm:
                llm.eval([1, 2])
                return llm.model_path
        except (moestream.MoestreamError, DeprecationWarning) as error:
            return f"{type(error).__name__}: {error}"


def load(*args: Any, **kwargs: Any) -> str:
    return isolated(_load, *args, **kwargs)


def test_signature_is_stocks() -> None:
    assert list(inspect.signature(moestream.Llama.from_pretrained).parameters) == list(
        inspect.signature(llama_cpp.Llama.from_pretrained).parameters
    )


@pytest.mark.parametrize("pattern", ["m-Q4_0.gguf", "*Q4_0.gguf"])
def test_model_is_downloaded_to_the_cache_and_streamed(hub: str, tmp_path: Path, pattern: str) -> None:
    path = load(REPO, pattern)
    assert path.startswith(str(tmp_path / "cache")) and path.endswith("/m-Q4_0.gguf")


def test_without_a_name_the_first_model_is_taken_where_none_is_q4_k_m(hub: str) -> None:
    assert load(REPO, None).endswith("/m-Q8_0-00001-of-00002.gguf")


def test_model_that_was_downloaded_needs_no_network(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = load(REPO, "m-Q4_0.gguf")
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert load(REPO, "m-Q4_0.gguf") == path


@pytest.mark.parametrize("pattern", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "*Q8_0*"])
def test_all_shards_of_a_split_model_are_downloaded(hub: str, pattern: str) -> None:
    path = Path(load(REPO, pattern))
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert path.with_name("m-Q8_0-00002-of-00002.gguf").is_file()


def test_shards_named_as_additional_files_are_those_of_the_model(hub: str) -> None:
    """As stock wants it."""
    path = load(REPO, "*-00001-of-*", additional_files=["*-00002-of-*", "README.md"])
    assert path.endswith("-00001-of-00002.gguf")
    assert (Path(path).parent.parent / "README.md").is_file()


def test_local_folder_and_other_cache_are_used(hub: str, tmp_path: Path) -> None:
    local = load(REPO, "*Q8_0-00001*", local_dir=str(tmp_path / "here"))
    assert local == str(tmp_path / "here/Q8_0/m-Q8_0-00001-of-00002.gguf")
    assert load(REPO, "m-Q4_0.gguf", cache_dir=str(tmp_path / "there")).startswith(str(tmp_path / "there"))


def test_without_streaming_it_is_a_plain_llama(hub: str) -> None:
    assert load(REPO, "m-Q4_0.gguf", expert_streaming=False).endswith("m-Q4_0.gguf")


@pytest.mark.parametrize(
    "kwargs", [{"n_cxt": 64}, {"revision": "main"}, {"model_path": "x.gguf"}], ids=lambda k: next(iter(k))
)
def test_unknown_keyword_is_refused_before_anything_is_downloaded(
    hub: str, tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    assert load(REPO, "m-Q4_0.gguf", **kwargs).startswith(f"OptionError: unknown keyword '{next(iter(kwargs))}'")
    assert not (tmp_path / "cache" / "hub").exists()


def test_keyword_that_does_nothing_says_so(hub: str) -> None:
    told = load(REPO, "m-Q4_0.gguf", local_dir_use_symlinks=True)
    assert told == "DeprecationWarning: local_dir_use_symlinks has had no effect since huggingface_hub 0.23"


@pytest.mark.parametrize(
    "repo, pattern, message",
    [
        (REPO, "*Q2_K*", f"ModelError: {REPO} has no *Q2_K*; it has Q8_0/m-Q8_0-00001-of-00002.gguf, "),
        (REPO, "*.gguf", f"ModelError: *.gguf matches several files of {REPO}: Q8_0/m-Q8_0-00001-of-00002.gguf, "),
        ("user/none", "x", "ModelError: the Hugging Face Hub has no user/none, or only after 'hf auth login'"),
        ("user/gated", "x", "ModelError: user/gated is gated: accept its terms at the Hub, then run 'hf auth login'"),
        ("no such name", "x", "OptionError: no such name: a repository is named USER/REPO"),
    ],
)
def test_what_the_hub_does_not_give_is_told(hub: str, repo: str, pattern: str, message: str) -> None:
    assert load(repo, pattern).startswith(message)


def test_without_a_network_and_a_cache_it_says_so(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert load(REPO, "x") == f"ModelError: cannot reach the Hugging Face Hub, and {REPO} was not downloaded before"


# Which files


FILES = [
    "README.md",
    "big-Q8_0-00001-of-00002.gguf",
    "big-Q8_0-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_0.gguf",
]


@pytest.mark.parametrize(
    "quant, name, chosen",
    [
        (None, None, ["m-Q4_K_M.gguf"]),
        ("q4_0", None, ["m-Q4_0.gguf"]),
        ("Q8_0", None, ["big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf"]),
        (None, "m-Q4_0.gguf", ["m-Q4_0.gguf"]),
    ],
)
def test_files_of_a_repository_are_chosen_as_llama_cpp_does(
    quant: str | None, name: str | None, chosen: list[str]
) -> None:
    assert choose_files(REPO, FILES, quant=quant, name=name) == chosen


def test_first_model_is_taken_where_none_is_q4_k_m() -> None:
    assert choose_files(REPO, ["b-Q8_0.gguf", "a-Q6_K.gguf"]) == ["a-Q6_K.gguf"]


@pytest.mark.parametrize(
    "quant, name, wanted",
    [
        ("Q2_K", None, "GGUF file of type Q2_K"),
        ("F16", None, "GGUF file of type F16"),
        (None, "other.gguf", "other.gguf"),
    ],
)
def test_repository_without_the_wanted_file_says_what_it_has(quant: str | None, name: str | None, wanted: str) -> None:
    with pytest.raises(moestream.ModelError, match=f"^{REPO} has no {wanted}; it has big-Q8_0-00001-of-00002.gguf, "):
        choose_files(REPO, FILES, quant=quant, name=name)


def test_pattern_may_match_one_model_only() -> None:
    assert matching_file(REPO, FILES, "*-Q8_0-*") == "big-Q8_0-00001-of-00002.gguf"
    with pytest.raises(moestream.ModelError, match="^m-.* matches several files of user/repo: m-Q4_0.gguf, m-Q4_K_M"):
        matching_file(REPO, FILES, "m-*")
