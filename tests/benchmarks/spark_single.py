"""The baseline for Spark: one tuned process that knows its data and guarantees nothing.

    python -m tests.benchmarks.spark_single read|archive|write SOCKET FOLDER STREAM…

It uses a bare socket, hiredis, pages of 5,000 entries whose only fields are payload and key, no
cycle collection, and pyarrow with one thread. It does not resume, check for trimming, call fsync or
write a manifest. It prints the rows, and the seconds and CPU seconds of the work without the start.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hiredis
import pyarrow as pa
from pyarrow import compute, parquet

PAGE = 5_000
GROUP_ROWS = 1 << 17
BATCH = 500  # entries per write


class Connection:
    """A socket and a parser."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.reader = hiredis.Reader()
        self.buffer = bytearray(1 << 18)

    def ask(self, *command: str) -> Any:
        self.sock.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]
        return self.reply()

    def reply(self) -> Any:
        while (found := self.reader.gets()) is False:
            size = self.sock.recv_into(self.buffer)
            self.reader.feed(self.buffer, 0, size)  # type: ignore[arg-type]
        return found


def batches(connection: Connection, stream: str) -> Iterator[pa.RecordBatch]:
    """Yield all entries of a stream."""
    start = "-"
    while page := connection.ask("XRANGE", stream, start, "+", "COUNT", str(PAGE)):
        yield batch(page)
        start = "(" + page[-1][0].decode()


def batch(page: list[Any]) -> pa.RecordBatch:
    """Convert entries whose fields are payload and key."""
    ids = pa.array([entry[0] for entry in page], pa.string())
    flat = list(itertools.chain.from_iterable([entry[1] for entry in page]))
    ms = compute.utf8_slice_codeunits(ids, 0, 13).cast(pa.int64())
    columns = {
        "key": pa.array(flat[3::4], pa.binary()),
        "value": pa.array(flat[1::4], pa.binary()),
        "id": ids,
        "id_ms": ms,
        "id_seq": compute.utf8_slice_codeunits(ids, 14).cast(pa.int64()),
        "timestamp": compute.multiply(ms, 1000).cast(pa.timestamp("us", "UTC")),
    }
    return pa.RecordBatch.from_pydict(columns)


def read(connection: Connection, _folder: Path, streams: list[str]) -> int:
    """Read the streams into Arrow, and keep nothing."""
    return sum(each.num_rows for stream in streams for each in batches(connection, stream))


def archive(connection: Connection, folder: Path, streams: list[str]) -> int:
    """Read the streams into zstd Parquet, one file per stream, with the same row groups as ours."""
    total = 0
    for number, stream in enumerate(streams):
        writer, held, rows = None, [], 0
        for each in batches(connection, stream):
            if writer is None:
                writer = parquet.ParquetWriter(
                    folder / f"{number}.parquet", each.schema, compression="zstd",
                    use_dictionary=["key"],
                )  # fmt: skip
            held.append(each)
            rows += each.num_rows
            total += each.num_rows
            if rows >= GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(held), row_group_size=GROUP_ROWS)
                held, rows = [], 0
        if writer is not None:
            if held:
                writer.write_table(pa.Table.from_batches(held), row_group_size=GROUP_ROWS)
            writer.close()
    return total


def write(connection: Connection, folder: Path, streams: list[str]) -> int:
    """Write Parquet files with key and value to streams, with a plain packed XADD.

    The baseline has no protection against writing rows twice.
    """
    total = 0
    for number, path in enumerate(sorted(folder.rglob("*.parquet"))):
        stream = streams[number % len(streams)]
        for each in parquet.ParquetFile(path).iter_batches(BATCH, columns=["key", "value"]):
            keys, values = each["key"].to_pylist(), each["value"].to_pylist()
            connection.sock.sendall(
                b"".join(
                    hiredis.pack_command(("XADD", stream, "*", "payload", value, "key", key))  # type: ignore[arg-type]
                    for key, value in zip(keys, values, strict=True)
                )
            )
            for _ in keys:
                connection.reply()
            total += len(keys)
    return total


def main() -> None:
    """Do the work that the arguments name, and print one line of JSON."""
    work, path, folder, *streams = sys.argv[1:]
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    connection = Connection(path)
    gc.disable()
    began, cpu = time.monotonic(), time.process_time()
    rows = globals()[work](connection, Path(folder), streams)
    print(
        json.dumps(
            {
                "rows": rows,
                "seconds": time.monotonic() - began,
                "cpu": time.process_time() - cpu,
                "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
