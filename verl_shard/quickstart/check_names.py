"""Names that a quick start is given and that must stand for something: tasks, and the reward function."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.training.data_tasks import TASKS


def check_tasks(names: Sequence[str]) -> None:
    """Raises ConfigError for a task that is not one of ours."""
    known = [task.name for task in TASKS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            Finding("error", "unknown-task", "--task", name, "no such task", f"Use one of {', '.join(known)}")
            for name in unknown
        )


def check_reward(reward: str) -> None:
    """Raises ConfigError unless `reward` is FILE.py:FUNCTION and that function is defined there. Nothing is run."""
    path, _, name = reward.rpartition(":")

    def fault(why: str, fix: str) -> ConfigError:
        return ConfigError(Finding("error", "no-reward", "--reward", reward, why, fix))

    if not path or not name.isidentifier():
        raise fault("not of the form FILE.py:FUNCTION", "Write for example rewards.py:compute_score")
    file = Path(path)
    if not file.is_file():
        raise fault(f"there is no file {path}", "Name the file that defines the function")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise fault(f"{path} is not Python ({error})", "Mend it") from error
    # A name may also be imported or assigned; only one that does not occur at the top level is surely not there.
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    if name not in names and "*" not in names:
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        raise fault(f"{path} defines no {name}", f"It has {', '.join(functions) or 'no function'}")
