"""What all tests have in common: a folder for models, and nothing remembered in, or taken from, the user's cache folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from factory import make


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a file of tests: a model that is made in it twice is made once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make(folder)
