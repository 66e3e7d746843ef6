"""Guard a checkpoint directory: only its own query may use it, and only one run at a time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamqd import config
from streamqd.errors import RequestRefusedError
from streamqd.paths import local_folder
from streamqd.spark.pipelines import tables
from streamqd.spark.pipelines.lease import PipelineLease
from streamqd.store.keys import Keys

# Name of the file with the ID of the directory. The ID identifies it even under another mount path.
_SIGN = "_checkpoints.json"


def lease_checkpoints(settings: config.Settings, folder: Path) -> PipelineLease:
    """Return the lease on a checkpoint directory. If the directory does not exist, create it.

    The lease is not acquired until the caller enters it with `with`.
    """
    sign = _sign(folder)
    keys = Keys(settings.keys.control, settings.keys.streams)
    return PipelineLease(
        lambda: tables.connect(settings),
        keys,
        sign["id"],
        "checkpoints",
        what=(f"{folder} is in use"),
    )


def bind_query(folder: Path, query: Mapping[str, str]) -> None:
    """Raise RequestRefusedError if a checkpoint belongs to another query.

    A new checkpoint is bound to this query. The check is needed because Spark itself would use the
    checkpoint for a changed query if it can, and the counts stored in it would then mix both
    queries.
    """
    sign = _sign(folder)
    known = sign.setdefault("query", dict(query))
    wrong = sorted(name for name in query if known.get(name) != query[name])
    if wrong:
        raise RequestRefusedError(
            f"{folder} is the checkpoint of another query, whose {wrong[0]} is"
            f" {known.get(wrong[0])!r}; choose another directory, or delete this one to start"
            " again"
        )
    (folder / _SIGN).write_text(json.dumps(sign) + "\n", "utf-8")


def _sign(folder: Path) -> dict[str, Any]:
    folder = local_folder(folder)
    path = folder / _SIGN
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n")
    except FileExistsError:
        pass
    try:
        found = json.loads(path.read_bytes())
        return {**found, "id": str(found["id"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RequestRefusedError(
            f"{path} cannot be read (delete it: no other data is affected)"
        ) from error
