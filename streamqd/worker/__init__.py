"""The worker: the process that handles one unit's messages. The data plane.

`worker` is its life: boot, recover what is pending, serve, leave. `runs` runs the handler for one
message and notes the verdict, `settler` tells Redis, `gate` is where it listens to the supervisor
between two messages. A worker never acquires or renews a lease.
"""

from __future__ import annotations

from streamqd.worker.gate import ExitCode
from streamqd.worker.worker import Orders, Worker

__all__ = ["ExitCode", "Orders", "Worker"]
