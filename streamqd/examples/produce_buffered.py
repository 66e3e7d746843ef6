"""Send sensor readings to the topic `readings` through a buffer, many messages per write.

    python -m streamqd.examples.produce_buffered redis://localhost:6379/0 < readings.txt

Each line is `SENSOR VALUE`. Readings of one sensor stay in order, and expire after one hour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import Future

from streamqd import BufferedProducer, BufferFullError, StreamqdError, Uid


def send(url: str, lines: Iterable[str]) -> tuple[int, int]:
    """Send one message per line. Return how many messages were written and how many failed."""
    written = lost = 0

    def count(receipt: Future[Uid]) -> None:
        nonlocal written, lost
        if receipt.exception() is None:
            written += 1
        else:
            lost += 1

    with BufferedProducer(url, linger="20ms", block="10s") as producer:
        for line in lines:
            sensor, value = line.split()
            try:
                receipt = producer.send("readings", float(value), key=sensor, expires=3600)
            except BufferFullError:
                lost += 1  # Redis is too slow or unavailable: drop the value, or stop reading
            else:
                receipt.add_done_callback(count)
    return written, lost


if __name__ == "__main__":
    try:
        written, lost = send(sys.argv[1], sys.stdin)
    except StreamqdError as error:
        sys.exit(f"Error: {error}")
    sys.stdout.write(f"{written} written, {lost} not\n")
