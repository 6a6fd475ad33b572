"""Running a model folder's chat template, which is data from elsewhere, with bounded work.

jinja2's immutable sandbox keeps a template from Python's internals and from changing what it is
given. It does not bound work, so here every loop, macro and operation that can make much out of
little reports to a `Budget` (budget.py):

- loops and macros count their rounds (also a loop's condition, and recursion), by a call that is
  planted into their bodies when the template is compiled;
- all text that is emitted, captured text included, is counted;
- operators and filters that multiply text or lists (`+ * ~`, replace, join, indent) are checked
  before they run, `**` and `text % values` are refused, filters and string methods come from short
  lists;
- containers are weighed where they are built and where they become text, so lists that hold one
  list many times over do not explode, nor does comparing them;
- methods of texts that take quadratic time are refused where that is long;
- each of these looks at the clock too.

Not bounded: a single comparison or `in`, which costs no more than the largest text or value allowed
here. Memory is bounded by the sum of all text and lists that are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer.budget import (
    MAX_BITS,
    MAX_SEARCH,
    MAX_WEIGHT,
    fits,
    sized,
    spend,
    text_of,
    weight_of,
)

TEXT_FILTERS = ("capitalize", "e", "escape", "float", "int", "lower", "safe", "string", "title")
LIST_FILTERS = (
    *("abs", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length"),
    *("list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("sort", "trim", "unique", "upper"),
)
TEXT_METHODS = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
    *("isdigit", "islower", "isspace", "isupper", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip", "swapcase", "title", "upper"),
)
# Filters that compare items before there is a result, and methods that take |text| x |argument|.
COMPARING = ("dictsort", "groupby", "max", "min", "sort", "unique")
QUADRATIC = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip")
JINJA_KEYWORDS = ("_loop_vars", "_block_vars")  # jinja2's own, for what takes a context
_TIME_FORMAT = re.compile(r"(?:%-?[a-zA-Z%]|[^%])*")


def emit(value: Any) -> Any:
    """Called for each value that the template prints."""
    text = text_of(value)
    spend(emitted=len(text))
    return text


def join_texts(*values: Any) -> str:
    """The operator ~."""
    texts = [text_of(value) for value in values]
    fits(sum(map(len, texts)))
    return "".join(texts)


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """The filter and the method `replace`."""
    source, before, after = text_of(text), text_of(old), text_of(new)
    found = source.count(before)
    fits(len(source) + found * max(0, len(after) - len(before)))
    return source.replace(before, after, -1 if count is None else count)


def join(values: Iterable[Any], separator: Any = "") -> str:
    """The filter `join`."""
    between = text_of(separator)
    texts: list[str] = []
    size = 0
    for value in values:
        texts.append(text_of(value))
        size += len(texts[-1]) + len(between)
        fits(size)
    return between.join(texts)


def indent(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    """The filter `indent`."""
    step = width if isinstance(width, str) else " " * min(max(int(width), 0), 1000)
    lines = text_of(text).split("\n")
    fits(sum(map(len, lines)) + len(lines) * (len(step) + 1))
    moved = [step + line if line or blank else line for line in lines]
    return "\n".join(moved if first else [lines[0], *moved[1:]])


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """The filter `tojson`, as transformers defines it: characters stay as they are."""
    if indent is not None and not 0 <= indent <= 16:
        raise TokenizerError("tojson: indent must be between 0 and 16")
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(sized(value), ensure_ascii=ensure_ascii, indent=indent, **known)


def raise_exception(message: Any) -> None:
    """How a template refuses a dialogue."""
    reason = " ".join(text_of(message).split())
    raise TokenizerError(f"the chat template refuses this dialogue: {reason:.500}")


def strftime_now(form: str) -> str:
    """The time now; some templates state the date."""
    if len(form) > 100 or not _TIME_FORMAT.fullmatch(form):
        raise TokenizerError(f"strftime_now: {form!r:.60} is not a plain format")
    return datetime.now().strftime(form)


def sliced(value: Any) -> Any:
    """What `[a:b]` gave."""
    if hasattr(value, "__len__"):
        fits(len(value))
    return value


def _dict(*args: Any, **kwargs: Any) -> Any:
    return sized(dict(*args, **kwargs))


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        spend()
        yield item


def _charged(name: str, function: Callable[..., Any], is_text: bool) -> Callable[..., Any]:
    """A filter that pays for the items it gets, and for those it hands on one by one."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*given: Any, **kwargs: Any) -> Any:
        args = list(given)
        value = args[place] if len(args) > place else None
        if name in COMPARING and isinstance(value, GeneratorType):
            value = args[place] = list(value)
        if not isinstance(value, str) and (is_text or name in COMPARING):
            sized(value)
        if name == "trim":
            _check_search(text_of(value), args[place + 1 :], kwargs)
        spend(1 + (len(value) if isinstance(value, list | tuple | range | Mapping) else 0))
        result = _bounded(function(*args, **kwargs))
        return _counted(result) if isinstance(result, GeneratorType) else result

    return charged


def _bounded(result: Any) -> Any:
    """The same result of a filter or a call, if it is not too large."""
    if isinstance(result, str):
        fits(len(result))
    elif isinstance(result, list | tuple | dict):
        sized(result)
    return result


def _check_search(text: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, str) and len(text) * len(argument) > MAX_SEARCH:
            raise TokenizerError("the chat template searches or strips texts too large")


def _numeric(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that computes `value % number`, which formats where the value is a text."""

    @wraps(test)
    def checked(value: Any, *args: Any) -> Any:
        if not isinstance(value, int | float):
            raise TokenizerError(f"the chat template tests a {type(value).__name__} as a number")
        return test(value, *args)

    return checked


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training targets: just its body."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Planter(NodeTransformer):
    """Plants the reports to the budget into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        if node.test is not None:
            node.test = nodes.And(_call("tick", []), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_texts", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("sized", [node]) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("sliced", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        raise TokenizerError(f"the chat template loads another (line {node.lineno}): not supported")

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    # An attribute of the environment, so that no variable of the template can stand in for it.
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _tick_statement(node: nodes.Node) -> nodes.ExprStmt:
    literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return nodes.ExprStmt(_call("tick", [nodes.Const(literal)]))


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in and run by."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])
    join_texts = staticmethod(join_texts)
    sized = staticmethod(sized)
    sliced = staticmethod(sliced)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing runs before a budget is there
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=emit,
            cache_size=0,
        )
        own = {"replace": replace, "join": join, "indent": indent, "tojson": tojson}
        self.filters = {
            **{name: _charged(name, self.filters[name], True) for name in TEXT_FILTERS},
            **{
                name: _charged(name, self.filters[name], name in ("trim", "upper"))
                for name in LIST_FILTERS
            },
            **own,
        }
        tests: dict[str, Any] = dict(self.tests)
        numeric = {name: _numeric(tests[name]) for name in ("divisibleby", "even", "odd")}
        self.tests = {**tests, **numeric}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100,000 numbers
            "namespace": Namespace,
            "dict": _dict,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    @staticmethod
    def tick(literal: int = 0) -> bool:
        """One more round, which `call` has charged; `literal`: what it may write unasked."""
        spend(rounds=0, emitted=literal)
        return True

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make much out of little."""
        if operator == "**" or (operator == "%" and isinstance(left, str | bytes)):
            raise TokenizerError(f"the chat template uses {operator!r}, which is not supported")
        for one in (left, right):
            if isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise TokenizerError("the chat template computes with numbers too large")
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            fits(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        return result if isinstance(result, str) else _bounded(result)

    def wrap_str_format(self, value: Any) -> None:
        """`text.format`, whose widths make much out of little, is refused."""
        name = getattr(value, "__name__", None)
        if name in ("format", "format_map") and isinstance(getattr(value, "__self__", None), str):
            raise TokenizerError(f"the chat template uses {name!r} of a text: not supported")

    # The names are mangled in the base class too, so that keywords cannot collide with them.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls: of the methods of texts only those whose result is no larger than the text."""
        spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            kwargs = {key: kwargs[key] for key in kwargs if key not in JINJA_KEYWORDS}
            if name == "replace":
                return replace(owner, *args, **kwargs)
            if name == "join":
                return join(args[0] if args else (), owner)
            if name not in TEXT_METHODS:
                raise TokenizerError(f"the chat template calls {name!r} of a text: not supported")
            if name in QUADRATIC:
                _check_search(owner, args, kwargs)
            return _bounded(__obj(*args, **kwargs))
        return _bounded(super().call(__context, __obj, *args, **kwargs))


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and hasattr(other, "__len__"):
            fits(max(one, 0) * len(other))
            if not isinstance(other, str) and max(one, 0) * weight_of(other) > MAX_WEIGHT:
                raise TokenizerError("the chat template builds values too large")
