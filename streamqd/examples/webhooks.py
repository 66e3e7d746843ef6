"""A retry policy: what is worth another try, how often, how long, and what no try will mend.

It delivers messages by HTTP. Their header `to` names the address. HTTPError is a kind of URLError,
and the nearest class decides: a server that is away is tried again, one that says no is not.

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
    max_age=86_400.0,  # a day: nobody wants to hear it later
    retry_on=(URLError, TimeoutError),
    dead_on=(HTTPError,),
)


@handler(topic="webhooks", group="deliver", retry=POLICY, timeout="30s")
def deliver(msg: Message) -> None:
    """Post the payload to where the header says. The uid lets the receiver ignore a repeat."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": msg.uid}
    request = urllib.request.Request(  # noqa: S310 - whoever may produce here names the address
        msg.headers["to"], msg.payload, headers
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
    except HTTPError as refused:
        if refused.code in (429, 503):
            # The server knows best when it will have time. It counts as an attempt.
            wait = refused.headers.get("Retry-After", "")
            raise Retry(after=float(wait) if wait.isdigit() else None) from refused
        raise
