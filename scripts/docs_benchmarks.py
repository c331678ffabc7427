"""Write docs/benchmarks/*.md from results/*.jsonl, so that no figure is copied by hand.

python scripts/docs_benchmarks.py
python scripts/docs_benchmarks.py --check                # exit 1 if a page is not up to date
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels.benchmarks import tables  # noqa: E402


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the .jsonl files")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks", help="folder of the pages")
    parser.add_argument("--check", action="store_true", help="compare with the pages in the folder; write nothing")
    options = parser.parse_args(arguments)
    if not options.check:
        for path in tables.write_pages(options.results, options.output):
            print(f"written: {path}")
        return
    with tempfile.TemporaryDirectory() as folder:
        expected = tables.write_pages(options.results, Path(folder))
        outdated = [path.name for path in expected if not _same(path, options.output / path.name)]
    if outdated:
        sys.exit(f"outdated: {', '.join(outdated)}; run python scripts/docs_benchmarks.py")


def _same(expected: Path, found: Path) -> bool:
    return found.exists() and found.read_text() == expected.read_text()


if __name__ == "__main__":
    main()
