"""How fast a disk brings a model's experts: random reads of one expert's size, as many at a time as a layer asks for.

    python reads.py '{"path": "m.gguf", "begin": 0, "end": 17000000000, "size": 2654208, "depth": 8, "seconds": 0.7}'

Prints {"bytes_per_s": ..., "direct": ...}. A process of its own, so that it can be run within the limits of an arm. It imports
nothing of the package, as worker.py does not.
"""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import random
import sys
import time

PAGE = mmap.PAGESIZE


def main() -> None:
    asked = json.loads(sys.argv[1])
    file, direct = _open(asked["path"])
    size = -(-asked["size"] // PAGE) * PAGE
    last_page = (asked["end"] - size) // PAGE
    first_page = min(asked["begin"] // PAGE, last_page)
    begun = time.perf_counter()

    def read_on(seed: int) -> int:
        draw, buffer, done = random.Random(seed), mmap.mmap(-1, size), 0
        with memoryview(buffer) as view:
            while time.perf_counter() - begun < asked["seconds"]:
                at, got = draw.randint(first_page, last_page) * PAGE, 0
                while got < size:
                    n = os.preadv(file, [view[got:]], at + got)
                    if n == 0:
                        break
                    got += n
                done += got
        return done

    with concurrent.futures.ThreadPoolExecutor(asked["depth"]) as threads:
        read = sum(threads.map(read_on, range(asked["depth"])))
    print(json.dumps({"bytes_per_s": read / (time.perf_counter() - begun), "direct": direct}))


def _open(path: str) -> tuple[int, bool]:
    """Past the page cache, if the file system serves such reads; else what is in it is given up first."""
    if hasattr(os, "O_DIRECT"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(file, [mmap.mmap(-1, PAGE)], 0)
                return file, True
            except OSError:
                os.close(file)
        except OSError:
            pass
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file, False


if __name__ == "__main__":
    main()
