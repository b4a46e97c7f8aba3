"""A calculator, and a clock. The calculator walks the syntax tree of an expression: nothing of it is run as Python."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from tokamac.engine.options import ToolSpec

from .tool import ToolError

LONGEST_EXPRESSION = 1_000
MOST_NODES = 200
MOST_BITS = 4_096
"""Of a whole number: some 1,200 digits."""
MOST_FACTORIAL = 400

Number = int | float

_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_ONE: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in (
        "sqrt", "exp", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "floor", "ceil", "gcd", "hypot",
        "degrees", "radians", "isqrt",
    )},
    "log": math.log, "abs": abs, "round": round, "min": min, "max": max, "sum": lambda *values: sum(values),
}  # fmt: skip


class Calculate:
    """Computes an arithmetic expression."""

    spec = ToolSpec(
        "calculate",
        "Compute an arithmetic expression exactly, such as (3 + 4) * sqrt(2) or 2 ** 100 % 97.",
        {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": f"Numbers, + - * / // % **, brackets, and {', '.join(_FUNCTIONS)}, factorial, pi, e, tau.",
                }
            },
            "required": ["expression"],
        },
    )

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Return the value as text."""
        return shown(evaluate(arguments["expression"]))


def evaluate(expression: str) -> Number:
    """Return the value of an expression. Raises ToolError for what is none, or too large."""
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression has at most {LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(text, mode="eval")
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
            raise ToolError("the expression is too long")
        return _value(tree.body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("that divides by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r:.80} is no arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"that has no value: {error}") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _bounded(_TWO[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _ONE:
            return _bounded(_ONE[type(op)](_value(operand)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id="factorial"), args=[only], keywords=[]):
            return _factorial(_value(only))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
    raise ToolError(f"{ast.unparse(node):.80} is not part of arithmetic here")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent >= 0 and base.bit_length() * exponent > MOST_BITS:
            raise ToolError("that number is too large")
        return _bounded(base**exponent)
    found = base**exponent
    if isinstance(found, complex):
        raise ToolError("that is no real number")
    return _bounded(found)


def _factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= MOST_FACTORIAL:
        raise ToolError(f"factorials are computed of whole numbers up to {MOST_FACTORIAL}")
    return math.factorial(value)


def _bounded(value: Any) -> Number:
    if not isinstance(value, int | float):
        raise ToolError("that is no real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ToolError("that number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("that number is too large")
    return value


def shown(value: Number) -> str:
    """Return a number as text: a float of whole value without its point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else repr(value)


class Clock:
    """Tells the time."""

    spec = ToolSpec("clock", "Tell the date, the weekday and the time where the user is.")

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now().astimezone()) -> None:
        self._now = now

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Return them, with the time zone."""
        del arguments  # there are none
        return self._now().strftime("%A, %Y-%m-%d %H:%M:%S %z (%Z)")
