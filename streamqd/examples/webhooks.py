"""A retry policy: which errors are retried, how often, for how long, and which are permanent.

The handler delivers messages over HTTP to the address in their header `to`. HTTPError is a subclass
of URLError, and the nearest class decides. A server that cannot be reached is retried. HTTP errors
other than 429 and 503 are permanent.

Run it: `handlers = ["streamqd.examples.webhooks"]`, then
`streamqd produce webhooks '{"paid": 7}' --header to=http://127.0.0.1:8000/hook`.
"""

from __future__ import annotations

import urllib.request
from urllib.error import HTTPError, URLError

from streamqd import Backoff, Message, Retry, RetryPolicy, handler

POLICY = RetryPolicy(
    max_attempts=8,
    backoff=Backoff(kind="exponential", base=1.0, max=300.0, jitter="full"),
    max_age=86_400.0,  # one day, after which a delivery is useless
    retry_on=(URLError, TimeoutError),
    dead_on=(HTTPError,),
)


@handler(topic="webhooks", group="deliver", retry=POLICY, timeout="30s")
def deliver(msg: Message) -> None:
    """Post the payload to the address in the header. The receiver uses the uid as dedup key."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": msg.uid}
    request = urllib.request.Request(  # noqa: S310 - producers are trusted to set the address
        msg.headers["to"], msg.payload, headers
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
    except HTTPError as refused:
        if refused.code in (429, 503):
            # Wait as long as the server requests. The run counts as an attempt.
            wait = refused.headers.get("Retry-After", "")
            raise Retry(after=float(wait) if wait.isdigit() else None) from refused
        raise
