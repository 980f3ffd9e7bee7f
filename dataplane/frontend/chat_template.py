"""The base model's chat template, rendered in a sandbox with limits.

A template is data that came with a model: it may neither reach Python's internals nor run or grow without bound. jinja2's
sandbox does the first. For the second every loop step is counted, every operation that can make a long string is checked before
it is done, and only the filters and string methods that templates of chat models use are there.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Never

import jinja2
import jinja2.nodes
import jinja2.sandbox

from veneer.errors import FailedPreconditionError, InvalidArgumentError, Violation

_FILTERS = frozenset(
    "abs capitalize count d default dictsort e escape first float int items join last length list lower map min max reject "
    "rejectattr replace reverse round safe select selectattr sort string sum title tojson trim unique upper".split()
)
_METHODS = frozenset(
    "strip lstrip rstrip split rsplit startswith endswith upper lower title capitalize find isdigit isalpha isspace items keys "
    "values get index count".split()
)
_MAX_STEPS = 200_000


class TemplateError(FailedPreconditionError):
    """The base model's chat template cannot be used."""


class TemplateLimitError(FailedPreconditionError):
    """The chat template ran or grew beyond its limits."""


class _Budget:
    """Loop steps and characters that one rendering may still use. Owned by that rendering."""

    def __init__(self, steps: int, characters: int) -> None:
        self.steps = steps
        self.characters = characters

    def step(self, subject: object = None) -> None:
        """Charges one step, and more for a large subject: one for each item, one for each KiB of text."""
        self.steps -= 1
        if isinstance(subject, str):
            self.steps -= len(subject) >> 10
        elif isinstance(subject, list | tuple | dict):
            self.steps -= len(subject)
        if self.steps < 0:
            raise TemplateLimitError(f"the chat template took more than {_MAX_STEPS} steps")

    def grow(self, length: int) -> None:
        """Refuses a text or list of this length if it is too long."""
        if length > self.characters:
            raise TemplateLimitError(f"the chat template made a text longer than {self.characters} characters")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox for one rendering: its budget bounds loops and strings."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: _Budget) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._budget = budget
        self.filters = {name: function for name, function in self.filters.items() if name in _FILTERS}
        self.filters |= {"tojson": _to_json, "counted": self._counted, "replace": self._replace, "join": self._join}
        self.globals = {name: self.globals[name] for name in ("namespace", "dict")} | {"range": self._range}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(jinja2.nodes.For)):
            if loop.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not supported", loop.lineno)
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno, environment=self)
        for glue in list(template.find_all(jinja2.nodes.Concat)):
            parts = jinja2.nodes.List(glue.nodes, lineno=glue.lineno, environment=self)
            empty = jinja2.nodes.Const("", lineno=glue.lineno, environment=self)
            glue.nodes = [
                jinja2.nodes.Filter(parts, "join", [], [], None, None, lineno=glue.lineno, environment=self),
                empty,
            ]
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows data attributes, and of built-in types only the listed methods."""
        if isinstance(obj, str | list | dict | tuple | int | float) and callable(value) and attr not in _METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls; each call is a step, and a method of a long text several."""
        self._budget.step(getattr(function, "__self__", None))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Does an operation after a look at how long its result can get."""
        self._budget.step(left)
        self._budget.step(right)
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateLimitError("the chat template uses powers or string formatting, which are not supported")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple):
                    self._budget.grow(len(one) * int(other))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 64:
                raise TemplateLimitError("the chat template makes numbers beyond 64 bits")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._budget.grow(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _range(self, *bounds: int) -> range:
        items = range(*bounds)
        self._budget.steps -= len(items)
        self._budget.step()
        return items

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._budget.step()
            yield item

    def _join(self, items: Iterable[Any], separator: Any = "", attribute: str | None = None) -> str:
        total = 0
        parts: list[str] = []
        for item in items:
            self._budget.step()
            parts.append(str(item[attribute] if attribute else item))
            total += len(parts[-1]) + len(str(separator))
            self._budget.grow(total)
        return str(separator).join(parts)

    def _replace(self, value: Any, old: str, new: str) -> str:
        text = str(value)
        self._budget.grow(len(text) + text.count(old) * max(len(new) - len(old), 0))
        return text.replace(old, new)


class ChatTemplate:
    """Renders conversations. Immutable; any thread may call it, and it belongs off the event loop.

    Args:
        source: Template in jinja2's language.
        variables: What the template may read beside the messages, e.g. `bos_token`.
        max_characters: Longest prompt and longest text in between.

    Raises:
        TemplateError: The source is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], *, max_characters: int = 8 << 20) -> None:
        self._variables = dict(variables)
        self._max_characters = max_characters
        try:
            self._code = _Environment(_Budget(_MAX_STEPS, max_characters)).compile(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt, ending where the assistant speaks.

        Raises:
            InvalidArgumentError: The template refuses the conversation, e.g. for its order of roles.
            TemplateLimitError: It ran or grew beyond its limits.
            TemplateError: It does something that is not allowed or not there.
        """
        budget = _Budget(_MAX_STEPS, self._max_characters)
        parts: list[str] = []
        length = 0
        try:
            environment = _Environment(budget)
            template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
            rendering = template.generate(
                **self._variables,
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                raise_exception=_refuse,
                strftime_now=_strftime_now,
            )
            for part in rendering:
                length += len(part)
                budget.grow(length)
                parts.append(part)
        except (jinja2.TemplateError, RecursionError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}") from error
        return "".join(parts)


def _refuse(message: str) -> Never:
    raise InvalidArgumentError.of(
        [Violation("chat.messages", f"the base model's chat template refuses them: {str(message)[:200]}")]
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(str(form)[:64])


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(int(indent), 8))
