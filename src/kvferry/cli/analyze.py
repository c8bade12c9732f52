"""``kvferry analyze FILE...``: how much of a trace's prompts could be reused, and what that takes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.cli.progress import Progress
from kvferry.cli.quantities import (
    add_token_arguments,
    flag_count,
    formula,
    token_bytes_notes,
    token_bytes_of,
    token_bytes_why,
)
from kvferry.cli.table import compact, count, duration, labelled, per_second, table
from kvferry.config import format_size, parse_size
from kvferry.errors import MisconfiguredError
from kvferry.traces import findings
from kvferry.traces.breaks import Breaks
from kvferry.traces.explained import explain
from kvferry.traces.formats import MAX_BLOCK_TOKENS, Clock
from kvferry.traces.page import page
from kvferry.traces.policies import Policy
from kvferry.traces.reuse import ReuseLog
from kvferry.traces.source import Malformed, TraceFile
from kvferry.values import parse_path

MAX_CAPACITIES = 32
MAX_BREAKS_SHOWN = 8
LONG_WORK = 50_000  # requests, from which on the policies take seconds
DATES_FROM_S = 9e8  # times from here on are since 1970, and thus comparable from file to file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which files, and what a token of KV weighs."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a trace or request log, plain or gzip")
    add_token_arguments(parser)
    parser.add_argument(
        "--capacities",
        metavar="SIZES",
        help="as 512GiB,1TiB (default: powers of two of blocks)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        help="of logs of text or tokens (default 64); hashed traces have their own",
    )
    parser.add_argument("--html", metavar="PATH", help="also write a page with charts")
    parser.add_argument("--explain", action="store_true", help="how each number came about")
    parser.add_argument("--json", action="store_true", help="the whole document, for programs")


def main(args: argparse.Namespace) -> int:
    """Read, analyse, print. 1: no line gave a request."""
    per_token = token_bytes_of(args)
    size = None
    if args.block_tokens is not None:
        size = flag_count("--block-tokens", args.block_tokens, highest=MAX_BLOCK_TOKENS)
    _refuse_twice(args.files)
    malformed, sources = Malformed(), [TraceFile(Path(name), block_tokens=size) for name in args.files]
    with Progress() as progress:
        log, breaks = _read(sources, malformed, progress)
        step = progress.show if len(log) >= LONG_WORK else findings.silent
        step(f"which capacities matter, {len(log):,} requests")
        figures = findings.document(
            log,
            capacities=_capacities(args.capacities, log, per_token),
            policies=list(Policy),
            clock=_clock(sources),
            step=step,
        )
    found = {
        "files": [_file_document(source) for source in sources],
        "malformed": {
            "lines": malformed.lines,
            "reasons": [
                {"reason": reason, "lines": number, "first": malformed.places[reason]}
                for reason, number in malformed.reasons.most_common()
            ],
        },
        "kv_bytes_per_token": per_token,
        "breaks": [
            asdict(found) for found in sorted(breaks.found.values(), key=lambda found: -found.lost_bytes)
        ],
        **figures,
    }
    found["notes"] = token_bytes_notes(args, figures["traffic"]["input_mean"] or 1)
    found["explanation"] = explain(found, token_bytes=token_bytes_why(args))
    if args.html is not None:
        _write_page(parse_path(args.html), found, per_token)
    print(json.dumps(found, indent=2) if args.json else render(found))
    if args.explain and not args.json:
        print("\nHow the numbers came about:")
        print(formula(found["explanation"]))
    if not len(log):
        print("kvferry: no line gave a request; see the reasons above", file=sys.stderr)
    return 0 if len(log) else 1


def _read(sources: list[TraceFile], malformed: Malformed, progress: Progress) -> tuple[ReuseLog, Breaks]:
    """All requests, a line at a time."""
    log, breaks = ReuseLog(_block_tokens(sources)), Breaks()
    for number, source in enumerate(sources, 1):
        for request in source.requests(malformed):
            dated = source.reader.clock is Clock.TRACE and (request.time_s or 0.0) >= DATES_FROM_S
            log.add(request, clock=0 if dated else number)
            if request.parts:
                breaks.add(request)
            if progress.due:
                read = f"{100 * source.share_read:.0f}%, {count(len(log))} requests"
                progress.show(f"reading {source.path.name}: {read}")
    return log, breaks


def _file_document(source: TraceFile) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.reader.format,
        "lines": source.lines,
        "other_lines": source.other_lines,
        "cut": source.cut,
        "clock": source.reader.clock.value,
        "note": source.reader.note,
    }


def _refuse_twice(names: list[str]) -> None:
    seen = set()
    for name in names:
        path = Path(name).resolve()
        if path in seen:
            raise MisconfiguredError(f"{name} is given twice, and would reuse all of itself; name it once")
        seen.add(path)


def _write_page(path: Path, found: dict[str, Any], per_token: int | None) -> None:
    text = page(found, text=render(found), held=lambda tokens: _held(tokens, per_token), version=__version__)
    try:
        path.write_text(text)
    except OSError as error:
        raise MisconfiguredError(f"--html: cannot write {path}: {error.strerror}") from error


def _block_tokens(sources: list[TraceFile]) -> int:
    sizes = {source.reader.block_tokens for source in sources}
    if len(sizes) > 1:
        raise MisconfiguredError(
            f"the files have blocks of {' and '.join(map(str, sorted(sizes)))} tokens; "
            "analyse them one by one"
        )
    return sizes.pop()


def _clock(sources: list[TraceFile]) -> Clock:
    """Files that each count from their own start have no common time."""
    clocks = {source.reader.clock for source in sources}
    return Clock.TRACE if clocks == {Clock.TRACE} else Clock.SESSION


def _capacities(text: str | None, log: ReuseLog, per_token: int | None) -> list[int]:
    """In blocks, ascending."""
    if text is None:
        return findings.default_capacities(log)
    if per_token is None:
        raise MisconfiguredError(
            "--capacities needs --model or --kv-bytes-per-token, which says how many blocks they hold"
        )
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise MisconfiguredError(f"--capacities {text!r} lacks a size; give sizes as 512GiB,1TiB")
    if len(names) > MAX_CAPACITIES:
        raise MisconfiguredError(f"--capacities has {len(names)} sizes; give at most {MAX_CAPACITIES}")
    found = set()
    for name in names:
        try:
            blocks = parse_size(name) // (per_token * log.block_tokens)
        except MisconfiguredError as error:
            raise MisconfiguredError(f"--capacities: {error}") from error
        if blocks < 1:
            raise MisconfiguredError(
                f"--capacities {name}: a block of {log.block_tokens} tokens takes "
                f"{format_size(per_token * log.block_tokens)}; give more"
            )
        found.add(blocks)
    return sorted(found)


def render(found: dict[str, Any]) -> str:
    """The document as text for people, at most 100 columns."""
    traffic = found["traffic"]
    lines = [labelled("file", _file(source)) for source in found["files"]]
    lines += _malformed(found["malformed"])
    lines.append(labelled("requests", _requests(traffic)))
    for kind in ("input", "output"):
        spread = traffic[f"{kind}_quantiles"]
        if spread:
            lines.append(
                labelled(
                    kind,
                    f"{compact(traffic[f'{kind}_tokens'])} tokens; per request "
                    f"{count(traffic[f'{kind}_mean'])} on average, p50 {count(spread['p50'])}, "
                    f"p90 {count(spread['p90'])}, p99 {count(spread['p99'])}, most {count(spread['max'])}",
                )
            )
    if traffic["input_to_output"] is not None:
        lines.append(labelled("ratio", f"{traffic['input_to_output']:.1f} input tokens per output token"))
    reuse = found["reuse"]
    if reuse is None:
        lines.append(labelled("reuse", "unknown: this trace does not say which prompts share content"))
        return "\n".join(lines)
    if unknown := reuse["requests_without_content"]:
        text = f"{count(unknown)} requests do not say what they share; their tokens count as not reusable"
        lines.append(labelled("unknown", text))
    lines.append(labelled("distinct", _distinct(reuse, found)))
    lines += [labelled("KV", note) for note in found["notes"]]
    lines.append(labelled("reusable", _reusable(reuse["hit_rate"])))
    lines += _people(reuse)
    per_token = found["kv_bytes_per_token"]
    if reuse["by_capacity"]:
        lines += ["", "Input tokens hit over the last half of the requests (the first half fills the cache):"]
        lines.append(_by_capacity(reuse["by_capacity"], reuse["hit_rate"]["last_half"], per_token))
    if reuse["gaps"]:
        lines += ["", "How long a prefix must be kept: reused tokens whose last use is at most so long ago"]
        gaps = reuse["gaps"]["within"]
        head = [duration(gap["gap_s"]) for gap in gaps]
        lines.append(table(head, [[_percent(gap["share"]) for gap in gaps]]))
        lines += _uncounted(reuse["gaps"])
    lines += _breaks(found["breaks"])
    lines += ["", "Working set over the trace; hits are those of a cache that never forgets:"]
    lines.append(_slices(reuse["slices"], reuse["over"], per_token))
    return "\n".join(lines)


def _uncounted(gaps: dict[str, Any]) -> list[str]:
    lines = []
    if gaps["left_out_tokens"]:
        lines.append(
            f"Left out: {compact(gaps['left_out_tokens'])} tokens last used in a session or file with a "
            "clock of its own"
        )
    if gaps["backwards_tokens"]:
        lines.append(
            f"Left out: {compact(gaps['backwards_tokens'])} tokens last used at a later time, as the file's "
            "order has it"
        )
    return lines


def _people(reuse: dict[str, Any]) -> list[str]:
    talks, sessions = reuse["conversations"], reuse["sessions"]
    lines = []
    if talks["growth_tokens"]:
        turns, growth = talks["turns"], talks["growth_tokens"]
        lines.append(
            labelled(
                "turns",
                f"{count(talks['number'])} conversations, as prompts continue each other; turns p50 "
                f"{count(turns['p50'])}, p99 {count(turns['p99'])}, most {count(turns['max'])}; a turn adds "
                f"p50 {count(growth['p50'])}, p99 {count(growth['p99'])} input tokens",
            )
        )
    for name, kind in (("conversation", talks), ("session", sessions)):
        if kind is not None and (total := sum(kind["sharing"].values())):
            own = kind["sharing"]["own_tokens"]
            lines.append(
                labelled(
                    "sharing",
                    f"{_percent(own / total)} of reusable tokens are of the same {name}, "
                    f"{_percent(1 - own / total)} only of others",
                )
            )
    return lines


def _breaks(breaks: list[dict[str, Any]]) -> list[str]:
    if not breaks:
        return []
    lines = ["", "What breaks prefixes: instructions equal to earlier ones but for a place before the rest"]
    for kind in breaks[:MAX_BREAKS_SHOWN]:
        example = kind["example"]
        lines += [
            f"{kind['cause']} in {kind['part']}, {count(kind['requests'])} requests, "
            f"{compact(kind['lost_bytes'])} equal bytes behind it; "
            f"first at byte {count(example['equal_bytes'])}:",
            f"          ...{example['earlier']}",
            f"          ...{example['later']}",
        ]
    return lines


def _held(tokens: int, per_token: int | None) -> str:
    """So many tokens, as their KV where a token's bytes are known."""
    return format_size(tokens * per_token) if per_token else compact(tokens)


def _slices(rows: list[dict[str, Any]], over: str, per_token: int | None) -> str:
    unit = "KV" if per_token else "TOKENS"
    start = "FROM" if over == "time" else "REQUEST"
    head = [start, "REQUESTS", "INPUT", f"IN USE, {unit}", f"NEW, {unit}", "HIT"]
    return table(
        head,
        [
            [
                duration(row["start"]) if over == "time" and row["start"] else count(row["start"]),
                count(row["requests"]),
                compact(row["input_tokens"]),
                _held(row["touched_tokens"], per_token),
                _held(row["new_tokens"], per_token),
                _percent(row["hit_tokens"] / row["input_tokens"] if row["input_tokens"] else None),
            ]
            for row in rows
        ],
    )


def _file(source: dict[str, Any]) -> str:
    text = f"{source['path']}: {source['format']}, {count(source['lines'])} lines"
    if source["other_lines"]:
        text += f", {count(source['other_lines'])} of them no requests"
    if source["cut"]:
        text += "; damaged or cut short, only what comes before that was read"
    if source["clock"] == "session":
        text += "; sessions are timed each from its own start and read one after another"
    return text + (f"; {source['note']}" if source["note"] else "")


def _malformed(malformed: dict[str, Any]) -> list[str]:
    if not malformed["lines"]:
        return []
    lines = [labelled("malformed", f"{count(malformed['lines'])} lines gave no request and are left out:")]
    return lines + [
        labelled("", f"{count(kind['lines'])}: {kind['reason']} (first at {', '.join(kind['first'])})")
        for kind in malformed["reasons"]
    ]


def _requests(traffic: dict[str, Any]) -> str:
    text = count(traffic["requests"])
    if traffic["span_s"]:
        rate = per_second(traffic["requests"] / traffic["span_s"])
        text += f" in {duration(traffic['span_s'])}, {rate} on average"
    if traffic["sessions"]:
        text += f", of {count(traffic['sessions'])} sessions"
    if traffic["times_going_back"]:
        text += (
            f"; {count(traffic['times_going_back'])} are timed before the one before: the file's order holds"
        )
    return text


def _distinct(reuse: dict[str, Any], found: dict[str, Any]) -> str:
    text = (
        f"{compact(reuse['distinct_tokens'])} tokens in {compact(reuse['distinct_blocks'])} blocks of "
        f"{count(found['block_tokens'])}"
    )
    if found["kv_bytes_per_token"]:
        text += f", {format_size(reuse['distinct_tokens'] * found['kv_bytes_per_token'])} of KV"
    return text


def _reusable(rates: dict[str, float | None]) -> str:
    return (
        f"{_percent(rates['whole_trace'])} of all input tokens from an empty cache that never forgets; "
        f"{_percent(rates['last_half'])} over the last half of the requests"
    )


def _by_capacity(rows: list[dict[str, Any]], most: float, per_token: int | None) -> str:
    def points(more: float, less: float) -> str:
        return f"{100 * (more - less):.1f} points"

    head = ["TOKENS", *(["KV BYTES"] if per_token else []), *(policy.upper() for policy in Policy)]
    return table(
        [*head, "LRU LOSES TO POLICY", "TO CAPACITY"],
        [
            [
                compact(row["tokens"]),
                *([format_size(row["tokens"] * per_token)] if per_token else []),
                *(_percent(row[policy]["last_half"]) if policy in row else "-" for policy in Policy),
                points(row["optimum"]["last_half"], row["lru"]["last_half"]),
                points(most, row["optimum"]["last_half"]),
            ]
            for row in rows
        ],
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
