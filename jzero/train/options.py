"""Typed options: dataclass fields that carry their meaning and their limits.

A schema is a frozen dataclass whose fields are made by `option`, or are nested schemas (sections). From that one record
come the default, the type check, the limits, the error text and the reference page. jzero's own keys are in
`jzero.train.config_keys`; files are read in `jzero.train.options_file`.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jzero.errors import JzeroError


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field means and which values it takes; null is outside every limit and allowed where the type says so."""

    meaning: str
    choices: tuple[Any, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    check: Callable[[Any], str | None] | None = None  # returns what it expected, or None when content

    def limits(self) -> list[str]:
        """The limits in words, as the reference page and the errors print them."""
        bounds = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return [f"{word} {bound}" for word, bound in bounds if bound is not None]

    def admits(self, value: Any) -> bool:
        """Whether a number, or every number of a tuple, is within the limits."""
        if isinstance(value, tuple):
            return all(self.admits(v) for v in value)
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """A field of a schema.

    Args:
        default: The value when nobody sets one.
        meaning: One sentence for the reference page, with the unit.
        **limits: Fields of `Option`: `choices`, `at_least`, `above`, `at_most`, `below`, `check`.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Optim:
        ...     lr: float = option(2e-4, "Peak learning rate.", at_least=0)
        >>> Optim().lr
        0.0002
    """
    return dataclasses.field(default=default, metadata={"option": Option(meaning, **limits)})


def keys(schema: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Every dotted key of a schema with its field, sections left out."""
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield from keys(typing.cast(type, field.type), key + ".")
        else:
            yield key, field


@dataclasses.dataclass(frozen=True)
class Source:
    """Where values come from, and what their errors open with.

    Args:
        name: A path ("configs/gpt.yaml") or an override ("override model.seed=x").
        schema: The schema of the whole file; its keys are offered for a mistyped one.
        hints: Why a key ("model.fp8") or a value ("trainer.precision=16") that users know from elsewhere is refused.
        pending: Values may hold unresolved interpolations ("${model.seed}"); those are left at their default.
    """

    name: str
    schema: type
    hints: Mapping[str, str]
    pending: bool = False

    def error(self, text: str) -> JzeroError:
        """A `JzeroError` that opens with this source."""
        return JzeroError(f"{self.name}: {text}")

    def build(self, values: Any) -> Any:
        """The schema's instance from nested mappings: every key, type and limit checked, defaults for what is missing.

        Raises:
            JzeroError: An unknown key, a value of the wrong type, or one outside its limits.
        """
        return self._section(self.schema, values, "")

    def _section(self, schema: type, values: Any, prefix: str) -> Any:
        if not isinstance(values, Mapping):
            raise self.error(f"{prefix.rstrip('.') or 'the file'}: expected a mapping of keys, {_found(values)}")
        fields = {field.name: field for field in dataclasses.fields(schema)}
        chosen = {}
        for name, value in values.items():
            key, field = f"{prefix}{name}", fields.get(name)
            if field is None:
                raise self.error(self._unknown(key, str(name), value))
            if self.pending and _has_interpolation(value):
                continue
            if dataclasses.is_dataclass(field.type):
                chosen[name] = self._section(typing.cast(type, field.type), value, key + ".")
            else:
                chosen[name] = self._value(key, field, value)
        return schema(**chosen)

    def _value(self, key: str, field: dataclasses.Field, value: Any) -> Any:
        """The value as its field's type, or an error that says what was expected and what was found."""
        rule: Option = field.metadata["option"]
        if value == "???":
            raise self.error(f"{key}: expected {expected(field)}, found ??? (a value that you must set)")
        try:
            typed = _typed(field.type, value)
        except TypeError:
            takes_integer = int in (field.type, *typing.get_args(field.type))
            advice = f"; write {value:.0f}" if takes_integer and isinstance(value, float) and value.is_integer() else ""
            raise self.error(f"{key}: expected {expected(field)}, {_found(value)}{advice}") from None
        if typed is None:
            return None
        if rule.choices is not None and typed not in rule.choices:
            kind = _found(value) if str(value) in map(str, rule.choices) else f"found {show(value)}"
            hint = self.hints.get(f"{key}={value}")
            raise self.error(f"{key}: expected {expected(field)}, {kind}{f' ({hint})' if hint else ''}")
        complaint = None if rule.admits(typed) else expected(field)
        complaint = complaint or (rule.check(typed) if rule.check is not None else None)
        if complaint:
            raise self.error(f"{key}: expected {complaint}, found {show(value)}")
        return typed

    def _unknown(self, key: str, name: str, value: Any) -> str:
        """What to say of a key that does not exist: why it is refused, or the nearest one that exists."""
        while isinstance(value, Mapping) and len(value) == 1:
            [(inner, value)] = value.items()
            key = f"{key}.{inner}"
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            if (hint := self.hints.get(".".join(parts[:end]))) is not None:
                return f"{key}: {hint}"
        if "." in name:
            return f"unknown key {key}: nest the sections in a file; dotted keys are for the command line"
        return f"unknown key {key}; {nearest_key(self.schema, key)}"


def nearest_key(schema: type, key: str) -> str:
    """Advice for a mistyped dotted key: the known one it most likely means, else the keys of its section.

    A right name in the wrong section is close: "model.lr" means "model.optim.lr".

    Example:
        >>> from jzero.train.config import Config
        >>> nearest_key(Config, "model.num_layer")
        'did you mean model.num_layers?'
    """
    known = [k for k, _ in keys(schema)]
    name, prefix = key.rsplit(".", 1)[-1], key[: key.rfind(".") + 1]
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == name]
    siblings = [k for k in known if k.startswith(prefix)]
    for candidates, cutoff in ((same_name, 0.0), (siblings, 0.75), (known, 0.75)):
        if near := difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff):
            return f"did you mean {near[0]}?"
    here = dict.fromkeys(k[len(prefix) :].split(".")[0] for k in siblings)
    return f"{prefix.rstrip('.') or 'the top level'} has {', '.join(here)}" if here else f"there is no section {prefix}"


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_interpolation(v) for v in value)
    return isinstance(value, str) and "${" in value


def _typed(declared: Any, value: Any) -> Any:
    """`value` as `declared` (int, float, bool, str, None, a tuple of these or a union), strictly: "3" is not 3.

    Infinities and NaN are not numbers here: no option means anything with them.

    Raises:
        TypeError: It is of another type; nothing is converted but an integer to a float and a list to a tuple.
    """
    if isinstance(declared, types.UnionType):
        for member in typing.get_args(declared):
            try:
                return _typed(member, value)
            except TypeError:
                continue
        raise TypeError
    if typing.get_origin(declared) is tuple:
        members = typing.get_args(declared)
        if not isinstance(value, list | tuple):
            raise TypeError
        if members[-1] is Ellipsis:
            members = (members[0],) * len(value)
        if len(members) != len(value):
            raise TypeError
        return tuple(_typed(member, v) for member, v in zip(members, value, strict=True))
    if declared is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not declared or (declared is float and not math.isfinite(value)):
        raise TypeError
    return value


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}


def _describe(declared: Any) -> str:
    if isinstance(declared, types.UnionType):
        return " or ".join(_describe(member) for member in typing.get_args(declared))
    if typing.get_origin(declared) is tuple:
        members = typing.get_args(declared)
        return "a list" if members[-1] is Ellipsis else f"a list of {len(members)} {_PLURALS[members[0]]}"
    return _NAMES[declared]


def expected(field: dataclasses.Field) -> str:
    """A field's type and limits in words: "an integer, at least 1", "one of gelu, swiglu"."""
    rule: Option = field.metadata["option"]
    if rule.choices is None:
        return ", ".join([_describe(field.type), *rule.limits()])
    choices = [show(c) for c in rule.choices] + ["null"] * (types.NoneType in typing.get_args(field.type))
    return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]


def show(value: Any) -> str:
    """A value as YAML users write it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    text = str(value)
    return text if text and text.isprintable() and text == text.strip() else repr(text)


def _found(value: Any) -> str:
    if value is None:
        return "found null"
    kind = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list"}.get(type(value))
    return f"found {show(value)} ({kind or 'a mapping'})"


def reference(schema: type, title: str, introduction: str) -> str:
    """A Markdown page of every key: one table per section with key, default and meaning.

    The page is generated, so a key cannot exist without its line there.
    """
    parts = [f"# {title}\n\n{introduction}\n"]
    for prefix, section_schema in _sections(schema, ""):
        rows = [
            f"| `{prefix}{f.name}` | `{show(f.default)}` | {f.metadata['option'].meaning}{_note(f)} |"
            for f in dataclasses.fields(section_schema)
            if "option" in f.metadata
        ]
        heading = f"## {prefix.rstrip('.')}\n\n{(section_schema.__doc__ or '').strip()}\n"
        table = "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
        parts += [heading, table + "\n"] if rows else []
    return "\n".join(parts)


def _sections(schema: type, prefix: str) -> Iterator[tuple[str, type]]:
    yield prefix, schema
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            yield from _sections(typing.cast(type, field.type), f"{prefix}{field.name}.")


def _note(field: dataclasses.Field) -> str:
    rule: Option = field.metadata["option"]
    if rule.choices is not None:
        text = expected(field)
        return f" {text[0].upper()}{text[1:]}." if len(rule.choices) > 1 else f" Only {text}."
    return f" {', '.join(rule.limits()).capitalize()}." if rule.limits() else ""
