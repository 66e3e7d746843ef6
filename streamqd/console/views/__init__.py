"""All views and acts of the console, in the order of the navigation.

How a view is added:

1. `views/NAME.py`: a function `Visit -> Context` that reads with `visit.desk.store`, `.fleet` and
   the functions of `streamqd.admin`, and a `ConsoleView` for it in the module's `VIEWS`. It runs in
   a thread of the backend. It contains no HTML, catches no error of Redis (`app` shows a banner or
   a sentence), and reads at most a stated number of rows: pages have `visit.limit` rows and a
   cursor in the URL. Every state is in the URL, so that a page can be sent to a colleague.
2. `templates/NAME.html` extends `base.html` and imports `macros.html`. Block `live` contains what
   changes by itself, block `content` the rest (search fields, forms). Give rows and `<details>` in
   block `live` an id, so that focus, scroll and open details survive. A live view must read the
   shared snapshot (`visit.now`) for what it shows, or little more: it is rendered every 2 s. No
   `style` attribute and no inline script: the policy forbids them.
3. Links: `to("NAME", topic=…)` returns the URL of a view or act by its name, '' if it does not
   exist, and the macros `link` and `button` leave it out then. So views may link to views that are
   not built yet: topics, topic(topic), assignment(topic, partition, group), messages(topic),
   message(topic, uid), dead(topic), dead_letter(topic, id), retries(topic, group), delayed(topic),
   schedules, fleet, handlers, doctor, audit, send(topic), flow.
4. A change is an `Act` in the module's `ACTS`: `fields`, `preview` (the dry run) and `run`. Link to
   it by `button("NAME", "Pause", topic=…)`: a person without the role does not see it. Values that
   the form should have already are parameters of that link.
5. Add the module to `_MODULES` below. The acceptance tests open every view (`example` for paths
   with parameters), as a viewer too, without JavaScript, at 360 px, in both themes and under a
   prefix, and POST every act as a viewer.
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
    topics,
    waiting,
)

VIEWS: tuple[ConsoleView, ...] = (
    *overview.VIEWS,
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
    *sending.ACTS,
    *dead_acts.ACTS,
    *jobs.ACTS,
    *waiting.ACTS,
    *schedules.ACTS,
    *fleet.ACTS,
)
DOWNLOADS: tuple[Download, ...] = (*messages.DOWNLOADS, *dead.DOWNLOADS)
