"""llama.cpp's converter in a process of its own, for it brings its own gguf. Run by `huggingface.py` as a file, with the request:

    python _convert_hf.py '{"converter": DIR, "folder": DIR, "out": FILE, "dtype": "f16", "pre_tokenizer": null, "recognised": null}'

Of what it prints, the lines that begin with EVENT are JSON for the parent, and the others the converter's log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

EVENT = "@moestream "


def tell(**event: Any) -> None:
    print(EVENT + json.dumps(event), flush=True)


class Bar:
    """Takes the place of tqdm where the converter writes the tensors: the bar is the parent's."""

    def __init__(self, *, total: int, **_: Any) -> None:
        self.n, self.total = 0, total

    def update(self, size_bytes: int) -> None:
        self.n += size_bytes
        tell(written=self.n, total=self.total)

    def close(self) -> None:
        pass


def choose_pre_tokenizer(text_model: Any, wanted: str | None, recognised: str | None) -> None:
    """Lets `wanted` go before what the converter knows by its hashes, and `recognised` come after it."""
    by_hash = text_model.get_vocab_base_pre

    def choose(self: Any, tokenizer: Any) -> str:
        if wanted is not None:
            tell(pre_tokenizer=wanted, how="wanted")
            return wanted
        try:
            return by_hash(self, tokenizer)
        except NotImplementedError:
            tell(pre_tokenizer=recognised, how="recognised")
            if recognised is None:
                sys.exit(1)
            return recognised

    text_model.get_vocab_base_pre = choose


def main() -> None:
    request = json.loads(sys.argv[1])
    converter = request["converter"]
    # Not the folder of this file, whose modules are no one else's.
    sys.path[:1] = [converter, os.path.join(converter, "gguf-py")]
    try:
        import tqdm

        tqdm.tqdm = Bar
        import convert_hf_to_gguf
        from conversion import TextModel

        choose_pre_tokenizer(TextModel, request["pre_tokenizer"], request["recognised"])
        options = ["--outfile", request["out"], "--outtype", request["dtype"]]
        sys.argv = ["convert_hf_to_gguf.py", request["folder"], *options]
        convert_hf_to_gguf.main()
    except ModuleNotFoundError as error:
        tell(missing=error.name)
        raise
    except Exception as error:
        # An assertion says nothing; the line that failed does.
        place = traceback.extract_tb(error.__traceback__)[-1]
        tell(error=f"{type(error).__name__}: {str(error).strip() or place.line}")
        raise


if __name__ == "__main__":
    main()
