"""Reports progress to Kubeflow Trainer.

The protocol is specified in
https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from asyncio import Event
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.base.console import say
from paceline.base.schema import read_file
from paceline.base.text import total
from paceline.errors import PacelineError, first_line
from paceline.observe.metrics import values_of
from paceline.observe.summary import Newest, Summary

EVERY = 5.0  # seconds between two posts; Kubeflow allows no more posts
PATIENCE = 5.0  # seconds for an answer
MOST, LONGEST, LARGEST = 256, 64, 2**31 - 1  # metrics; characters of a name or value; a number of seconds


def status(summary: Summary) -> dict[str, Any]:
    """The body to post. The steps of several trainers are added up; unknown fields are left out."""
    newest = [records[-1] for records in summary.steps.values()]
    done = sum(int(record.get("step") or 0) for record in newest)
    aims: dict[Any, Any] = {grid.get("trainer"): grid.get("steps") for grid in summary.grids}
    aim = sum(aims.values()) if aims and None not in aims.values() else 0
    fields: dict[str, Any] = {
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(summary.last_event_at))
    }
    left = 0 if summary.finished else max(aim - done, 0)
    seconds, steps = total(newest, "seconds"), total(newest, "steps")
    if aim or summary.finished:
        fields["progressPercentage"] = min(done * 100 // aim, 100) if left else 100
        if steps or not left:
            fields["estimatedRemainingSeconds"] = min(round(left * seconds / steps), LARGEST) if left else 0
    values: dict[str, Any] = {"step": done}
    for record in newest:
        values |= values_of(record)
    values |= {name: curve[-1][1] for name, curve in summary.series.items()}
    metrics = (
        {"name": name[:LONGEST], "value": f"{value:.7g}"}
        for name, value in values.items()
        if name and not isinstance(value, str)
    )
    return {"trainerStatus": {**fields, "metrics": list(islice(metrics, MOST))}}


def post(server: Mapping[str, str], body: Mapping[str, Any]) -> None:
    """Posts `body` to Kubeflow's `server`: its ``url`` and the paths of its ``certificate`` and of our ``token``.

    Both files are read at each call, because Kubernetes replaces them now and then. Raises OSError, HTTPException or
    ValueError if the server does not accept the body.
    """
    where = urlsplit(server["url"])
    context = ssl.create_default_context(cafile=server["certificate"] or None)
    token = read_file(server["token"]).decode().strip()
    # http.client ignores proxies, which must not be used for servers in the cluster.
    connection = HTTPSConnection(where.hostname or "", where.port, timeout=PATIENCE, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", where.path, json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise HTTPException(f"{answer.status} {answer.reason}")


async def report(folder: Path, server: Mapping[str, str], ended: Event) -> None:
    """Posts the status of the run until it has `ended`, and then its end. Prints only the first failure."""
    newest, sent, warned = Newest(folder, EVERY, status), -1, False
    while True:
        last = ended.is_set()
        try:
            number, body = await asyncio.to_thread(newest.get, last)
            if number > sent:
                await asyncio.to_thread(post, server, body)
                sent = number
        except (OSError, HTTPException, ValueError, PacelineError) as error:
            if not warned:
                say(f"Kubeflow Trainer does not accept progress reports ({first_line(error)})", sys.stdout)
            warned = True
        if last:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), EVERY)
