"""Store the rows of a standing query in a table of the archive, each row once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.spark.pipelines import compact, fitting, schemas, tables
from streamqd.spark.pipelines.derived import RESULTS
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.spark.pipelines.storage import Archive, ArchiveError
from streamqd.store.keys import Keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TIDY = 8  # batches between two checks for small files


def lease_results(settings: config.Settings, archive: Archive, name: str) -> PipelineLease:
    """Return the lease on a table of results, which is not acquired until the caller enters it."""
    archive.folder(name, RESULTS)  # rejects an invalid name, which would become part of a key
    keys = Keys(settings.keys.control, settings.keys.streams)
    of, what = f"results:{archive.id[:12]}", f"table {name} is being written"
    return PipelineLease(lambda: tables.connect(settings), keys, name, of, what=what)


class ResultWriter:
    """Writes batches of a query to a table. Spark calls it with each batch and its number.

    Each commit records the ID of the query and the number of the batch, both of which come from the
    checkpoint. If Spark passes the same batch again, it is therefore recognized and skipped.
    """

    def __init__(self, archive: Archive, name: str, frame: DataFrame, checkpoint: Path) -> None:
        """Open the table, or create it.

        Raises RequestRefusedError if the table and the query have different columns, and
        ArchiveError if the table cannot be opened.
        """
        self._columns = schemas.table_columns(frame.schema)
        self._checkpoint = checkpoint
        self._batches = 0
        table = archive.derived_table(name, RESULTS, self._columns)
        assert table is not None
        self._table = table
        if not table.has_columns(self._columns):
            raise RequestRefusedError(
                f"the columns of table {name} are"
                f" {', '.join(tables.arrow_columns(table).names)}, and those of the query differ;"
                " choose another table, or select these columns with the same types"
            )

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Store a batch. Raises RequestRefusedError, ArchiveError or PySparkException."""
        query = self._query()
        self._table.reload()
        if self._table.last_batch(query) >= number:
            return
        begin = partial(fitting.PlainWriter, self._table.folder, self._columns)
        files = fitting.write_frame(batch, begin).fit
        self._table.append(files, {}, of=(query, number))
        self._batches += 1
        if self._batches % _TIDY == 0:
            compact.merge_small_files(self._table, _TIDY)

    def _query(self) -> str:
        """Return the ID of the query, which Spark stores in the checkpoint.

        Raises ArchiveError if the ID cannot be read.
        """
        path = self._checkpoint / "metadata"
        try:
            return str(json.loads(path.read_bytes())["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArchiveError(
                f"{path} does not contain the id of the query; restore the checkpoint, or choose"
                " another checkpoint and another table to start the query again"
            ) from error
