"""What operators see and do: the views and transitions behind the verbs of the command line.

Every function takes a Link and the key names, and returns frozen dataclasses. `as_json` turns them
into what `--json` prints, so their docstrings are the reference of those documents: fields keep
their names, instants are unix milliseconds by the server's clock, None is null. Nothing here
prints, and what only looks writes nothing.
"""

from __future__ import annotations

from streamqd.admin.document import as_json

__all__ = ["as_json"]
