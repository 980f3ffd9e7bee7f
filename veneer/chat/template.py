"""A chat template as transformers renders it, with a trace of which characters came from the conversation.

This module runs in a process of its own (`veneer.chat.child`), which holds the limits of time, memory and files; the sandbox of
jinja2 keeps the template from Python's internals. Language, filters and names are those of transformers: jinja2's immutable
sandbox with all of its filters, `trim_blocks`, `lstrip_blocks`, `break` and `continue`, `{% generation %}` blocks, `tojson` that
escapes nothing for HTML, `raise_exception` and `strftime_now`.

Source: `_compile_jinja_template` of transformers 5.24.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import textwrap  # noqa: F401
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.constants  # this, `debug` and `textwrap` jinja2 imports where it uses them, when no file may be opened any more
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from veneer.chat.traced import Traced, holds_trace, join, retrace, text_of, twin_of, twins_in

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
"""Roles that count as the template's own words; any other is a content."""


class RefusedConversationError(Exception):
    """The template called `raise_exception`."""


class TooLongError(Exception):
    """The prompt is longer than it may be."""


class UntraceableError(Exception):
    """The template moves contents so that they cannot be told from its own text."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt.

    Attributes:
        text: The prompt.
        controls: (start, end) of each control token that the template wrote, in order; None: every control token in the text is
            one of these.
    """

    text: str
    controls: tuple[tuple[int, int], ...] | None


class Template:
    """A compiled chat template. Stateless between renderings.

    Args:
        source: Template in jinja2's language.
        variables: What it may read beside the messages, e.g. `bos_token`.
        controls: Tokens that contents must not write; empty: contents are not traced.
        max_characters: Longest prompt.
        always_places: The places of the control tokens are told also where contents have none.

    Raises:
        jinja2.TemplateError: It is no template, or uses what is not there.
        RecursionError: It is nested too deeply.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        controls: Sequence[str],
        *,
        max_characters: int,
        always_places: bool = False,
    ) -> None:
        self._always_places = always_places
        self._variables = dict(variables)
        self._max_characters = max_characters
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._template = _Environment().from_string(source)

    def render(self, messages: Sequence[Mapping[str, str]]) -> Rendered:
        """Returns the prompt, ending where the assistant speaks.

        Raises:
            RefusedConversationError: The template refuses the conversation.
            TooLongError: The prompt is too long.
            UntraceableError: Contents cannot be told from the template's text.
            Exception: Whatever else the template does wrong.
        """
        parts: list[str] = []
        length = 0
        given = [self._trace(message) for message in messages]
        for part in self._template.generate(
            **self._variables, messages=given, tools=None, documents=None, add_generation_prompt=True
        ):
            length += len(part)
            if length > self._max_characters:
                raise TooLongError
            parts.append(part)
        text = join(parts)
        return Rendered(str.__str__(text), None) if self._controls is None else self._judge(text)

    def _trace(self, message: Mapping[str, str]) -> dict[str, str]:
        if self._controls is None:
            return dict(message)
        return {name: value if name == "role" and value in ROLES else Traced(value) for name, value in message.items()}

    def _judge(self, text: str) -> Rendered:
        """Finds the control tokens that the template wrote: the twin has no others."""
        assert self._controls is not None, "it is called where there are control tokens"
        plain, twin = str.__str__(text), twin_of(text)
        own = tuple(match.span() for match in self._controls.finditer(twin))
        if any(plain[start:end] != twin[start:end] for start, end in own):
            raise UntraceableError
        found = tuple(match.span() for match in self._controls.finditer(plain))
        return Rendered(plain, own if self._always_places or found != own else None)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks what trainers learn from; the body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  jinja2's protocol

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Reads a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes values and joins the operands of `~` so that their traces are kept."""

    def _output_child_pre(self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, finalize: Any) -> None:  # noqa: ARG002
        self.write("environment.text_of(")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802  jinja2's name
        """Writes the code of a `~`."""
        self.write("environment.glue((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """The global `dict`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat = staticmethod(join)
    text_of = staticmethod(text_of)
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _traced_filter(function) for name, function in self.filters.items()}
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    @staticmethod
    def glue(operands: tuple[Any, ...]) -> str:
        """Returns the value of `a ~ b`."""
        return join(map(text_of, operands))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all(jinja2.nodes.EvalContextModifier):
            raise jinja2.TemplateSyntaxError("`autoescape` is not supported", node.lineno)
        return template

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Formats with `%`, and traces what a literal of the template is filled with."""
        result = super().call_binop(context, operator, left, right)
        if type(result) is str and holds_trace(right):
            return retrace(result, lambda: left % twins_in(right))
        return result

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls; a text that an interpreter's function makes gets the trace of what it was made of."""
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(function, _OWN_CALLS) or isinstance(owner, _OWN_OWNERS):
            return super().call(context, function, *args, **kwargs)
        args = _lists(args)
        result = super().call(context, function, *args, **kwargs)
        if not isinstance(result, str | list | tuple) or not (holds_trace(args) or holds_trace(kwargs) or holds_trace(owner)):
            return result
        return retrace(result, lambda: function(*twins_in((*args, owner))[:-1], **twins_in(kwargs)))


_OWN_CALLS = (jinja2.runtime.Macro, jinja2.runtime.BlockReference, jinja2.utils.Joiner)
_OWN_OWNERS = (Traced, dict, list, tuple, jinja2.utils.Cycler, jinja2.runtime.LoopContext)
"""What gives its arguments or parts back as they are, or keeps their traces itself."""


def _traced_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter: where its result has lost the trace of the arguments, the filter is run on their twins too."""

    @functools.wraps(function)  # keeps jinja2's note of what is passed first
    def traced(*args: Any, **kwargs: Any) -> Any:
        passed, args = args[:num_passed], _lists(args[num_passed:])
        result = function(*passed, *args, **kwargs)
        is_text = isinstance(result, str) and not isinstance(result, Traced)
        is_cut = isinstance(result, list | tuple) and any(isinstance(one, Traced) for one in args)
        if (is_text or is_cut) and (holds_trace(args) or holds_trace(kwargs)):
            return retrace(result, lambda: function(*passed, *twins_in(args), **twins_in(kwargs)))
        return result

    num_passed = int(hasattr(function, "jinja_pass_arg"))  # the context or the environment, before all others
    return traced


def _lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turns generators into lists, so that they can be read twice."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in args)


def _refuse(message: Any) -> NoReturn:
    raise RefusedConversationError(str(message)[:200])


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore, such as {name[:40]!r}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # noqa: DTZ005  local time, as in transformers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates give it by place or by name
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
