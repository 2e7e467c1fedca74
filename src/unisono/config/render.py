"""Show a run file as it was understood: every value with its origin as a comment. And the JSON Schema."""

from __future__ import annotations

import json

import yaml
from pydantic import BaseModel

from unisono.config.keys import fields_of
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig


def render(loaded: Loaded) -> str:
    """Write the resolved run file as YAML; reading it back gives an equal config."""
    lines: list[tuple[str, str]] = []
    _section(loaded.config, "", 0, loaded.origins, lines)
    width = max((len(text) for text, origin in lines if origin and len(text) <= 60), default=0)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def json_schema() -> str:
    """Give the JSON Schema of the run file, for editors."""
    schema = RunConfig.model_json_schema(by_alias=True)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "unisono run file",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False)


def _section(
    section: BaseModel, prefix: str, depth: int, origins: dict[str, str], lines: list[tuple[str, str]]
) -> None:
    by_field = dict(section)
    for name, field in fields_of(type(section)).items():
        value = by_field["validation" if name == field.alias else name]
        indent = "  " * depth
        if isinstance(value, BaseModel):
            lines.append((f"{indent}{name}:", ""))
            _section(value, f"{prefix}{name}.", depth + 1, origins, lines)
        else:
            lines.append((f"{indent}{name}: {flow(value)}", origins[f"{prefix}{name}"]))


def flow(value: object) -> str:
    """Write a value on one line, quoted wherever YAML would read it as something else."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump([plain], default_flow_style=True, allow_unicode=True, width=float("inf"), sort_keys=False)
    return text.strip()[1:-1]
