"""Reading a schema of `jzero.train.options` from YAML and dotted overrides with OmegaConf, and writing it back.

OmegaConf parses, merges and resolves interpolations ("${model.seed}", "${oc.env:DATA}"). Types are checked by
`jzero.train.options`, on each source alone, so that an error names the file or the override, and because OmegaConf's
own structured configs turn "yes", 1 and 3 into true and "3" into 3.
"""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jzero.errors import JzeroError
from jzero.train.options import Source, keys


def load(schema: type, path: str | PathLike[str] | None, overrides: Sequence[str], hints: Mapping[str, str]) -> Any:
    """An instance of `schema` from its defaults, a YAML file (None: no file) and overrides "key=value", in this order.

    Raises:
        JzeroError: Each mistake in one line that opens with the file or the override.
    """
    merged = OmegaConf.create(_plain(schema()))
    sources = [] if path is None else [(fspath(path), _read(path))]
    sources += [(f"override {_one_line(text)}", _parse(schema, text)) for text in overrides]
    for name, node in sources:
        Source(name, schema, hints, pending=True).build(_container(node))
        merged = OmegaConf.merge(merged, node)
    whole = Source("configuration" if path is None else fspath(path), schema, hints)
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as e:
        raise whole.error(f"{e.full_key}: cannot resolve the interpolation: {_one_line(str(e.msg))}") from None
    return whole.build(values)


def dump(config: Any) -> str:
    """An instance of a schema as YAML, every key in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def _plain(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config, dict_factory=lambda items: {k: _list(v) for k, v in items})


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read(path: str | PathLike[str]) -> DictConfig:
    where = fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JzeroError(
            f"{where}: no such file; give the path of a YAML configuration such as configs/gpt_tiny.yaml"
        ) from None
    except UnicodeDecodeError as e:
        raise JzeroError(
            f"{where}: expected a YAML file in UTF-8, found byte 0x{e.object[e.start]:02x} at {e.start}"
        ) from None
    except OSError as e:
        raise JzeroError(f"{where}: cannot be read: {e.strerror}") from None
    return _mapping(text, where)


def _mapping(text: str, where: str) -> DictConfig:
    try:
        node = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise JzeroError(f"{where}: line {line}: not valid YAML: {_one_line(e.problem or e.context or '')}") from None
    except yaml.YAMLError as e:
        raise JzeroError(f"{where}: not valid YAML: {_one_line(str(e))}") from None
    except OmegaConfBaseException as e:
        raise JzeroError(f"{where}: {e.full_key}: not a valid interpolation: {_one_line(str(e.msg or e))}") from None
    except OSError:  # OmegaConf's answer to a file that holds one number
        raise JzeroError(f"{where}: expected a mapping of keys such as trainer: and model:, found one value") from None
    if not isinstance(node, DictConfig):
        raise JzeroError(f"{where}: expected a mapping of keys such as trainer: and model:, found a list")
    return node


def _parse(schema: type, text: str) -> DictConfig:
    """One override as nested mappings; the value of a text key is taken as it stands, other values are YAML.

    As it stands, because "generate.prompt=def f(x): return" is a mapping in YAML and "exp_manager.name=7" a number.
    """
    where = f"override {_one_line(text)}"
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise JzeroError(
            f"{where}: expected key=value such as trainer.devices=4, with the dotted key of docs/config.md"
        )
    declared = {k: field.type for k, field in keys(schema)}.get(key)
    as_it_stands = declared is str or (declared == (str | None) and value != "null")
    nested: Any = value if as_it_stands else _container(_mapping(f"value: {value}", where))["value"]
    for name in reversed(key.split(".")):
        nested = {name: nested}
    try:
        return OmegaConf.create(nested)
    except OmegaConfBaseException as e:
        raise JzeroError(f"{where}: {_one_line(str(e.msg or e))}") from None


def _container(node: DictConfig) -> Any:
    """Plain mappings and lists; interpolations and ??? stay the text they are."""
    return OmegaConf.to_container(node, resolve=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())
