"""How fast a disk brings a model's experts: random reads of one expert's size, as many at a time as a layer asks for.

    python -m moestream.bench.reads '{"path": "m.gguf", "size": 2654208, "depth": 8, "seconds": 0.7}'

Prints {"bytes_per_s": ..., "direct": ...}. The reads are the engine's own. A process of its own, so that it can be run within the
limits of an arm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .._probe_reads import read_rate


def main() -> None:
    asked = json.loads(sys.argv[1])
    found, direct = read_rate(Path(asked["path"]), asked["size"], depth=asked["depth"], seconds=asked["seconds"])
    print(json.dumps({"bytes_per_s": found, "direct": direct}))


if __name__ == "__main__":
    main()
