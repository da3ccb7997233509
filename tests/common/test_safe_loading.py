"""Nothing in the package loads what may run code, but where it was checked first or the user named the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import verl_shard

PACKAGE = Path(verl_shard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    (
        "training/handed_reward.py",
        "pickle.loads",
    ): "the user's own functions, written by the driver of this same launch",
    ("verl_plugin/check/by_verl.py", "pickle.loads"): "a copy of what is in memory",
    ("verl_plugin/check/keys.py", "pickle.loads"): "a copy of what is in memory",
    ("verl_plugin/check/tree.py", "pickle.loads"): "a copy of what is in memory",
    ("verl_plugin/fork_server.py", "runpy.run_path"): "the program that Ray starts",
    ("training/rewards.py", "importlib.import_module"): "a reward that the user names as pkg://module:function",
    (
        "training/rewards.py",
        "importlib.util.spec_from_file_location",
    ): "a reward that the user names as file.py:function",
    ("verl_plugin/fork_server.py", "importlib.import_module"): "verl's modules, a fixed list",
    ("verl_plugin/stock_engine.py", "importlib.import_module"): "verl's modules, a fixed list",
    ("verl_plugin/hooks.py", "importlib.import_module"): "verl's modules, a fixed list",
    ("__init__.py", "importlib.import_module"): "this package's own modules, a fixed list",
}
PICKLES = {
    f"{module}.{name}" for module in ("pickle", "cloudpickle", "dill", "joblib", "marshal") for name in ("load", "loads")
} | {"pickle.Unpickler", "shelve.open", "pandas.read_pickle", "pd.read_pickle"}  # fmt: skip
UNSAFE_YAML = {
    f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all")
}
IMPORTS = {"importlib.import_module", "importlib.util.spec_from_file_location", "runpy.run_path", "__import__"}


def unsafe(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each call that may run code from what it reads, or that asks for a model's own code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [*node.args.posonlyargs, *node.args.args]
            pairs = [
                *zip(reversed(named), reversed(node.args.defaults), strict=False),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            if any(argument.arg == "trust_remote_code" and _is(default, True) for argument, default in pairs):
                yield node.lineno, "trust_remote_code"
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and _is(value, True):
                    yield node.lineno, "trust_remote_code"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called == "torch.load" and not _is(given.get("weights_only"), True):
            yield node.lineno, called
        if called in ("np.load", "numpy.load") and not _is(given.get("allow_pickle", ast.Constant(False)), False):
            yield node.lineno, called
        if called in PICKLES | UNSAFE_YAML | {"eval", "exec"}:
            yield node.lineno, called
        if called == "yaml.compose" and ast.unparse(given.get("Loader", ast.Constant(None))) != "yaml.SafeLoader":
            yield node.lineno, called
        if called in IMPORTS and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield node.lineno, called
        if _is(given.get("trust_remote_code"), True):
            yield node.lineno, "trust_remote_code"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_loads_nothing_that_may_run_code(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    found = [(line, what) for line, what in unsafe(path.read_text(encoding="utf-8")) if (name, what) not in ALLOWED]
    assert found == []


def test_the_rule_finds_what_it_is_for() -> None:
    source = """\
torch.load(f)
torch.load(f, weights_only=False)
torch.load(f, weights_only=True)
np.load(f, allow_pickle=True)
np.load(f)
pickle.loads(b)
yaml.load(t, Loader=yaml.SafeLoader)
yaml.safe_load(t)
yaml.compose(t)
yaml.compose(t, Loader=yaml.SafeLoader)
importlib.import_module("torch")
importlib.import_module(config.name)
Auto.from_pretrained(m, trust_remote_code=True)
Auto.from_pretrained(m, trust_remote_code=asked)
def f(a, trust_remote_code=True): pass
def g(*, trust_remote_code=False, b=True): pass
k = {"trust_remote_code": True}
eval(t)
"""
    assert sorted(unsafe(source)) == [
        (1, "torch.load"), (2, "torch.load"), (4, "np.load"), (6, "pickle.loads"), (7, "yaml.load"), (9, "yaml.compose"),
        (12, "importlib.import_module"), (13, "trust_remote_code"), (15, "trust_remote_code"), (17, "trust_remote_code"),
        (18, "eval"),
    ]  # fmt: skip
