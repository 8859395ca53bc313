"""Serves the live page of a run: its frame, its script, and the panels of the report whenever they change.

The process only reads the journal. It does not import torch.

    GET /           the frame of the page, without any data of the run
    GET /session    with the reading key as bearer token: sets a cookie that the following requests need
    GET /view       the report's panels; the header X-Event has the number of the journal's last event in them. For a
                    large team, each ?open= names an entry to show opened, find= a worker or host to mark, and
                    seeks=true opens the marked entry
    GET /events     server-sent events: the number of the last event whenever there are new ones, and "ended" after the
                    run's end
    GET /journal    ?from=N with the key as bearer token: the journal from byte N on, for `paceline watch HOST:PORT`

The key is in the fragment of the address (behind #), which browsers do not send to servers. Requests with another Host
or Origin are refused, so that no other web page can read the run, not even through a name that resolves to this host.
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

OFTEN = 1.0  # seconds between two renderings of the panels
SESSIONS, STREAMS, VIEWS = 1000, 600, 64
ASKS = "/view", "/events", "/journal"  # they need a session; the last one needs the key
PIECE = 1 << 20  # bytes of the journal in one answer, at most
SCRIPT = """
(async () => {
  const live = document.querySelector("#live"), main = document.querySelector("main");
  const say = (text, kind = "") => {
    if (live.textContent !== text) live.textContent = text;
    live.className = kind;
  };
  const clock = () => new Date().toLocaleTimeString([], {hour12: false});
  const address = "Open the complete address of this page: the console of the run and the file \\"page\\" in the run " +
    "folder show it.";
  const key = location.hash.slice(1);
  if (key) {
    history.replaceState(null, "", location.pathname);
    const session = await fetch("/session", {headers: {Authorization: "Bearer " + key}});
    if (!session.ok) return say("The key in this address does not belong to this run. " + address, "bad");
  }
  const find = document.querySelector("#find"), opened = new Set();
  let shown = -1, wanted = 0, busy = false, stale = false, sought = "", seeks = false, ended = false, lost = false;
  const state = () => main.querySelector("[data-state]")?.dataset.state;
  const report = () => {  // the line at the top, the badge of a state that is out of date, and the title
    const badge = main.querySelector("[data-state]");
    if (badge && state() === "running" && (ended || lost)) {
      badge.textContent = ended ? "Ended, no result recorded" : "Not connected";
      badge.className = "badge unknown";
    }
    const name = main.querySelector("h1")?.textContent, part = main.querySelector("[data-percent]")?.textContent;
    document.title = [state() === "running" ? part : "", name, "Paceline"].filter(Boolean).join(" - ");
    live.dataset.event = shown;
    if (shown < 0) return say(lost ? address : "Connecting", lost ? "bad" : "");
    if (ended || (lost && state() !== "running")) return say("The run has ended. This page is no longer updated.");
    if (lost) return say("No connection since " + clock() + ". The run or the network is down; trying again.", "bad");
    say("Live, updated at " + clock());
  };
  const put = (fresh) => {  // unchanged nodes stay, so that selections, scrolling and opened entries are kept
    const active = main.contains(document.activeElement) ? document.activeElement : null;
    const marked = active?.id === "found", at = active?.closest("details")?.dataset.of;
    const old = [...main.childNodes];
    const left = new Map([...main.querySelectorAll(".scroll")].map((box, place) => [place, box.scrollLeft]));
    fresh.forEach((node, place) => {
      if (!old[place]) main.append(node);
      else if (!old[place].isEqualNode(node)) old[place].replaceWith(node);
    });
    old.slice(fresh.length).forEach((node) => node.remove());
    main.querySelectorAll(".scroll").forEach((box, place) => { box.scrollLeft = left.get(place) || 0; });
    const groups = [...main.querySelectorAll("details")];
    if (marked) main.querySelector("#found")?.focus({preventScroll: true});
    else if (at && !main.contains(document.activeElement))
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
      if (!view.ok) { say(view.status === 401 ? address : await view.text(), "bad"); break; }
      put([...new DOMParser().parseFromString(await view.text(), "text/html").body.childNodes]);
      shown = Number(view.headers.get("X-Event"));
      report();
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
  stream.onopen = () => { if (lost && shown >= 0) again(); lost = false; };
  stream.onmessage = (event) => { wanted = Number(event.data); show().catch(() => { busy = false; }); };
  stream.addEventListener("ended", () => { ended = true; again(); });
  stream.onerror = () => {
    if (!lost) { lost = true; report(); }
    if (ended) stream.close();
  };
})();
"""
LIVE = (
    "#live{position:sticky;top:0;z-index:1;margin:0;padding:.4rem max(1.5rem,calc(50% - 33.5rem));"
    "background:var(--wash);color:var(--soft);"
    "border-bottom:1px solid var(--rule);font-size:.867rem}#live.bad{color:var(--bad)}"
    "#find{display:block;max-width:70rem;margin:0 auto;padding:1rem 1.5rem 0}#find[hidden]{display:none}"
    "#find input{font:inherit;color:inherit;background:var(--card);border:1px solid var(--c5);border-radius:6px;"
    "padding:.25rem .6rem}noscript{display:block;padding:1.5rem}"
)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SHELL = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<style>{STYLE}{LIVE}</style></head><body><p id="live" role="status">Connecting</p>'
    '<label id="find" hidden>Worker or host: <input type="search" spellcheck="false"></label><main></main>'
    "<noscript>This page needs JavaScript. Without it, use the command paceline watch, or after the run the file "
    f"report.html in the run folder.</noscript><script>{SCRIPT}</script></body></html>\n"
)
POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE + LIVE)} {_hash(DRAWN)}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Panels:
    """The panels of a summary. Those with the same opened entries are rendered once for all readers."""

    def __init__(self, summary: Summary) -> None:
        self._summary, self._around = summary, around(summary)
        self.html = lru_cache(VIEWS)(self._html)

    def _html(self, wanted: Chosen) -> str:
        before, after = self._around
        return before + team_of(self._summary, wanted) + after


class Views:
    """The panels of a run, rendered at most once in `OFTEN` seconds for all readers.

    `key` is the reading key, with which a reader opens a session; `hosts` are the names that a request may address.
    """

    def __init__(self, folder: Path, key: str, hosts: Collection[str]) -> None:
        self._newest = Newest(folder, OFTEN, Panels)
        self.folder, self.key, self.hosts = folder, key, hosts
        self.sessions: deque[str] = deque(maxlen=SESSIONS)
        self.streams = 0
        self.ended = False  # whether the run has ended

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
            self._refuse(403, "This host name or origin is not allowed. Use the address that the run printed.")
        elif self.request.path in ASKS and not (self._has_key() if self.request.path == "/journal" else self._known()):
            self._refuse(401, "This request needs the reading key of the run.")
        elif self.request.path in ASKS:
            know(self)

    def _known(self) -> bool:
        given = self.get_cookie(self._cookie(), "") or ""
        return any(hmac.compare_digest(given.encode(), session.encode()) for session in self._views.sessions)

    def _cookie(self) -> str:
        """The name of the session cookie; another one for each run, because all ports of a host share cookies."""
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
            self._refuse(400, "from= must be a whole number of bytes")
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
            self._refuse(401, "This is not the reading key of the run.")
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
        views, sent, is_told = self._views, -1, False
        if views.streams >= STREAMS:
            self._refuse(503, f"{STREAMS} pages already follow this run. Close some of them.")
            return
        self.set_header("Content-Type", "text/event-stream")
        views.streams += 1
        try:
            while True:
                number, _ = views.look()
                self.write(f"id: {number}\ndata: {number}\n\n" if number > sent else ":\n\n")
                sent = number
                if views.ended and not is_told:
                    self.write("event: ended\ndata: \n\n")
                    is_told = True
                await self.flush()  # a slow reader waits here, and holds nothing but its connection
                await asyncio.sleep(OFTEN)
        except StreamClosedError:
            pass
        finally:
            views.streams -= 1


def routes(views: Views) -> list[Any]:
    """The Tornado routes of the page."""
    return [("/(?:|session|view|events|journal)", Page, {"views": views})]
