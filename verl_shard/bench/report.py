"""One page of all results in a folder: a section for each file, with its machine, tables and plot, and nothing outside of it."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from verl_shard.bench import report_sections as sections
from verl_shard.common.errors import Faults, config_error
from verl_shard.common.files import check_output, write_whole
from verl_shard.common.pictures import check_can_draw

PAGE = "report.html"
"""The page of a folder, in it."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #d5dbe1; padding-top: 1.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e4e9ee; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .about { color: #55626f; } img { max-width: 100%; } code { background: #f1f4f7; padding: 0 .3em; }
"""


@dataclass(frozen=True)
class Page:
    """What was written. sections: the files in it; skipped: those that are not, and why."""

    path: Path
    sections: tuple[str, ...]
    skipped: Mapping[str, str]

    @property
    def words(self) -> str:
        """ "3 results; skipped: notes.json (its schema is not known: None)"."""
        count = f"{len(self.sections)} result{'s' if len(self.sections) != 1 else ''}"
        left = "; ".join(f"{name} ({why})" for name, why in self.skipped.items())
        return count + (f"; skipped: {left}" if left else "")


def bench_report(folder: Path, page: Path | None = None) -> Page:
    """Writes the page of all results in a folder, by default report.html in it.

    A file that is no result of a bench of ours, or cannot be read as one, is named on the page and left out.
    Raises ConfigError for a folder that is not there or has no result, and for a page that cannot be written;
    MissingExtraError without matplotlib.
    """
    faults = Faults()
    with faults.gathering():
        if not folder.is_dir():
            raise config_error(
                "no-folder", "DIR", str(folder), "there is no such folder", "Name one with results in it"
            )
        if page is None:
            check_output(folder / PAGE, "DIR")
    with faults.gathering():
        if page is not None:
            check_output(page, "--out")
    faults.check()
    check_can_draw()
    found: dict[str, str] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="verl_shard_report_") as plots:
        for file in sorted(folder.glob("*.json")):
            try:
                found[file.name] = section(file, Path(plots) / "plot.png")
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                skipped[file.name] = _why(error)
    if not found:
        left = "; ".join(f"{name}: {why}" for name, why in skipped.items()) or "there is no .json file in it"
        fix = "Write some: verl-shard bench ladder --out DIR/ladder.json"
        raise config_error("no-results", "DIR", str(folder), f"it holds no result of a bench ({left})", fix)
    path = folder / PAGE if page is None else page
    write_whole(path, html(found, skipped))
    return Page(path, tuple(found), skipped)


def _why(error: Exception) -> str:
    if isinstance(error, sections.UnknownSchemaError):
        return str(error)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is not JSON"
    return f"it is not as its schema says ({type(error).__name__}: {error})"


def section(file: Path, plot: Path) -> str:
    """HTML of one file. plot: where its picture may be put meanwhile. Raises what reading it raises."""
    record = json.loads(file.read_text(encoding="utf-8"))
    made = sections.section_of(record)
    parts = [f'<h2 id="{escape(file.stem)}">{escape(made.title)}</h2>', f'<p class="about">{about(file, record)}</p>']
    if made.draw is not None:
        parts.append(f'<img alt="{escape(made.title)}" src="{data_uri(made.draw, record, plot)}">')
    parts += [_table(one) for one in made.tables]
    parts += [f"<p>{escape(note)}</p>" for note in made.notes]
    return "\n".join(parts)


def about(file: Path, record: Mapping[str, Any]) -> str:
    """Where it was measured, with what, when and how; HTML."""
    machine = record.get("machine") or {}
    gpus: Sequence[str] = machine.get("gpus") or ()
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    packages = [f"{name} {version}" for name, version in (machine.get("packages") or {}).items() if version]
    said = [*counted, f"{machine.get('cpus', '?')} CPU cores", f"Python {machine.get('python', '?')}", *packages]
    words = [escape(", ".join(said))]
    if "date" in record:
        words.append(escape(str(record["date"])))
    if "command" in record:
        words.append(f"<code>{escape(str(record['command']))}</code>")
    return "; ".join([*words, f"<code>{escape(file.name)}</code>"])


def data_uri(draw: Callable[[Mapping[str, Any], Path], None], record: Mapping[str, Any], plot: Path) -> str:
    """The picture itself, in the page."""
    draw(record, plot)
    return "data:image/png;base64," + base64.b64encode(plot.read_bytes()).decode("ascii")


def _table(made: sections.Rows) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    head, body = line(made.columns, "th"), "\n".join(line(row, "td") for row in made.rows)
    caption = f"<caption>{escape(made.title)}</caption>" if made.title else ""
    return f'<div class="wide"><table>{caption}<thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


def html(found: Mapping[str, str], skipped: Mapping[str, str]) -> str:
    """The whole page."""
    return "\n".join(_lines(found, skipped)) + "\n"


def _lines(found: Mapping[str, str], skipped: Mapping[str, str]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>verl-shard bench report</title>'
    yield f"<style>{_STYLE}</style></head><body>\n<h1>Results of verl-shard bench</h1>"
    yield from found.values()
    if skipped:
        yield "<h2>Skipped</h2>\n<ul>"
        yield from (f"<li><code>{escape(name)}</code>: {escape(why)}</li>" for name, why in skipped.items())
        yield "</ul>"
    yield "</body></html>"
