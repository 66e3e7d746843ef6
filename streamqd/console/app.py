"""The web application: the routes and their roles, the headers of responses, and error pages."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamqd import config, logs
from streamqd.console import backend as doors
from streamqd.console import forms
from streamqd.console.access import (
    AccessRequest,
    ConsoleAccess,
    Person,
    Role,
    browser_host,
    is_own_request,
)
from streamqd.console.backend import Backend, Resources, TooBusyError
from streamqd.console.exports import ExportFile, ExportResponse
from streamqd.console.forms import DRY, DRY_RUN_DIGEST, REQUEST, TYPED, RequestKey, RequestResults
from streamqd.console.live import STREAMS_MAX, Hub, PageKey
from streamqd.console.pages import THEMES, Pages
from streamqd.console.view import Act, ActResult, ConsoleView, Download, Visit
from streamqd.console.views import ACTS, DOWNLOADS, VIEWS
from streamqd.errors import (
    InvalidRequestError,
    InvalidValueError,
    MessageTooLargeError,
    RedisResponseError,
    RedisUnavailableError,
    RequestRefusedError,
    StreamqdError,
)

BODY_BYTES_MAX = 8 << 20  # bytes; a form can triple the size of a 1 MiB payload
URL_CHARS_MAX = 8_000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

_ONCE = ("done", "token")  # parameters to remove from a URL that a person may copy

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A route and the role that it requires. If the role is None, no login is needed."""

    method: str
    path: str
    role: Role | None
    endpoint: Endpoint


class Guard:
    """The outermost layer, which removes the path prefix, checks origins, and adds headers."""

    def __init__(self, app: ASGIApp, access: ConsoleAccess, prefix: str) -> None:
        self._app = app
        self._access = access
        self._root = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        if scope["type"] != "http":
            return
        # Some proxies pass the prefix on, and others remove it.
        if self._root and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        asking = access_request(Request(scope))
        if asking.method not in ("GET", "HEAD") and not is_own_request(
            asking, browser_host(asking, self._access)
        ):
            refusal = Response("403: this request does not come from a page of the console\n", 403)
            await refusal(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


def access_request(request: Request) -> AccessRequest:
    """Return the parts of a request that access control needs."""
    peer = request.client.host if request.client else ""
    headers = {name.lower(): value for name, value in request.headers.items()}
    return AccessRequest(request.method, peer, request.url.scheme, headers, request.cookies)


class ConsoleApp:
    """A console: its routes and their shared state. Use it only in the event loop."""

    def __init__(
        self,
        settings: config.Settings,
        access: ConsoleAccess,
        backend: Backend,
        new_link: Callable[[], None],
    ) -> None:
        self._access = access
        self._backend = backend
        self._pages = Pages(settings, VIEWS, ACTS, DOWNLOADS)
        self._request_results = RequestResults()
        self._new_link = new_link
        self._root = settings.console.prefix.rstrip("/")
        self.hub = Hub(self._render_live, doors.explain)
        self.rules = self._table()
        routes = [Route(each.path, self._guard(each), methods=[each.method]) for each in self.rules]
        self._views = [(Route(each.path, _respond_empty), each) for each in VIEWS]
        app = Starlette(
            routes=routes,
            exception_handlers={
                404: self._respond_not_found,
                405: self._respond_not_found,
                413: self._respond_too_large,
            },
            max_body_size=BODY_BYTES_MAX,
        )
        self.app: ASGIApp = Guard(app, access, settings.console.prefix)

    def _table(self) -> list[Rule]:
        """Return all routes with their roles."""
        return [
            Rule("GET", "/livez", None, self._livez),
            Rule("GET", "/static/{name}", None, self._static),
            Rule("GET", "/login", None, self._login_page),
            Rule("POST", "/login", None, self._login),
            Rule("POST", "/logout", Role.VIEWER, self._logout),
            Rule("GET", "/live", Role.VIEWER, self._live),
            *(
                Rule("GET", each.path, each.role, functools.partial(self._view, each))
                for each in VIEWS
            ),
            *(
                Rule("GET", each.path, each.role, functools.partial(self._download, each))
                for each in DOWNLOADS
            ),
            *(
                Rule("GET", each.path, each.role, functools.partial(self._form, each))
                for each in ACTS
            ),
            *(
                Rule("POST", each.path, each.role, functools.partial(self._act, each))
                for each in ACTS
            ),
        ]

    # --- access ---

    def _guard(self, rule: Rule) -> Endpoint:
        """Return the endpoint of a route, wrapped so that only persons with its role reach it."""

        async def answer(request: Request) -> Response:
            person = self._access.person(access_request(request))
            request.state.person = person
            if rule.role is not None:
                if "token" in request.query_params and self._access.logs_in_by_link:
                    return self._log_in_by_link(request)
                if person is None:
                    return self._respond_unauthenticated(request)
                if not person.may(rule.role):
                    return self._respond_forbidden(request, rule.role)
            return await self._answer(rule, request)

        return answer

    async def _answer(self, rule: Rule, request: Request) -> Response:
        """Run an endpoint. If it fails, respond with a page that explains the error."""
        try:
            return await rule.endpoint(request)
        except InvalidRequestError as error:
            return self._respond_problem(request, HTTPStatus.BAD_REQUEST, str(error))
        except RequestRefusedError as error:
            status = HTTPStatus.NOT_FOUND if rule.method == "GET" else HTTPStatus.CONFLICT
            return self._respond_problem(request, status, str(error))
        except (RedisUnavailableError, RedisResponseError, TooBusyError) as error:
            if (
                isinstance(error, RedisResponseError)
                and rule.method == "POST"
                and not error.transient
            ):
                text = f"Redis rejected the change: {error}"
                return self._respond_problem(request, HTTPStatus.CONFLICT, text)
            return self._respond_problem(
                request, HTTPStatus.SERVICE_UNAVAILABLE, doors.explain(error), away=True
            )
        except InvalidValueError as error:
            text = f"{error}; run `streamqd doctor` for the fix"
            return self._respond_problem(request, HTTPStatus.CONFLICT, text)
        except StreamqdError as error:
            return self._respond_problem(request, HTTPStatus.CONFLICT, str(error))
        except Exception as error:  # noqa: BLE001 - other errors also become a page, and are logged
            logs.event("console.failed", logging.ERROR, path=rule.path, exc=error)
            text = "An internal error occurred. The traceback is in the console's log."
            return self._respond_problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def _respond_forbidden(self, request: Request, wanted: Role) -> Response:
        """Respond to a person whose role does not allow the request."""
        text = f"This requires role {wanted.word}; your role is {request.state.person.role.word}."
        if self._access.settings.read_only:
            text = "This console is read-only for every role."
        return self._respond_problem(request, HTTPStatus.FORBIDDEN, text)

    def _log_in_by_link(self, request: Request) -> Response:
        """Exchange the token of a login link for a session, and redirect to a URL without it."""
        value = self._access.log_in_by_token(request.query_params["token"])
        target = f"{self._root}{_current_url(request)}"
        if value is None:
            if request.state.person is not None:
                return RedirectResponse(target, HTTPStatus.SEE_OTHER)
            return self._respond_unauthenticated(request)
        self._new_link()
        return self._with_session(RedirectResponse(target, HTTPStatus.SEE_OTHER), request, value)

    def _with_session(self, response: Response, request: Request, value: str) -> Response:
        secure = self._access.is_secure(access_request(request))
        response.headers.append("set-cookie", self._access.cookie(value, secure=secure))
        return response

    def _respond_unauthenticated(self, request: Request) -> Response:
        """Respond to a request from a person who is not logged in."""
        if self._access.users is not None and request.method == "GET":
            target = self._pages.url("/login", next=_current_url(request))
            return RedirectResponse(target, HTTPStatus.SEE_OTHER)
        if self._access.logs_in_by_link:
            text = (
                "Open the link that the console printed last. Its token works once; the console"
                " prints a new one after each use."
            )
        else:
            text = "The proxy in front of this console did not send your name."
        return self._respond_problem(request, HTTPStatus.UNAUTHORIZED, text)

    # --- pages ---

    def _respond_html(
        self, request: Request, template: str, status: int = 200, **context: Any
    ) -> Response:
        """Return a page that needs no data from Redis."""
        person = getattr(request.state, "person", None)
        context.setdefault("theme", _theme(request))
        return HTMLResponse(
            self._pages.page(template, person, _current_url(request), **context), int(status)
        )

    def _respond_problem(
        self, request: Request, status: HTTPStatus, text: str, *, away: bool = False
    ) -> Response:
        # The error page listens to the events of the overview. As soon as Redis answers again, the
        # next event reloads the page.
        live_url = self._pages.url("/live", page="/") if away and request.method == "GET" else ""
        return self._respond_html(
            request,
            "problem.html",
            status,
            title=f"{status.value} {status.phrase}",
            text=text,
            away=away,
            live_url=live_url,
        )

    async def _respond_not_found(self, request: Request, _error: Exception) -> Response:
        request.state.person = self._access.person(access_request(request))
        return self._respond_problem(
            request, HTTPStatus.NOT_FOUND, "The console has no page at this address."
        )

    async def _respond_too_large(self, request: Request, _error: Exception) -> Response:
        text = f"The form is larger than {BODY_BYTES_MAX >> 20} MiB; nothing was changed."
        return self._respond_problem(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)

    async def _view(self, view: ConsoleView, request: Request) -> Response:
        person: Person = request.state.person
        here = _current_url(request)
        common = {
            "view": view,
            "title": view.title,
            "theme": _theme(request),
            "live_url": self._pages.url("/live", page=here) if view.live else "",
            "done": self._done(request),
        }
        path, query = request.path_params, dict(request.query_params)

        def render(resources: Resources) -> str:
            variables = view.variables(Visit(resources, person, path, query))
            return self._pages.page(f"{view.name}.html", person, here, **(common | variables))

        return HTMLResponse(await self._backend.call(render))

    async def _download(self, download: Download, request: Request) -> Response:
        person: Person = request.state.person
        path, query = request.path_params, dict(request.query_params)
        name, kind, content = await self._backend.call(
            lambda resources: download.content(Visit(resources, person, path, query))
        )
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        headers = {"content-disposition": f'attachment; filename="{safe}"'}
        if isinstance(content, ExportFile):
            return ExportResponse(content, kind, headers)
        return Response(content, media_type=kind, headers=headers)

    def _done(self, request: Request) -> str:
        key = RequestKey(request.state.person.name, request.query_params.get("done", ""))
        return self._request_results.result(key)

    # --- live ---

    async def _live(self, request: Request) -> Response:
        if self.hub.pages >= STREAMS_MAX:
            raise TooBusyError(f"{STREAMS_MAX} pages are open; close some")
        here = request.query_params.get("page", "")[:URL_CHARS_MAX]
        if self._find_live_view(here) is None:
            raise InvalidRequestError("no live page has this address")
        key = PageKey(here, replace(request.state.person, name=""))
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self.hub.listen(key), 200, headers, "text/event-stream")

    def _find_live_view(
        self, here: str
    ) -> tuple[ConsoleView, dict[str, str], dict[str, str]] | None:
        """Return the live view at a path, with the parameters from the path and from the query."""
        path, _, query = here.partition("?")
        for route, view in self._views:
            match, scope = route.matches({"type": "http", "method": "GET", "path": path})
            if match is Match.FULL and view.live:
                return view, scope["path_params"], dict(parse_qsl(query, keep_blank_values=True))
        return None

    async def _render_live(self, key: PageKey) -> str:
        found = self._find_live_view(key.url)
        if found is None or not key.person.may(found[0].role):
            raise RequestRefusedError("no live page has this address")
        view, path, query = found

        def render(resources: Resources) -> str:
            variables = view.variables(Visit(resources, key.person, path, query), live=True)
            return self._pages.live(view, key.person, key.url, variables)

        return await self._backend.call(render)

    # --- acts ---

    async def _form(self, act: Act, request: Request) -> Response:
        return await self._show_form(act, request, dict(request.query_params))

    async def _show_form(
        self,
        act: Act,
        request: Request,
        values: Mapping[str, str],
        status: HTTPStatus = HTTPStatus.OK,
        problem: str = "",
        *,
        changed: bool = False,
    ) -> Response:
        """Return the form of an act, with a dry run of these values.

        `changed` is True if the form was sent with values whose dry run the person has not seen
        yet.
        """
        person: Person = request.state.person
        path, here, theme = request.path_params, _current_url(request), _theme(request)

        def render(resources: Resources) -> str:
            visit = Visit(resources, person, path, values)
            fields = act.fields(visit)
            sent = forms.unchanged_values(values, fields)
            preview = forms.run_preview(lambda: act.preview(visit))
            return self._pages.page(
                "act.html",
                person,
                here,
                title=f"{act.title}: {'/'.join(path.values())}" if path else act.title,
                theme=theme,
                act=act,
                back=self._pages.to(act.back, **path),
                fields=[field for field in fields if not field.folded],
                folded=[field for field in fields if field.folded],
                hidden={name: sent[name] for name in sent if name not in {f.name for f in fields}},
                seen=forms.digest(sent),
                preview=preview,
                destructive=bool(act.typed(visit)),
                typed=act.typed(visit) or preview.typed,
                problem=problem,
                changed=changed,
                request_id=forms.new_request(),
                action=self._pages.to(act.name, **path),
            )

        return HTMLResponse(await self._backend.call(render), int(status))

    async def _act(self, act: Act, request: Request) -> Response:
        person: Person = request.state.person
        values = forms.read_form(await request.body())
        path = request.path_params
        key = RequestKey(person.name, values.pop(REQUEST, ""))
        typed, seen = values.pop(TYPED, ""), values.pop(DRY_RUN_DIGEST, None)
        if values.pop(DRY, ""):
            return await self._show_form(act, request, values)
        if seen not in (None, forms.digest(forms.user_values(values))):
            return await self._show_form(act, request, values, changed=True)

        def run(resources: Resources) -> ActResult:
            visit = Visit(resources, person, path, values, typed)
            forms.check_typed(typed, act.typed(visit))
            return doors.run_as(person.name, lambda: forms.write_note(resources, act.run(visit)))

        try:
            done = await self._request_results.run_once(key, lambda: self._backend.call(run))
        except (RequestRefusedError, InvalidValueError, MessageTooLargeError) as error:
            return await self._show_form(act, request, values, HTTPStatus.CONFLICT, str(error))
        place = path if done.parameters is None else done.parameters
        target = self._pages.to(done.view or act.back, **{**place, "done": key.request})
        return RedirectResponse(target or self._pages.url("/"), HTTPStatus.SEE_OTHER)

    # --- other endpoints ---

    async def _livez(self, _request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _static(self, request: Request) -> Response:
        found = self._pages.static.get(request.path_params["name"])
        if found is None:
            return Response("404 Not Found\n", 404, media_type="text/plain")
        current = request.query_params.get("v") == found.digest
        keep = "public, max-age=31536000, immutable" if current else "no-cache"
        return Response(
            found.content, headers={"cache-control": keep, "content-type": found.content_type}
        )

    async def _login_page(self, request: Request) -> Response:
        if self._access.users is None:
            return self._respond_unauthenticated(request)
        target = request.query_params.get("next", "")
        return self._respond_html(request, "login.html", title="Log in", problem="", next=target)

    async def _login(self, request: Request) -> Response:
        values = forms.read_form(await request.body())
        name, target = values.get("name", "").strip(), values.get("next", "")
        value = await self._backend.call(
            lambda _thread_resources: self._access.log_in_by_password(
                name, values.get("password", "")
            )
        )
        if value is None:
            return self._respond_html(
                request,
                "login.html",
                HTTPStatus.UNAUTHORIZED,
                title="Log in",
                problem="The name or the password is wrong.",
                next=target,
            )
        inside = target.startswith("/") and not target.startswith(("//", "/\\"))
        back = RedirectResponse(self._pages.url(target if inside else "/"), HTTPStatus.SEE_OTHER)
        return self._with_session(back, request, value)

    async def _logout(self, request: Request) -> Response:
        self._access.log_out(access_request(request))
        back = RedirectResponse(self._pages.url("/login"), HTTPStatus.SEE_OTHER)
        return self._with_session(back, request, "")


def _current_url(request: Request) -> str:
    """Return the path and query of a request, without parameters that must not be copied."""
    pairs = [each for each in request.query_params.multi_items() if each[0] not in _ONCE]
    return f"{request.url.path}{'?' if pairs else ''}{urlencode(pairs)}"


def _theme(request: Request) -> str:
    chosen = request.cookies.get("streamqd-theme", "")
    return chosen if chosen in THEMES else ""


async def _respond_empty(_request: Request) -> Response:
    return Response()
