"""The house: each room imports only from rooms before it, verl is met in one room only, and the public names are pinned."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verl_shard

PACKAGE = Path(verl_shard.__file__).parent
ROOMS = (
    "common", "models", "config", "resources", "memory", "mapping", "planning", "runtime", "verl_plugin", "training",
    "diagnosis", "quickstart", "bench", "cli",
)  # fmt: skip
VERLS = {"verl", "ray", "transfer_queue", "hydra", "omegaconf", "tensordict"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions too; a name taken from a module counts as a part of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def strangers(room: str, source: str) -> list[str]:
    """What a file of `room` imports and should not."""
    before = {*ROOMS[: ROOMS.index(room) + 1], "_version"}
    found = []
    for line, module in imports(source):
        top, *rest = module.split(".")
        if (top == "verl_shard" and rest and rest[0] not in before) or (top in VERLS and room != "verl_plugin"):
            found.append(f"line {line}: {module}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_before_it(path: Path) -> None:
    room, *rest = path.relative_to(PACKAGE).parts
    if rest:
        assert strangers(room, path.read_text(encoding="utf-8")) == []


def test_the_rule_finds_what_it_is_for() -> None:
    source = "import json\nfrom verl_shard.cli import main\nfrom verl_shard.common import errors\n\ndef f(): import verl.utils"
    assert strangers("runtime", source) == ["line 2: verl_shard.cli.main", "line 5: verl.utils"]
    assert strangers("verl_plugin", source) == ["line 2: verl_shard.cli.main"]
    assert strangers("config", "from verl_shard import models, mapping") == ["line 1: verl_shard.mapping"]


def test_every_room_is_known() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS)
    assert all((PACKAGE / room / "__init__.py").is_file() for room in rooms)


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*(name for name in sys.modules if '.' not in name))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "accelerate", "numpy", "rich", "typer"} | VERLS
    assert not _modules_after("import verl_shard") & heavy


def test_the_command_line_starts_without_torch_and_verl() -> None:
    assert not _modules_after("import verl_shard.cli.main") & ({"torch", "transformers"} | VERLS)


def test_the_public_names_are_these() -> None:
    assert verl_shard.__all__ == [
        "__version__", "build_device_map", "check_device_map", "DeviceMap", "estimate_memory", "MemoryEstimate",
        "build_plan", "Plan", "to_verl_overrides", "load_resource_config", "get_gpu_usage", "pin_to_device", "load_sharded",
        "offload_model", "dispatch_model", "run_micro_batches", "ResourceAllocator", "PPOTrainer", "HybridTrainer",
        "Finding", "ShardError", "ConfigError", "DoesNotFitError", "MissingExtraError", "RunError",
    ]  # fmt: skip
    assert dir(verl_shard) == sorted(verl_shard.__all__)


@pytest.mark.parametrize("name", verl_shard.__all__)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(verl_shard, name)
    assert name == "__version__" or (found.__doc__ and found.__name__ == name)


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'build_map'; it has .*build_device_map"):
        verl_shard.build_map  # noqa: B018
    with pytest.raises(ImportError):
        exec("from verl_shard import build_map")
