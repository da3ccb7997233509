"""The documentation is built without a warning, its links lead somewhere, and every block in it works.

Pages are run from top to bottom in a folder in which the models they name are tiny: see conftest.py. A block that is not
run says why in a comment above it, and is still held against the real signatures: see blocks.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import yaml

import verl_shard
from docs import commands
from docs.blocks import PAGES, ROOT, Block, blocks_of, marks_of
from docs.python_blocks import faults_of, run_block
from docs.without_marks import MARKS_OF
from verl_shard.diagnosis.catalogue import Fault

PYTHON, SHELL, YAML, TEXT = {"python"}, {"bash", "console"}, {"yaml"}, {"", "text"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_works(page: str, place: Path) -> None:
    blocks = [_with_marks(block) for block in blocks_of(page)]
    reader = _Reader(place)
    for block in blocks:
        if "file" in block.marks:
            (place / block.marks["file"]).write_text(block.text, encoding="utf-8")
    done = [reader.read(block) for block in blocks]
    fences = sum(bool(re.match(r" *```", line)) for line in (ROOT / page).read_text(encoding="utf-8").splitlines())
    assert len(done) >= fences / 2
    assert Counter(done).keys() <= {"run", "checked", "loaded", "shown", "parsed"}


class _Reader:
    """Reads a page from top to bottom."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.written: set[str] = set()
        self.output: str | None = None

    def read(self, block: Block) -> str:
        """Does with a block what can be done with it, and says what was done."""
        if block.language in PYTHON:
            return self._python(block)
        if block.language in SHELL:
            return self._shell(block)
        if block.language in YAML:
            return self._yaml(block)
        if block.language in ("json", "toml"):
            json.loads(block.text) if block.language == "json" else _read_faults(block)
            return "loaded"
        assert block.language in TEXT, f"{block.where}: no test knows what a block of {block.language!r} is"
        return self._text(block)

    def _python(self, block: Block) -> str:
        if "not run" in block.marks:
            assert faults_of(block, self.names) == []
            self.output = None
            return "checked"
        self.output = run_block(block, self.names)
        return "run"

    def _shell(self, block: Block) -> str:
        if "file" in block.marks:  # what reads it is checked where it does
            return "checked"
        text = block.text
        if block.language == "console":
            text = "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))
        done = commands.check_block(replace(block, text=text), self.written)
        self.output = None
        quick = [command for command, _ in done if commands.is_quick(command)]
        if "not run" in block.marks or not quick:
            return "parsed"
        number, _, why = block.marks.get("exit", "0 ").partition(" ")
        assert why or number == "0", f"{block.where}: an exit code without a reason"
        self.output = ""
        for command in quick:
            code, shown, said = commands.run_command(command)
            assert str(code) in number.split("/"), f"{block.where}: {command.words} ended with {code}: {said}"
            self.output += shown + said
        if block.language == "console":
            self._is_output(block, "\n".join(line for line in block.text.splitlines() if not line.startswith("$ ")))
        return "run"

    def _yaml(self, block: Block) -> str:
        content = yaml.safe_load(block.text)
        if content is None:
            schema = re.fullmatch(r"# yaml-language-server: \$schema=path/to/(\S+)\n", block.text)
            assert schema, f"{block.where}: neither YAML nor a schema"
            assert (Path(verl_shard.__file__).parent / "config" / schema[1]).is_file()
            return "checked"
        name = re.match(r"# (\S+\.yaml)", block.text)
        file = self.place / (name[1] if name else "block.yaml")
        file.write_text(block.text, encoding="utf-8")
        self.written.add(file.name)
        if str(content.get("schema", "")).startswith("verl_shard/plan/"):
            verl_shard.Plan.load(file)
        elif "topology" in content:
            from verl_shard.config.topology import from_topology

            from_topology(content)
        elif content.keys() & {"actor", "reward", "rollout", "ref", "critic"}:
            from verl_shard.config.resource_config import load_resource_config

            load_resource_config(file)
        else:
            keys = [f"{key}={commands.as_override(value)}" for key, value in commands.flat(content)]
            commands.compose(keys)
        return "loaded"

    def _text(self, block: Block) -> str:
        if all(line.startswith("$ ") for line in block.text.splitlines()):
            return self._shell(replace(block, language="console"))
        if "shown" in block.marks:
            return "shown"
        assert self.output is not None, f"{block.where}: the output of nothing that ran; say <!-- shown: why -->"
        self._is_output(block, block.text)
        return "run"

    def _is_output(self, block: Block, text: str) -> None:
        """Every line is there, in this order; "..." stands for any number of lines."""
        assert self.output is not None
        there = [" ".join(line.split()) for line in self.output.splitlines()]
        at = 0
        for line in filter(None, (" ".join(line.split()) for line in text.splitlines())):
            if line == "...":
                continue
            assert line in there[at:], f"{block.where}: {line!r} was not printed, but:\n{self.output}"
            at += there[at:].index(line) + 1


def _read_faults(block: Block) -> None:
    """An entry of the catalogue of faults, whose fields are those that the catalogue has."""
    entries = tomllib.loads(block.text)["fault"]
    known = {field.name for field in fields(Fault)}
    assert entries
    assert all(entry.keys() <= known for entry in entries), f"{block.where}: {entries[0].keys() - known} are no fields"


def _with_marks(block: Block) -> Block:
    """The block with the marks that test files keep for pages without comments."""
    kept = {_key(*key): marks for key, marks in MARKS_OF.items()}
    return replace(block, marks={**kept.get(_key(block.page, block.text), {}), **block.marks})


def _key(page: str, text: str) -> tuple[str, str]:
    """Page and first line of code, whatever its blanks are."""
    return page, " ".join(text.splitlines()[0].split())


def test_marks_of_pages_without_comments_are_of_blocks_that_are_there() -> None:
    there = {_key(page, block.text) for page in PAGES for block in blocks_of(page)}
    assert {_key(*key) for key in MARKS_OF} <= there


def test_the_pages_are_built_without_a_warning(site: tuple[Path, str]) -> None:
    folder, said = site
    assert "WARNING" not in said
    assert (folder / "index.html").is_file()
    assert "build_device_map" in (folder / "reference" / "mapping.html").read_text(encoding="utf-8")


class _Sources(HTMLParser):
    """What a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.found.append(given.get("href") or "")


def test_the_site_loads_nothing_from_elsewhere(site: tuple[Path, str]) -> None:
    pages = sorted(site[0].rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        sources = _Sources()
        sources.feed(page.read_text(encoding="utf-8"))
        assert not [source for source in sources.found if re.match(r"(https?:)?//", source)], page.name


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_links_of_pages_outside_of_the_site_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, anchor = urldefrag(unquote(link))
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: there is no {link}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_slug(head) for head in heads}, f"{page}: there is no {link}"


def _slug(heading: str) -> str:
    from markdown.extensions.toc import slugify

    return slugify(re.sub(r"[`*]", "", heading), "-")


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert set(verl_shard.__all__) - {"__version__"} <= listed


def test_every_command_is_in_the_reference() -> None:
    import typer

    from verl_shard import cli
    from verl_shard.cli.main import app

    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    made: Any = typer.main.get_command(app)
    verbs = {*made.commands} | {f"bench {name}" for name in made.commands["bench"].commands}
    listed = set(re.findall(r"^\| `verl-shard ([a-z -]+)` \|", text, re.MULTILINE))
    assert verbs - {"bench"} <= listed
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(cli.__file__).parent.glob("*.py"))
    written = set(re.findall(r'\.command\(\s*"([a-z-]+)"', sources))
    assert {name.removeprefix("bench ") for name in listed} <= written


# The tests above are worth what these find.


def _block(text: str, **marks: str) -> Block:
    return Block("page.md", 10, "python", text, marks)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("from verl_shard import build_map", "cannot import name"),
        ("from verl_shard import estimate_memory\nestimate_memory('m', sequence=3)", "there is no sequence"),
        ("from verl_shard import estimate_memory\ne = estimate_memory('m')\ne.peek", "MemoryEstimate has no peek"),
        ("from verl_shard import PPOTrainer\nt = PPOTrainer('m')\nt.trian()", "PPOTrainer has no trian"),
        ("from verl_shard import PPOTrainer\nPPOTrainer('m', lr=3)", "unexpected keyword argument 'lr'"),
        ("from verl_shard import Plan\nPlan.load('p').save(to='x')", "missing a required argument: 'path'"),
        ("print(model)", "the name model is not known"),
    ],
)
def test_a_block_that_could_not_run_is_found_without_running_it(text: str, says: str) -> None:
    (fault,) = faults_of(_block(text), {})
    assert says in fault
    assert fault.startswith(f"page.md:{9 + len(text.splitlines())}:")


def test_a_block_that_could_run_has_no_faults() -> None:
    text = (
        "import torch\nfrom verl_shard import estimate_memory, load_sharded\n"
        "made = load_sharded('m', config=config, dtype=torch.bfloat16)\n"
        "print(estimate_memory('m', batch_size=2).report(), [n for n in range(3)], made.anything)\n"
        "best = max([1], key=lambda size: -size)\n"
    )
    assert faults_of(_block(text, given="config"), {}) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("verl-shard map path/to/model --gpu 4", "No such option: --gpu"),
        ("verl-shard mapp path/to/model", "No such command 'mapp'"),
        ("verl-shard bench memory --rows few", "valid integer"),
        ("verl-shard map", "Missing parameter: model"),
        ("make quickest", "the Makefile has"),
        ("python examples/none.py", "there is no examples/none.py"),
        ("python -m verl.trainer.main_ppo trainer.n_gpus=1 ...", "n_gpus"),
        ("accelerate launch --config_file none.yaml examples/ppo_accelerate.py", "no command before it writes"),
        ("frobnicate now", "no test knows how to check frobnicate"),
        ('pip install "verl_shard[gpu]"', "there is no extra"),
    ],
)
def test_a_command_that_could_not_run_is_found_without_running_it(line: str, says: str) -> None:
    with pytest.raises(Exception, match=re.escape(says)):
        commands.check_block(Block("page.md", 1, "bash", line), set())


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "A=1 verl-shard map x \\\n  --gpus 4  # how many\nverl-shard check a=1 2>&1 | tee log > out; make test"
    read = list(commands.commands_of(text))
    assert [command.argv for command in read] == [
        ("verl-shard", "map", "x", "--gpus", "4"),
        ("verl-shard", "check", "a=1"),
        ("tee", "log"),
        ("make", "test"),
    ]
    assert [command.piped for command in read] == [False, False, True, False]
    assert read[2].out == "out"


def test_marks_are_read_and_other_comments_are_not() -> None:
    assert marks_of("<!-- not run: a GPU is needed; given: model, ids -->") == {
        "not run": "a GPU is needed",
        "given": "model, ids",
    }
    assert marks_of("<!-- exit 2: it does not fit -->") == {"exit": "2 it does not fit"}
    assert marks_of("<!-- keys: begin -->") == {}
