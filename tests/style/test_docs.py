"""The documents lead to each other, and to files that exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
MAX_DECISION_WORDS = 400

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_DECISION_HEAD = re.compile(
    r"# .+\n\n(Proposed|Accepted|Replaced by .+), \d{4}-\d\d-\d\d\.\n\n\*\*Question\.\*\* "
)
_NAMED_PAGE = re.compile(r"\bdocs/[\w/.-]+\.(?:md|svg)\b")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _links(page: Path) -> list[tuple[Path, str]]:
    """Relative links: the file each names, and its anchor or nothing."""
    found = []
    for target in _LINK.findall(_prose(page)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            found.append(((page.parent / file).resolve() if file else page, anchor))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_link_leads_somewhere(page: Path) -> None:
    broken = []
    for file, anchor in _links(page):
        if not file.exists():
            broken.append(str(file))
        elif anchor and anchor not in {_anchor(heading) for heading in _HEADING.findall(_prose(file))}:
            broken.append(f"{file}#{anchor}")
    assert not broken


def test_every_page_is_found_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            waiting += [file for file, _ in _links(page) if file.suffix == ".md"]
    assert not [_name(page) for page in DOCS.rglob("*.md") if page not in seen]


def test_a_page_that_the_source_names_exists() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src", "tests", "tools"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    missing = []
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.suffix in {".py", ".sh"} and path.is_file():
            missing += [f"{name}: {page}" for page in _NAMED_PAGE.findall(path.read_text())]
    assert not [line for line in missing if not (ROOT / line.split(": ")[1]).exists()]


@pytest.mark.parametrize("page", sorted(set(DECISIONS.glob("*.md")) - {DECISIONS / "README.md"}), ids=_name)
def test_a_decision_is_short_dated_and_in_the_index(page: Path) -> None:
    text = page.read_text()
    assert _DECISION_HEAD.match(text)
    assert len(text.split()) <= MAX_DECISION_WORDS
    assert f"- [{page.stem}]({page.name}): " in (DECISIONS / "README.md").read_text()
