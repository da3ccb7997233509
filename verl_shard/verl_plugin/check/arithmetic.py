"""Whole-number arithmetic of launch scripts, worked out and not run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}  # fmt: skip


def evaluate(text: str) -> int | None:
    """Whole-number arithmetic as of $(( )); None for anything else."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            right = of(node.right)
            if isinstance(node.op, ast.Pow) and right > 64:
                raise ValueError(text)
            return _OPERATORS[type(node.op)](of(node.left), right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        raise ValueError(text)

    try:
        return of(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
