"""Reads a CDI file in YAML, as container runtimes do. It is loaded only where such a file
exists.
"""

from __future__ import annotations

import yaml

from topobus.values.errors import ContractError

__all__ = ["read_yaml"]


class _Loader(yaml.SafeLoader):
    """YAML as Go reads it into text: a time is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(data: bytes, where: str) -> object:
    """Read one document.

    Shapes: where — named in errors.
    Errors: raises ContractError for bytes that are neither YAML nor JSON.
    """
    try:
        value: object = yaml.load(data, Loader=_Loader)
    except yaml.MarkedYAMLError as err:
        line = f", line {err.problem_mark.line + 1}" if err.problem_mark else ""
        raise ContractError(f"{where}{line}: this is neither YAML nor JSON: {err.problem or err.context}") from err
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as err:
        raise ContractError(f"{where}: this is neither YAML nor JSON: {str(err).splitlines()[0]}") from err
    return value
