"""Find the commands and examples in README.md and docs/.

A fenced block of sh, console or python may follow one comment that says how it is tested:

    <!-- run: SETTINGS -->            run it, with these settings appended to every command of train.py
    <!-- run slow: SETTINGS -->       the same, in a test marked slow
    <!-- run: "a" -> "b", ... -->     run a python block, with these replacements
    <!-- file: NAME -->               write a python block to this file, for the page's later commands
    <!-- skip: REASON -->             neither run nor checked

Without a comment, python blocks are compiled, and each command of a sh block is checked: settings are composed, options
and files exist.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<how>run|skip|file)(?P<slow> slow)?(?:: (?P<argument>.*?))? -->\n\n?)?"
    r"^```(?P<language>sh|console|python)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, and how it is tested ("run", "skip", "file", or "check")."""

    page: str
    line: int
    language: str
    text: str
    how: str
    slow: bool
    argument: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a sh block, split into words, without comments and what follows a pipe."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """Return README.md and every page of the documentation that is written by hand."""
    generated = ROOT / "docs/reference/generated"
    found = (path for path in sorted((ROOT / "docs").rglob("*.md")) if generated not in path.parents)
    return [ROOT / "README.md", *(path for path in found if "_build" not in path.parts)]


def blocks() -> Iterator[Block]:
    """Yield every block of sh, console and python in the pages."""
    for path in pages():
        text = path.read_text()
        for found in _BLOCK.finditer(text):
            yield Block(
                page=str(path.relative_to(ROOT)),
                line=text.count("\n", 0, found.start("language")) + 1,
                language=found["language"],
                text=found["text"],
                how=found["how"] or "check",
                slow=bool(found["slow"]),
                argument=found["argument"] or "",
            )
