"""What the router can be asked and told by its user: the handlers of ``admin``, and their documents."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import RefusedError
from kvferry.router import pilot_report
from kvferry.router.admin import Handler
from kvferry.router.contract import Guide
from kvferry.router.http.refusals import TurnedAwayError
from kvferry.router.reload import Plan
from kvferry.router.settings import parse_pool, parse_worker

if TYPE_CHECKING:
    from kvferry.router.app import Router

DRAIN_S = 600.0


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    pool: str = ""


def orders(router: "Router", reload: Callable[[], Plan]) -> dict[str, Handler]:
    """By ``METHOD /path``. reload: reads the settings anew."""

    def add(query: Mapping[str, str], body: bytes) -> object:
        del query
        try:
            added = msgspec.json.decode(body, type=_Added)
        except msgspec.MsgspecError as error:
            raise RefusedError(f'write {{"url": "http://host:8000"}}: {error}') from error
        url = parse_worker(added.url)
        router.add_worker(url, pool=parse_pool(added.pool))
        return {"added": url}

    def remove(query: Mapping[str, str], body: bytes) -> object:
        del body
        if "url" not in query:
            raise RefusedError("which worker? DELETE /workers?url=http://host:8000")
        url = parse_worker(query["url"])
        try:
            grace_s = float(query.get("grace_s", DRAIN_S))
        except ValueError as error:
            raise RefusedError(f"grace_s={query['grace_s']} is no number of seconds") from error
        if not 0 <= grace_s <= 86400:
            raise RefusedError(f"grace_s={query['grace_s']} is outside 0 to 86400 seconds")
        if not router.drain_worker(url, grace_s=grace_s):
            raise TurnedAwayError(404, f"{url} is no worker of this router; GET /workers lists them")
        return {"drains": url, "grace_s": grace_s}

    def explain(query: Mapping[str, str], body: bytes) -> object:
        del body
        if not query.get("request"):
            raise RefusedError("which request? GET /explain?request=ID, of X-Request-Id in its answer")
        told = router.reception.explain(query["request"])
        if told is None:
            raise TurnedAwayError(404, "this request is not known here, any more or at all")
        return told

    def read_anew(query: Mapping[str, str], body: bytes) -> object:
        del query, body
        return reload().document()

    return {
        "GET /status": lambda query, body: status(router),
        "GET /workers": lambda query, body: workers(router),
        "GET /explain": explain,
        "GET /pilot": lambda query, body: _pilots(router),
        "POST /workers": add,
        "DELETE /workers": remove,
        "POST /reload": read_anew,
    }


def status(router: "Router") -> dict[str, Any]:
    """The whole document."""
    snapshot = router.snapshot()
    return {
        "pid": snapshot.pid,
        "version": snapshot.version,
        "address": str(router.address),
        "uptime_s": snapshot.uptime_s,
        "policy": router.settings.policy,
        "proxy": snapshot.proxy,
        "workers": workers(router),
        "pools": {pool or "default": guide.statistics() for pool, guide in router.reception.guides.items()},
        "feeds": router.followers.statistics(),
        "pilots": _pilots(router) if router.pilots.active else None,
    }


def _pilots(router: "Router") -> dict[str, Any]:
    """Pools side by side. text: the same for people."""
    return {**pilot_report.document(router.pilots), "text": pilot_report.text(router.pilots)}


def workers(router: "Router") -> list[dict[str, Any]]:
    """One entry each."""
    proxy = router.proxy.statistics().workers
    loads = loads_of(router.reception.guides.values())
    found = []
    for worker in router.roster:
        in_flight, connections, connects = proxy.get(worker.url, (0, 0, 0))
        found.append(
            {
                "url": worker.url,
                "pool": worker.pool or "default",
                "state": worker.state.value,
                "models": [model.name for model in worker.models] if worker.models is not None else None,
                "in_flight": in_flight,
                "connections": connections,
                "connects": connects,
                "failures": {what.value: count for what, count in worker.health.failures.items()},
                "times_down": worker.health.times_down,
                "trouble": worker.trouble,
                "load": loads.get(worker.url),
            }
        )
    return found


def loads_of(guides: Iterable[Guide]) -> dict[str, Mapping[str, int]]:
    """What guides count, by worker."""
    found: dict[str, Mapping[str, int]] = {}
    for guide in guides:
        told = guide.statistics().get("workers")
        if isinstance(told, Mapping):
            found.update(told)
    return found
