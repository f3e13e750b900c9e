"""The page, its events and the metrics, over HTTP. It answers GET alone: nothing here changes anything.

Who is off this machine needs the fleet's token, as `Authorization: Bearer TOKEN` or once as `/?token=TOKEN`, which is
then kept in a cookie. On loopback a page of another origin is kept out by the name that it asks for (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from learner.operate.watch import exposition, fleet_view, run_files

FLEET_PERIOD_S = 1.0
PAGES_MAX = 32
COOKIE = "actorq_watch"
_PAGE = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Page:
    """The application.

    Args:
        view: The fleet.
        run: Returns the run whose curve is shown; None if there is none.
        title: Of the page.
        actors: Rows of actors where the fleet is not live but read from a run's files.
    """

    def __init__(
        self,
        view: fleet_view.FleetView,
        run: Callable[[], run_files.RunFiles | None],
        title: str,
        actors: list[dict[str, Any]] | None = None,
    ) -> None:
        self._view, self._run, self._title, self._actors = view, run, title, actors
        self._pages = 0
        self._news = asyncio.Event()
        self._exposition = exposition.Exposition(view, run)
        self.closed = False

    def application(self, hosts: list[str], token: str = "") -> ASGIApp:
        """Returns what serves it.

        Args:
            hosts: Names under which it may be asked for.
            token: Without which nobody is answered; empty: everybody is.
        """
        routes = [
            Route("/", self._file("index.html", "text/html")),
            Route("/page.js", self._file("page.js", "text/javascript")),
            Route("/page.css", self._file("page.css", "text/css")),
            Route("/events", self._events),
            Route("/history.json", self._history),
            Route("/actors/{name}/history.json", self._history),
            Route("/metrics", self._metrics),
        ]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
        if token:
            middleware.append(Middleware(TokenCheck, token=token))
        return Starlette(routes=routes, middleware=middleware)

    @staticmethod
    def _file(name: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: FileResponse(_PAGE / name, media_type=kind, headers=_HEADERS)

    def _history(self, request: Request) -> Response:
        name, run = request.path_params.get("name", ""), self._run()
        is_replay = name and self._actors is not None
        found = (run.history(name) if run is not None else None) if is_replay else self._view.history(name)
        return JSONResponse(found or {}, status_code=404 if found is None else 200, headers=_HEADERS)

    def _metrics(self, request: Request) -> Response:
        return Response(self._exposition.text(), media_type=CONTENT_TYPE_LATEST, headers=_HEADERS)

    def _events(self, request: Request) -> Response:
        if self._pages >= PAGES_MAX:
            return Response(f"{PAGES_MAX} pages are open already\n", status_code=503)
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=_HEADERS)

    def tell(self) -> None:
        """Has every page that is open be sent what is new to it, or be ended; to be called again and again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _stream(self) -> AsyncIterator[bytes]:
        self._pages += 1
        try:
            changes = _Changes(self._view, self._run, self._title, self._actors)
            while not self.closed:
                news = self._news
                if text := changes.drain(asyncio.get_running_loop().time()):
                    yield f"data: {text}\n\n".encode()
                await news.wait()
        finally:
            self._pages -= 1


class _Changes:
    """What one page has not been sent yet."""

    def __init__(
        self,
        view: fleet_view.FleetView,
        run: Callable[[], run_files.RunFiles | None],
        title: str,
        actors: list[dict[str, Any]] | None,
    ) -> None:
        self._view, self._run, self._title, self._actors = view, run, title, actors
        self._revision = -1
        self._names: list[str] = []
        self._curve: tuple[Any, int] = (None, 0)
        self._fleet_s = -FLEET_PERIOD_S

    def drain(self, now_s: float) -> str:
        """Returns JSON of what is new; empty if nothing is."""
        new: dict[str, Any] = {}
        if self._view.revision != self._revision:
            self._revision, new["rows"], names = self._view.rows(self._revision)
            if names != self._names:
                self._names = new["names"] = names
        if now_s - self._fleet_s >= FLEET_PERIOD_S:
            new["fleet"] = self._view.fleet() | {"title": self._title, "replay": self._actors is not None}
            if self._fleet_s < 0 and self._actors is not None:
                new["rows"], new["names"] = self._actors, [row["actor"] for row in self._actors]
            self._fleet_s = now_s
            self._add_curve(new)
        return json.dumps(new, separators=(",", ":")) if new else ""

    def _add_curve(self, new: dict[str, Any]) -> None:
        run = self._run()
        if run is None:
            return
        which, sent = (run.path, run.generation), self._curve[1]
        if which != self._curve[0]:
            sent, new["run"] = 0, str(run.path)
        if len(run.points) > sent:
            new["curve"] = run.points[sent:]
        self._curve = which, len(run.points)


class TokenCheck:
    """Lets in who has the token, and gives who brings it in the address a cookie, so that it leaves the address."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(bearer) or self._fits(request.cookies.get(COOKIE, "")):
            await self._app(scope, receive, send)
            return
        response: Response
        if self._fits(request.query_params.get("token", "")):
            response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(COOKIE, self._token, httponly=True, secure=True, samesite="strict")
        else:
            response = Response("a token is needed: open the address that `actorq-learner watch` printed\n", 401)
        await response(scope, receive, send)

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
