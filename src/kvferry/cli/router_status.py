"""``kvferry status --router``: workers and requests of a router, as text."""

from typing import Any

from kvferry.cli.table import causes, count, duration, labelled, table


def render(status: dict[str, Any]) -> str:
    """The status document for people."""
    proxy: dict[str, Any] = status["proxy"]
    ended: dict[str, int] = proxy["ended"]
    lines = [
        labelled(
            "router",
            f"{status['pid']} at {status['address']}, kvferry {status['version']}, "
            f"up {duration(status['uptime_s'])}, policy {status['policy']}",
        ),
        "",
        _workers(status["workers"]),
        "",
        labelled(
            "requests",
            f"{count(proxy['requests'])}: {count(proxy['in_flight'] - proxy['waiting'])} in flight, "
            f"{count(proxy['waiting'])} waiting, "
            + ", ".join(
                f"{count(ended.get(how, 0))} {how}" for how in ("done", "refused", "aborted", "failed")
            ),
        ),
    ]
    if proxy["events"]:
        lines.append(labelled("events", causes(proxy["events"])))
    lines.extend(labelled("feed", f"{feed['address']} {_feed(feed)}".rstrip()) for feed in status["feeds"])
    if status.get("pilots"):
        lines.extend(["", *status["pilots"]["text"]])
    return "\n".join(lines)


def _feed(feed: dict[str, Any]) -> str:
    """How it is, the address not said again."""
    if feed["state"] == "absent":
        return "absent: no feed there; fine without nodes"
    error = str(feed["error"]).replace(f"{feed['address']}: ", "")
    return f"{feed['state']} {error}"


def _workers(workers: list[dict[str, Any]]) -> str:
    rows = []
    for worker in workers:
        load: dict[str, int] = worker["load"] or {}
        models = worker["models"]
        rows.append(
            (
                worker["url"],
                worker["pool"],
                worker["state"],
                count(worker["in_flight"]),
                count(load.get("waiting_tokens", 0)),
                count(load.get("chosen", 0)),
                ", ".join(models[:3]) + (" ..." if len(models) > 3 else "") if models else "?",
            )
        )
    return table(("worker", "pool", "state", "in flight", "tokens to compute", "requests", "models"), rows)
