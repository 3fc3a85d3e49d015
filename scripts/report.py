#!/usr/bin/env python3
"""Write benchmarks/report.html and REPORT.md from benchmarks/*.json.

    python scripts/report.py
    python scripts/report.py --benchmarks FOLDER --html report.html --markdown REPORT.md --plots plots

Needs the report extra: pip install -e ".[report]". The page is one file that fetches nothing; the Markdown shows the
same plots from --plots. Every figure stands with its device, versions, command, commit and date; what nobody measured
has a row that says so. A json of another kind, or without its source, is skipped with a line that says why, here and on
the page. The same files give the same bytes.

Exit codes: 0; 2 for a folder that is not there, or a file that cannot be written. The last line of stdout is one JSON
object.
"""

import argparse
import json
import os
import sys
from pathlib import Path

try:
    from report_page import Plot, to_html, to_markdown
    from report_sections import sections
except ModuleNotFoundError as missing:
    print(f'{missing.name} is not installed: pip install -e ".[report]"', file=sys.stderr)
    raise SystemExit(2) from missing
from report_read import load_results

TITLE = "ltx-runner: benchmarks"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks"), help="folder of json files")
    parser.add_argument("--html", type=Path, help="default: report.html in that folder")
    parser.add_argument("--markdown", type=Path, help="default: REPORT.md in that folder")
    parser.add_argument(
        "--plots", type=Path, help="folder of the Markdown's svg files (default: ../docs/assets from it)"
    )
    return parser.parse_args(argv)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    folder = arguments.benchmarks
    if not folder.is_dir():
        print(
            f"--benchmarks {folder} is not a folder; give one with the json files of the bench scripts", file=sys.stderr
        )
        return 2
    page = arguments.html or folder / "report.html"
    markdown = arguments.markdown or folder / "REPORT.md"
    plots = arguments.plots or folder.parent / "docs" / "assets"
    results = load_results(folder)
    for name, why in results.skipped:
        print(f"skipped {name}: {why}", file=sys.stderr)
    found = sections(results)
    drawn = [block for section in found for block in section.blocks if isinstance(block, Plot)]
    flag = "--html"
    try:
        _write(page, to_html(TITLE, found))
        flag = "--markdown"
        _write(markdown, to_markdown(TITLE, found, os.path.relpath(plots, markdown.parent)))
        flag = "--plots"
        for plot in drawn:
            _write(plots / f"{plot.name}.svg", plot.svg)
        for stale in set(plots.glob("report_*.svg")) - {plots / f"{plot.name}.svg" for plot in drawn}:
            stale.unlink()
    except OSError as error:
        print(f"{flag}: {error.filename} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    print(
        json.dumps(
            {
                "html": str(page),
                "markdown": str(markdown),
                "plots": [plot.name for plot in drawn],
                "read": [source.file for source in results.sources],
                "skipped": dict(results.skipped),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
