"""moestream and the llama.cpp it plugs into belong together, and an import says so when they do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moestream import _native


def test_a_llama_cpp_python_of_another_version_is_an_import_error_with_both_versions_and_the_remedy() -> None:
    with pytest.raises(ImportError) as raised:
        _native.verify_versions("0.3.99", "0.3.36")
    message = str(raised.value)
    assert "0.3.36" in message and "0.3.99" in message
    assert "pip install --force-reinstall --no-deps llama-cpp-python==0.3.36" in message


def test_plug_in_structs_that_differ_are_an_import_error_with_what_differs() -> None:
    def differs(message: object, size: int) -> int:
        _native.ffi.buffer(message, size)[:12] = b"struct moved"
        return -71

    with pytest.raises(ImportError, match="struct moved.*0.3.36.*pip install"):
        _native.verify_interface(SimpleNamespace(ms_abi_check=differs), "0.3.36", "0.3.36")


def test_the_installed_library_passes_its_own_check() -> None:
    message = _native.ffi.new("char[]", _native.MESSAGE_BYTES)
    assert _native.lib.ms_abi_check(message, _native.MESSAGE_BYTES) == 0, _native.text(message)
