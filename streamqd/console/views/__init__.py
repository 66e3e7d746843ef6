"""All views and acts of the console, in the order of the navigation.

To add a view:

1. Write `views/NAME.py` with a function `Visit -> Context` and a `ConsoleView` in the module's
   `VIEWS`. The function reads with `visit.resources.store`, `visit.resources.fleet` and
   `streamqd.admin`. It runs in a thread of the backend. It contains no HTML and does not catch
   errors of Redis, because `app` turns them into a banner or a sentence. It reads a limited number
   of rows: a page has `visit.limit` rows, and the URL contains the cursor. The URL contains the
   whole state, so that you can send a page to a colleague.
2. Write `templates/NAME.html`. It extends `base.html` and imports `macros.html`. Its block `live`
   contains the figures that change without a reload. Its block `content` contains everything else,
   such as search fields. Give rows and `<details>` in the block `live` an id, so that they keep
   their focus, scroll position and open details. A live view is rendered about every 2 s, so it
   should read the shared snapshot (`visit.now`) and little more. Every template gets `visit` and
   the parameters of the path. Use no `style` attributes and no inline scripts, because the content
   security policy forbids them.
3. Link to the view with `to("NAME", topic=…)`, which returns the URL of a view or act. If there is
   none with this name, `to` returns '', and the macros `link` and `button` omit the link.
4. To change something, add an `Act` to the module's `ACTS`, with `fields`, `preview` (the dry run)
   and `run`. Link to it with `button("NAME", "Pause", topic=…)`, which is hidden from persons who
   do not have the role. The parameters of this link become values of the form.
5. Add the module to the tuples below. The acceptance tests open the `example` of every view as a
   viewer, without JavaScript, at 360 px, in both themes and under a prefix. They also POST every
   act as a viewer.
"""

from __future__ import annotations

from streamqd.console.view import Act, ConsoleView, Download
from streamqd.console.views import (
    audit,
    dead,
    dead_acts,
    doctor,
    fleet,
    flow,
    handlers,
    jobs,
    messages,
    overview,
    schedules,
    sending,
    steering,
    top,
    topic_acts,
    topics,
    waiting,
)

VIEWS: tuple[ConsoleView, ...] = (
    *overview.VIEWS,
    *top.VIEWS,
    *topics.VIEWS,
    *messages.VIEWS,
    *dead.VIEWS,
    *jobs.VIEWS,
    *waiting.VIEWS,
    *flow.VIEWS,
    *schedules.VIEWS,
    *fleet.VIEWS,
    *handlers.VIEWS,
    *doctor.VIEWS,
    *audit.VIEWS,
)
ACTS: tuple[Act, ...] = (
    *steering.ACTS,
    *topic_acts.ACTS,
    *sending.ACTS,
    *dead_acts.ACTS,
    *jobs.ACTS,
    *waiting.ACTS,
    *schedules.ACTS,
)
DOWNLOADS: tuple[Download, ...] = (*messages.DOWNLOADS, *dead.DOWNLOADS)
