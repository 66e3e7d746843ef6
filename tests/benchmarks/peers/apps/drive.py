"""Send jobs, in the environment of one system: `python drive.py APP MODE COUNT`.

MODE is single, bulk, paced (RATE per second), numbered (each payload is a number, starting at 0),
or trickle (one per second).

The module APP has two functions. `single(payloads)` sends payloads one by one as they arrive.
`bulk(payloads)` sends a list in the way that its system's documentation recommends. The program
prints the elapsed seconds.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator

PAYLOAD = "x" * 100
RATE = 200  # payloads per second, when paced


def main() -> None:
    """Send, then print the elapsed seconds."""
    app = importlib.import_module(sys.argv[1])
    mode, count = sys.argv[2], int(sys.argv[3])
    app.single([PAYLOAD] * min(count, 1))  # after this, connections and scripts are ready
    began = time.perf_counter()
    if mode == "single":
        app.single(PAYLOAD for _ in range(count - 1))
    elif mode == "bulk":
        app.bulk([PAYLOAD] * (count - 1))
    elif mode == "numbered":
        app.single(f"{number:020d}".ljust(100, "x") for number in range(count - 1))
    elif mode == "trickle":
        app.single(_trickle(count - 1))
    else:
        app.single(_paced(count - 1))
    print(time.perf_counter() - began)


def _paced(count: int) -> Iterator[str]:
    begin = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, begin + number / RATE - time.monotonic()))
        yield f"{time.monotonic_ns():020d}".ljust(100, "x")


def _trickle(count: int) -> Iterator[str]:
    for _ in range(count):
        time.sleep(1)
        yield PAYLOAD


if __name__ == "__main__":
    main()
