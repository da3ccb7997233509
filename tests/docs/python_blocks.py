"""Blocks of Python: run, or held against the real signatures where they cannot run here."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import inspect
import io
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

from docs.blocks import Block
from verl_shard.common.notices import ShardNotice
from verl_shard.memory.passes import PassSpec

UNKNOWN = object()
"""A value that nobody knows without running the block."""


def run_block(block: Block, names: dict[str, Any]) -> str:
    """Runs a block among the names of its page; returns what it printed."""
    tree = ast.parse(block.text, block.page)
    ast.increment_lineno(tree, block.line - 1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardNotice)  # a fallback to the CPU is what is meant here
        exec(compile(tree, block.page, "exec"), names)
    return printed.getvalue()


def faults_of(block: Block, names: dict[str, Any]) -> list[str]:
    """What is wrong with a block that is not run: imports, names, attributes and keywords that do not exist.

    names: those of the page so far; what the block defines is added, as far as it is known.
    """
    tree = ast.parse(block.text, block.page)
    known = _Known(block, {**dict.fromkeys(block.given, UNKNOWN), **names})
    for statement in tree.body:
        known.read(statement)
    names.update(known.names)
    return known.faults


class _Known:
    """What is known of the names of a block: objects that are imported, and instances of classes of which only the class is."""

    def __init__(self, block: Block, names: dict[str, Any]) -> None:
        self.block, self.names, self.faults = block, names, list[str]()

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            try:
                exec(compile(ast.Module([statement], []), self.block.page, "exec"), self.names)
            except ImportError as error:
                self._fault(statement, str(error))
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self.names[statement.name] = UNKNOWN
        else:
            inner = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and not _loads(node)]
            value = self.value_of(statement.value) if isinstance(statement, ast.Assign) else None
            self.names.update(dict.fromkeys((node.id for node in inner), UNKNOWN))
            if value is not None and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.names[statement.targets[0].id] = value
            lambdas = [node for node in ast.walk(statement) if isinstance(node, ast.arg)]
            mine = self.names | dict.fromkeys((node.arg for node in lambdas), UNKNOWN)
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Name)
                    and _loads(node)
                    and not hasattr(builtins, node.id)
                    and node.id not in mine
                ):
                    self._fault(node, f"the name {node.id} is not known")
                if isinstance(node, ast.Call):
                    self._check_call(node)
                if isinstance(node, ast.Attribute):
                    self.value_of(node, say=True)

    def value_of(self, node: ast.expr, *, say: bool = False) -> Any:
        """An object, an _Instance, or UNKNOWN."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, getattr(builtins, node.id, UNKNOWN))
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if owner is UNKNOWN:
                return UNKNOWN
            if isinstance(owner, _Instance):
                return owner.attribute(
                    node.attr, lambda: self._fault(node, f"{owner} has no {node.attr}") if say else None
                )
            if not hasattr(owner, node.attr):
                if say:
                    self._fault(node, f"{owner!r} has no {node.attr}")
                return UNKNOWN
            return getattr(owner, node.attr)
        if isinstance(node, ast.Call):
            return _result_of(self.value_of(node.func))
        return UNKNOWN

    def _check_call(self, node: ast.Call) -> None:
        called = self.value_of(node.func)
        if called is UNKNOWN or isinstance(called, _Instance) or not callable(called):
            return
        try:
            signature = inspect.signature(called)
        except ValueError:
            return  # of a builtin
        keywords = {word.arg: None for word in node.keywords if word.arg}
        starred = any(word.arg is None for word in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
        bind = signature.bind_partial if starred else signature.bind
        try:
            bind(*(None for a in node.args if not isinstance(a, ast.Starred)), **keywords)
        except TypeError as error:
            self._fault(node, f"{getattr(called, '__name__', called)}: {error}")
        if "pass_fields" in signature.parameters:
            fields = {field.name for field in dataclasses.fields(PassSpec)} | set(signature.parameters)
            for word in keywords.keys() - fields:
                self._fault(node, f"{called.__name__}: there is no {word}")

    def _fault(self, node: ast.AST, says: str) -> None:
        line = self.block.line + getattr(node, "lineno", 1) - 1
        self.faults.append(f"{self.block.page}:{line}: {says}")


@dataclasses.dataclass(frozen=True)
class _Instance:
    """An object of a class, which is all that is known of it."""

    of: type

    def __str__(self) -> str:
        return self.of.__name__

    def attribute(self, name: str, missing: Any) -> Any:
        found = inspect.getattr_static(self.of, name, None)
        if found is not None:
            return _Method(found, self.of) if inspect.isfunction(found) else UNKNOWN
        fields = {field.name for field in dataclasses.fields(self.of)} if dataclasses.is_dataclass(self.of) else set()
        if name not in fields | set(_annotations(self.of)) | set(_set_in_init(self.of)):
            missing()
        return UNKNOWN


class _Method:
    """A method as it is called: without self."""

    def __init__(self, function: Any, owner: type) -> None:
        self.function, self.__name__ = function, f"{owner.__name__}.{function.__name__}"
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self) -> None:
        raise AssertionError("it is looked at and not called")


def _result_of(called: Any) -> Any:
    """What a call gives, as far as its annotation says."""
    if inspect.isclass(called):
        return _Instance(called) if called.__module__.startswith("verl_shard") else UNKNOWN
    function = called.function if isinstance(called, _Method) else getattr(called, "__func__", called)
    if not inspect.isfunction(function):
        return UNKNOWN
    result = function.__annotations__.get("return")
    result = function.__globals__.get(result) if isinstance(result, str) else result
    return _Instance(result) if inspect.isclass(result) and result.__module__.startswith("verl_shard") else UNKNOWN


def _annotations(owner: type) -> Iterator[str]:
    for base in owner.__mro__:
        yield from getattr(base, "__annotations__", {})


def _set_in_init(owner: type) -> Iterator[str]:
    """Attributes that __init__ sets on self."""
    for base in owner.__mro__:
        if inspect.isfunction(base.__dict__.get("__init__")):
            try:
                source = textwrap.dedent(inspect.getsource(base.__init__))
            except OSError:
                continue
            yield from (
                node.attr
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            )


def _loads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)
