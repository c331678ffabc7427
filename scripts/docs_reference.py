"""Write the reference pages that are generated from the code; docs/conf.py calls this before each build.

python scripts/docs_reference.py [FOLDER]                 # docs/reference/generated
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from reference_pages import api, attention, error_codes, ops, settings  # noqa: E402


def write_pages(folder: Path) -> list[Path]:
    """Write every generated page to `folder` and return their paths. Unchanged files keep their modification time."""
    pages = {
        "configuration.md": settings.configuration_page(),
        "attention_backends.md": attention.attention_page(),
        "op_backends.md": ops.ops_page(),
        "timm_attention.md": attention.timm_attention_page(),
        "error_codes.md": error_codes.error_codes_page(),
        **{f"api_{name}.md": text for name, text in api.api_pages().items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in pages]


def main(arguments: list[str] | None = None) -> None:
    folder, *_ = [*(sys.argv[1:] if arguments is None else arguments), ROOT / "docs/reference/generated"]
    for path in write_pages(Path(folder)):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
