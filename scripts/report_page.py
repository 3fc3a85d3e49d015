"""The page of report.py: sections of tables, plots and lines of text, written as HTML and as Markdown.

A cell that is None is a figure nobody has measured, and both formats say so.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report_data import Source

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Table:
    """`folded`: behind a click. `sources` are written under it, in full."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    sources: Sequence[Source] = ()
    title: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Plot:
    """`name` is that of the file for the Markdown; `alt` says what it shows to who cannot see it."""

    name: str
    svg: str
    alt: str
    sources: Sequence[Source] = ()


@dataclass
class Section:
    """A heading and what stands under it; a str is a paragraph of plain text."""

    title: str
    blocks: list[str | Table | Plot] = field(default_factory=list)


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One file, no scripts, nothing fetched."""
    links = "".join(f'<a href="#{_anchor(s.title)}">{html.escape(s.title)}</a>' for s in sections)
    body = []
    for section in sections:
        body.append(f'<section id="{_anchor(section.title)}"><h2>{html.escape(section.title)}</h2>')
        body += [_html_block(block) for block in section.blocks]
        body.append("</section>")
    style = (Path(__file__).parent / "report.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style></head>\n<body><main><h1>{html.escape(title)}</h1>"
        f"<nav>{links}</nav>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _html_block(block: str | Table | Plot) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Plot):
        return (
            f'<figure><div class="plot" role="img" aria-label="{html.escape(block.alt, quote=True)}">{block.svg}</div>'
            f'<figcaption class="sources">{_html_sources(block.sources)}</figcaption></figure>'
        )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in block.headers)
    rows = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>" for row in block.rows)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    table += f'<div class="sources">{_html_sources(block.sources)}</div>'
    if block.folded:
        return f"<details><summary>{html.escape(block.title)}</summary>{table}</details>"
    return (f"<h3>{html.escape(block.title)}</h3>" if block.title else "") + table


def _html_cell(cell: str | None) -> str:
    if cell is None:
        return f'<td class="none">{NOT_MEASURED}</td>'
    kind = ' class="number"' if cell[:1].isdigit() or cell in ("", "-") else ""
    return f"<td{kind}>{html.escape(cell)}</td>"


def _html_sources(sources: Sequence[Source]) -> str:
    """In full; more than two behind a click."""
    lines = "".join(
        f'<div><a href="#sources">[{s.number}]</a> {html.escape(s.device)}; {html.escape(s.version_line)}; commit '
        f"{html.escape(s.commit)}; {html.escape(s.date)}; <code>{html.escape(s.command)}</code></div>"
        for s in sources
    )
    if len(sources) <= 2:
        return lines
    numbers = " ".join(f"[{source.number}]" for source in sources)
    return f"<details><summary>device, versions, command, commit and date of {numbers}</summary>{lines}</details>"


def to_markdown(title: str, sections: Sequence[Section], plots: str) -> str:
    """`plots` is the folder of the SVG files, as the Markdown file sees it."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_markdown_block(block, plots), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_block(block: str | Table | Plot, plots: str) -> list[str]:
    if isinstance(block, str):
        return [_plain(block)]
    if isinstance(block, Plot):
        return [f"![{_plain(block.alt)}]({plots}/{block.name}.svg)", *_markdown_sources(block.sources)]
    lines: list[str] = []
    if block.folded:
        lines = [f"<details><summary>{_plain(block.title)}</summary>", ""]
    elif block.title:
        lines = [f"**{_plain(block.title)}**", ""]
    lines += [_markdown_row(block.headers), _markdown_row(["---"] * len(block.headers))]
    lines += [_markdown_row([NOT_MEASURED if cell is None else cell for cell in row]) for row in block.rows]
    return lines + _markdown_sources(block.sources) + (["", "</details>"] if block.folded else [])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _markdown_sources(sources: Sequence[Source]) -> list[str]:
    lines = [
        f"<sub>[{s.number}] {_plain(s.device)}; {s.version_line}; commit {s.commit}; {s.date}; `{s.command}`</sub>  "
        for s in sources
    ]
    return ["", *lines] if lines else []


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())
