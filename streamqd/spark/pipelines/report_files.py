"""A report's folder: tables as Parquet, the document, the page; made aside, then renamed.

The tables are small and written here, not by Spark's executors: the folder need not be shared.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamqd.errors import Refused
from streamqd.paths import remove_below
from streamqd.spark.pipelines import report_figures as figures
from streamqd.spark.pipelines.report_tables import FAMILY, TABLES

DOCUMENT, PAGE = "report.json", "report.html"


def check(out: Path, *, overwrite: bool) -> None:
    """Raise Refused unless a report may be written there. Only a report is ever replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise Refused(f"{out} is not a folder: name another one")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise Refused(f"{out} is there already: say --overwrite to replace it, or name another one")
    if not _is_report(out):
        raise Refused(f"{out} holds something else than a report: it is not replaced, name another")


def write(
    out: Path,
    document: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    page: str,
    *,
    overwrite: bool,
) -> None:
    """Write a report, whole or not at all. Raises Refused as `check` does, or when it cannot."""
    with _aside(out) as folder:
        try:
            for name, rows in tables.items():
                _write_table(folder / f"{name}.parquet", rows, TABLES[name])
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (folder / DOCUMENT).write_text(text + "\n", "utf-8")
            (folder / PAGE).write_text(page, "utf-8")
            folder.chmod(0o755)
            check(out, overwrite=overwrite)
            _swap(folder, out)
        except OSError as error:
            raise Refused(f"the report cannot be written to {out}: {error.strerror}") from error


@contextlib.contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder beside `out`, gone at the end unless it was renamed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise Refused(f"the report cannot be written to {out}: {error.strerror}") from error
    try:
        yield made
    except BaseException:
        with contextlib.suppress(Refused):  # what went wrong first is told
            remove_below(made.parent, made.name)
        raise
    remove_below(made.parent, made.name)


def _swap(new: Path, out: Path) -> None:
    """Put the new folder in the place of the old one; of two writers the later one wins."""
    if not out.exists() or not any(out.iterdir()):
        new.rename(out)  # an empty folder is replaced
        return
    with _aside(out) as old:
        out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise


def _is_report(folder: Path) -> bool:
    try:
        found = json.loads((folder / DOCUMENT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and str(found.get("format", "")).startswith(FAMILY)


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {}
    for name, kind in kinds.items():
        values = [row[name] for row in rows]
        if kind == "timestamp":
            known = [None if figures.iso(each) is None else each for each in values]
            arrays[name] = pa.array(known, pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
        else:
            arrays[name] = pa.array(values, pa.type_for_alias(kind))
    parquet.write_table(pa.table(arrays), path, compression="zstd")
