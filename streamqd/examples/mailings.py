"""A handler that keeps to a rate, because the service behind it takes no more.

The mail service allows 600 letters a minute. With `rate_per = "group"`, each of four partitions
gets a quarter of that. Retries are runs like any other, and count.

Run it: `streamqd --config mailings.toml` with `handlers = ["streamqd.examples.mailings"]` and
`[topics.mailings] partitions = 4`, then `streamqd produce mailings ann@example.com`.
"""

from __future__ import annotations

from pathlib import Path

from streamqd import Context, Message, handler

_folder = Path()


def on_start(context: Context) -> None:
    """Open the connection to the mail service here; this example writes files instead."""
    global _folder
    _folder = context.state_dir / "mailings"
    _folder.mkdir(parents=True, exist_ok=True)


@handler(topic="mailings", group="post", rate="600/m", rate_per="group", rate_burst=5)
def post(msg: Message) -> None:
    """Send one letter. `uid` keeps the service from sending it twice."""
    (_folder / msg.uid.replace("/", "-")).write_text(f"To: {msg.text()}\n")
