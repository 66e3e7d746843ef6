"""Measure the cost of traces, with traces off and on in turns: `make bench NAME=traces`.

All messages have a traceparent in their headers. Two handlers do nothing, so their ratios are those
of streamqd's own work, which is the worst case. The third one parses real lines of a log. Each
sampled run has one span, which is exported to a collector in another process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.benchmarks import access_log, quick
from tests.benchmarks.bars import Bar, Work, measure_in_turns, print_bars
from tests.benchmarks.throughput import daemon_work
from tests.support.machine import machine

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
SHAPES = {
    "one by one": ("nothing", ""),
    "coroutines": ("later", "concurrency = 64\n"),
    "log lines": (f"{access_log.__name__}:hits", ""),
}


def main() -> None:
    """Run all measurements, and print JSON and the bars."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    results: dict[str, Any] = {"machine": machine(), "messages": options.messages}
    bars: list[Bar] = []
    with quick.server(aof=False) as path, collector() as address:
        for shape, (handler, extra) in SHAPES.items():
            bodies = access_log.lines() if shape == "log lines" else [quick.PAYLOAD]
            kinds = _kinds(path, options.messages, handler, extra, bodies, address)
            works = measure_in_turns(kinds, options.rounds)
            results[shape] = {
                name: {
                    "messages/s": round(statistics.median(each.rate for each in found)),
                    "worker CPU, us/message": round(
                        statistics.median(each.workers_us for each in found), 2
                    ),
                    "ratio to off": round(
                        statistics.median(
                            each.rate / off.rate
                            for each, off in zip(found, works["off"], strict=True)
                        ),
                        3,
                    ),
                }
                for name, found in works.items()
            }
            ratio = results[shape]["unsampled"]["ratio to off"]
            bars.append(Bar(f"{shape}, unsampled: messages/s", ratio, 0.95))
    print(json.dumps(results, indent=2))
    results["bars"] = print_bars(bars)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def _kinds(
    path: str, count: int, handler: str, extra: str, bodies: Sequence[bytes], address: str
) -> dict[str, Callable[[], Work]]:
    on = {"STREAMQ_TELEMETRY__TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": address}

    def work(flags: str, env: dict[str, str], messages: int = count) -> Work:
        headers = json.dumps({"traceparent": TRACE + flags}, separators=(",", ":")).encode()
        more = (b"headers", headers)
        return daemon_work(path, messages, handler, extra, bodies=bodies, more=more, env=env)

    return {
        "off": lambda: work("00", {}),
        "unsampled": lambda: work("00", on),
        "sampled": lambda: work("01", on, count // 4),
    }


@contextmanager
def collector() -> Iterator[str]:
    """Run a process that accepts spans and forgets them, and yield its address."""
    ports: Any = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=_collect, args=(ports,))
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}"
    finally:
        process.terminate()
        process.join()


def _collect(ports: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ports.put(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()
