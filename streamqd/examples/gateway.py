"""A circuit breaker and a flood guard: stop a partition when every message would fail.

The handler sends messages to a service over TCP. While the service is down, the circuit is open:
one message is tried every 500 ms, and no message loses an attempt or is dead-lettered. If the
service rejects most messages, for example after a bad release, the flood guard pauses the partition
after 100 dead letters. Run `streamqd resume` to continue.

Run it: `handlers = ["streamqd.examples.gateway"]`, then
`GATEWAY=127.0.0.1:9000 streamqd --config streamq.toml`.
"""

from __future__ import annotations

import os
import socket

from streamqd import Dead, Message, handler


@handler(
    topic="gateway",
    group="send",
    retry_max_age="24h",
    breaker={"failures": 5, "window": "30s", "probe_every": "500ms", "on": [OSError]},
    flood_guard={"dead_letters": 100, "window": "1m", "share": 0.5},
)
def send(msg: Message) -> None:
    """Send the payload as one line and wait for the answer."""
    host, _, port = os.environ.get("GATEWAY", "127.0.0.1:9000").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as service:
        service.sendall(msg.payload + b"\n")
        answer = service.makefile().readline().strip()
    if not answer:
        raise ConnectionError("the service has closed the connection")
    if answer != "ok":
        raise Dead(answer)
