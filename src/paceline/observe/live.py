"""Serves the live page of a run: the frame, its script, and what has changed.

Served from the journal alone, and only read. No torch.

    GET /           the page, which holds nothing of the run
    GET /session    with the reading key as bearer token: a cookie for what follows
    GET /view       the report's panels up to an event of the journal, whose number is told; ?open= of very many workers
                    what is to be opened, again and again, find= whom to mark, and seeks=true to open it
    GET /events     server-sent events: that number, whenever there are more
    GET /journal    ?from=N with the key as bearer token: the journal from that byte on, for `paceline watch HOST:PORT`

The key stands in the address behind #, which a browser sends to nobody. Host and Origin must be ours, so that no other
page can ask, also by a name that it lets point here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import RequestHandler

from paceline.base.http_server import know
from paceline.base.journal import NAME
from paceline.base.schema import open_file
from paceline.errors import PacelineError
from paceline.observe.drawing import STYLE as DRAWN
from paceline.observe.page import STYLE, Chosen, around, team_of
from paceline.observe.summary import Newest, Summary
from paceline.team.auth import ANSWER, is_signature, read_authorization, sign, sign_answer

OFTEN = 1.0  # seconds for which a view is not made anew
SESSIONS, STREAMS, VIEWS = 1000, 600, 64
ASKS = "/view", "/events", "/journal"  # for a session, the last one for the key
PIECE = 1 << 20  # bytes of the journal at a time
SCRIPT = """
(async () => {
  const live = document.querySelector("#live"), main = document.querySelector("main");
  const say = (text) => { if (live.textContent !== text) live.textContent = text; };
  const key = location.hash.slice(1);
  if (key) {
    history.replaceState(null, "", location.pathname);
    const told = await fetch("/session", {headers: {Authorization: "Bearer " + key}});
    if (!told.ok) return say("this key is not the one of the run");
  }
  const find = document.querySelector("#find"), opened = new Set();
  let shown = -1, wanted = 0, busy = false, stale = false, sought = "", seeks = false;
  const put = (fresh) => {  // what has not changed stays as it is, for who reads it
    const at = main.contains(document.activeElement) ? document.activeElement.closest("details")?.dataset.of : null;
    const old = [...main.childNodes];
    fresh.forEach((node, place) => {
      if (!old[place]) main.append(node);
      else if (!old[place].isEqualNode(node)) old[place].replaceWith(node);
    });
    old.slice(fresh.length).forEach((node) => node.remove());
    const groups = [...main.querySelectorAll("details")];
    if (at && !main.contains(document.activeElement))
      groups.find((group) => group.dataset.of === at)?.querySelector("summary").focus({preventScroll: true});
    groups.forEach((group) => group.open && opened.add(group.dataset.of));
    find.hidden = !groups.length;
  };
  const show = async () => {
    if (busy) return;
    busy = true;
    while (stale || wanted > shown) {
      const ask = new URLSearchParams([...[...opened].map((of) => ["open", of]), ["find", sought], ["seeks", seeks]]);
      const seeking = seeks;
      stale = seeks = false;
      const view = await fetch("/view?" + ask);
      if (!view.ok) { say("open the address that stands in the file page of the run folder"); break; }
      put([...new DOMParser().parseFromString(await view.text(), "text/html").body.childNodes]);
      shown = Number(view.headers.get("X-Event"));
      say("live, up to event " + shown);
      if (seeking) document.querySelector("#found")?.focus();
    }
    busy = false;
  };
  const again = () => { stale = true; show().catch(() => { busy = false; }); };
  main.addEventListener("toggle", ({target}) => {
    const of = target.dataset.of;
    if (of === undefined || !main.contains(target) || target.open === opened.has(of)) return;
    if (target.open) opened.add(of); else opened.delete(of);
    again();
  }, true);
  find.querySelector("input").addEventListener("change", ({target}) => {
    sought = target.value.trim();
    seeks = sought !== "";
    again();
  });
  const stream = new EventSource("/events");
  stream.onopen = () => { if (shown >= 0) say("live, up to event " + shown); };
  stream.onmessage = (event) => { wanted = Number(event.data); show().catch(() => { busy = false; }); };
  stream.onerror = () => say(shown < 0 ? "open the address that stands in the file page of the run folder"
    : "no connection: the run has ended, or what serves this page; up to event " + shown);
})();
"""
LIVE = (
    "#live{position:sticky;top:0;margin:0;padding:.4rem 1.5rem;background:var(--wash);color:var(--soft)}"
    "#find{display:block;padding:.6rem 1.5rem}#find[hidden]{display:none}"
)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SHELL = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<style>{STYLE}{LIVE}</style></head><body><p id="live" role="status">connecting</p>'
    '<label id="find" hidden>Worker or host: <input type="search" spellcheck="false"></label><main></main>'
    f"<noscript>Without JavaScript: paceline watch, or report.html</noscript><script>{SCRIPT}</script></body></html>\n"
)
POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE + LIVE)} {_hash(DRAWN)}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Panels:
    """The panels of a summary, made once for all who want the same of the team opened."""

    def __init__(self, summary: Summary) -> None:
        self._summary, self._around = summary, around(summary)
        self.html = lru_cache(VIEWS)(self._html)

    def _html(self, wanted: Chosen) -> str:
        before, after = self._around
        return before + team_of(self._summary, wanted) + after


class Views:
    """A run's panels, made at most so often however many ask. `key` is the reading key; who had it has a session."""

    def __init__(self, folder: Path, key: str, hosts: Collection[str]) -> None:
        self._newest = Newest(folder, OFTEN, Panels)
        self.folder, self.key, self.hosts = folder, key, hosts
        self.sessions: deque[str] = deque(maxlen=SESSIONS)
        self.streams = 0

    def look(self) -> tuple[int, Panels]:
        """(number of the last event, the panels made up to it)."""
        return self._newest.get()


class Page(RequestHandler):
    """Answers one request; refuses it if the host, the origin or the session is unknown."""

    _signature = ""  # of a signed request: its answer is signed, too

    def initialize(self, views: Views) -> None:
        """Takes the route's arguments, as Tornado hands them over."""
        self._views = views

    def set_default_headers(self) -> None:
        """Sets the security headers of every answer."""
        self.clear_header("Server")
        for name, value in {
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuses requests from unknown hosts or origins, and those without a session or key."""
        host = str(self.request.headers.get("Host", ""))
        origin = self.request.headers.get("Origin")
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        if name not in self._views.hosts or origin not in (None, f"http://{host}"):
            self._refuse(403, "not from here")
        elif self.request.path in ASKS and not (self._has_key() if self.request.path == "/journal" else self._known()):
            self._refuse(401, "no session")
        elif self.request.path in ASKS:
            know(self)

    def _known(self) -> bool:
        given = self.get_cookie(self._cookie(), "") or ""
        return any(hmac.compare_digest(given.encode(), session.encode()) for session in self._views.sessions)

    def _cookie(self) -> str:
        """Cookies are for a host and all its ports, so each run has a name of its own."""
        return f"paceline_{hashlib.sha256(self._views.key.encode()).hexdigest()[:12]}"

    def _refuse(self, code: int, why: str) -> None:
        self.set_status(code)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(why + "\n")

    async def get(self) -> None:
        """Answers with the method that is named after the path."""
        try:
            await getattr(self, f"_{self.request.path.strip('/') or 'shell'}")()
        except PacelineError as error:  # the journal is damaged, or of a later version
            self._refuse(500, str(error))

    async def _shell(self) -> None:
        self.finish(SHELL)

    def _has_key(self) -> bool:
        given, key = self.request.headers.get("Authorization", ""), self._views.key.encode()
        if signed := read_authorization(given):
            expected = sign(key, "GET", str(self.request.uri), signed[0], signed[1], b"")
            self._signature = expected if is_signature(signed[2], expected) else ""
            return bool(self._signature)
        return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self._views.key}".encode())

    async def _journal(self) -> None:
        """Sends the next piece of the journal, at most `PIECE` bytes."""
        begin = self.get_query_argument("from", "0")
        if not re.fullmatch("[0-9]{1,999}", begin):
            self._refuse(400, "from= is no number")
            return
        self.set_header("Content-Type", "application/octet-stream")
        piece = b""
        with suppress(FileNotFoundError), open_file(self._views.folder / NAME) as file:
            file.seek(min(int(begin), file.seek(0, os.SEEK_END)))  # not beyond the end, which seek() may refuse
            piece = file.read(PIECE)
        if self._signature:
            self.set_header(ANSWER, sign_answer(self._views.key.encode(), self._signature, 200, piece))
        self.finish(piece)

    async def _session(self) -> None:
        if not self._has_key():
            self._refuse(401, "a wrong key")
            return
        self._views.sessions.append(secrets.token_hex(32))
        self.set_cookie(self._cookie(), self._views.sessions[-1], httponly=True, samesite="Strict", path="/")
        self.set_status(204)
        self.finish()

    async def _view(self) -> None:
        number, view = self._views.look()
        asked, find = self.get_query_arguments("open"), self.get_query_argument("find", "")
        wanted = Chosen(frozenset(asked), find, self.get_query_argument("seeks", "") == "true")
        self.set_header("X-Event", str(number))
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(view.html(wanted))

    async def _events(self) -> None:
        views, sent = self._views, -1
        if views.streams >= STREAMS:
            self._refuse(503, "too many are watching")
            return
        self.set_header("Content-Type", "text/event-stream")
        views.streams += 1
        try:
            while True:
                number, _ = views.look()
                self.write(f"id: {number}\ndata: {number}\n\n" if number > sent else ":\n\n")
                sent = number
                await self.flush()  # a slow reader waits here, and holds nothing but its connection
                await asyncio.sleep(OFTEN)
        except StreamClosedError:
            pass
        finally:
            views.streams -= 1


def routes(views: Views) -> list[Any]:
    """The Tornado routes of the page."""
    return [("/(?:|session|view|events|journal)", Page, {"views": views})]
