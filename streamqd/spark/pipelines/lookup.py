"""One message in an archive: its manifests name the file, pyarrow reads it. Without Spark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamqd.spark.cold import LONG_MAX
from streamqd.spark.offsets import Id, read_id
from streamqd.spark.pipelines.storage import Archive


@dataclass(frozen=True, slots=True)
class Looked:
    """Where a message would be in an archive. `file` is '' when no file covers its id.

    `found` says whether it is in the file, null when pyarrow is not installed, which reads it.
    """

    file: str
    found: bool | None


def look(folder: Path, topic: str, partition: int, entry_id: str) -> Looked:
    """Look for one entry. Raises Refused without an archive, ManifestError for a broken one."""
    archive = Archive(folder)
    wanted = read_id(entry_id)
    for manifest in archive.current(topic):
        for file in manifest.files:
            if file.partition == partition and file.first <= wanted <= file.last:
                path = archive.locate(manifest, file)
                return Looked(str(path), _is_in(path, wanted))
    return Looked("", False)


def _is_in(path: Path, wanted: Id) -> bool | None:
    try:
        from pyarrow import parquet
    except ImportError:
        return None
    # The columns hold halves of ids up to 63 bits.
    ms, seq = (min(half, LONG_MAX) for half in wanted)
    # Opened by itself: what the folders around it are called adds no columns.
    with path.open("rb") as raw:
        ids = [("id_ms", "==", ms), ("id_seq", "==", seq)]
        return bool(parquet.read_table(raw, columns=["id_ms"], filters=ids).num_rows)
