"""Archive entry after entry into a table, and compact it, until killed. Needs no Spark or Redis.

python -m tests.support.growing_archive FOLDER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pyarrow as pa

from streamqd.spark import rows
from streamqd.spark.offsets import Position
from streamqd.spark.pipelines import compact
from streamqd.spark.pipelines.parts import PartWriter
from streamqd.spark.pipelines.storage import Archive

ROWS = 20  # rows per batch
PLACE = ("access", 0)
EVERY = rows.columns(dead=False, headers=True, fields=True)
SCHEMA = rows.arrow_schema([each for each in EVERY if each.name not in ("topic", "partition")])


def main() -> None:
    """Continue after the last archived entry, forever."""
    table = Archive(Path(sys.argv[1]), create=True).table("access", create=True)
    assert table is not None
    for number in itertools.count(1):
        end = table.positions.get(PLACE, Position((0, 0), 0)).id[0]
        ids = range(end + 1, end + 1 + ROWS)
        writer = PartWriter(table.folder, 0)
        found = [{"id": f"{each}-0", "id_ms": each, "id_seq": 0, "value": b"v"} for each in ids]
        writer.write(pa.RecordBatch.from_pylist(found, SCHEMA))
        table.append(writer.finish(), {PLACE: Position((ids[-1], 0), ids[-1])})
        compact.merge_small_files(table, 1)
        if number % 10 == 0:
            compact.purge(table, 3600.0)


if __name__ == "__main__":
    main()
