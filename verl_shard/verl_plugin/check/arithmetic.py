"""Whole-number arithmetic of launch scripts, worked out and not run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable


def _quotient(left: int, right: int) -> int:
    """Rounded towards zero, as bash does it."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole


def _remainder(left: int, right: int) -> int:
    """With the sign of the left one."""
    return left - right * _quotient(left, right)


_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _quotient, ast.Mod: _remainder,
    ast.Pow: operator.pow,
}  # fmt: skip


def evaluate(text: str) -> int | None:
    """Whole-number arithmetic as of $(( )); None for anything else, and for what bash refuses."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return of(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            right = of(node.right)
            if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
                raise ValueError(text)
            return _OPERATORS[type(node.op)](of(node.left), right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.BinOp) and isinstance(node.operand.op, ast.Pow):
                raise ValueError(text)  # -2 ** 2 is 4 in bash, -(2 ** 2) is -4, and both look the same here
            return -of(node.operand)
        raise ValueError(text)

    try:
        return of(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
