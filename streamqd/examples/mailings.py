"""A handler with a rate limit, because its mail service has one.

The mail service allows 600 letters per minute. With `rate_per = "group"`, each of four partitions
gets 150 per minute. Retries count as well.

Run it: `streamqd --config mailings.toml` with `handlers = ["streamqd.examples.mailings"]` and
`[topics.mailings] partitions = 4`, then `streamqd produce mailings ann@example.com`.
"""

from __future__ import annotations

from pathlib import Path

from streamqd import Context, Message, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Connect to the mail service here. This example writes files instead."""
    global _folder
    _folder = context.state_dir / "mailings"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(topic="mailings", group="post", rate="600/m", rate_per="group", rate_burst=5)
def post(msg: Message) -> None:
    """Send one letter. With `uid` as its ID, the service can reject a duplicate."""
    (_folder / msg.uid.replace("/", "-")).write_text(f"To: {msg.text()}\n")
