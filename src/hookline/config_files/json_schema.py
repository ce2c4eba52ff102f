"""The JSON schema of a config file, for completion and validation in editors."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from hookline.config.hook_names import known_hooks, load_hook_class
from hookline.config_files.references import REFERENCE_PATTERN
from hookline.config_files.sections import TrainingConfig
from hookline.options import Option, get_options

_REFERENCE = {
    "type": "string",
    "pattern": REFERENCE_PATTERN,
    "description": "another key, ${model.init_args.width}, or an environment variable, ${NAME}",
}
REGISTRATION_KEYS: dict[str, dict[str, Any]] = {
    "every": {"type": "integer", "minimum": 1, "description": "call it every N-th step"},
    "sample_rate": {"type": "number", "description": "call it in this fraction of the steps"},
    "from_epoch": {"type": "integer", "minimum": 0, "description": "call it from this epoch on"},
    "ranks": {
        "type": "string",
        "enum": ["all", "main", "local_main"],
        "description": "in which processes it is called",
    },
    "before": {"type": "string", "description": "call it directly before the hook of this name"},
    "after": {"type": "string", "description": "call it directly after the hook of this name"},
    "strict": {"type": "boolean", "description": "stop training when it fails"},
}


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(training_schema(), indent=1, ensure_ascii=False) + "\n"


def training_schema() -> dict[str, Any]:
    """Return the schema: every section and key, and the options of every named hook."""
    schema = TrainingConfig.model_json_schema(by_alias=True)
    schema["$defs"]["HookConfig"] = _hook_schema(schema["$defs"])
    schema["properties"]["$schema"] = {"type": "string", "description": "this schema"}
    needed = schema.pop("required")
    schema["anyOf"] = [{"required": needed}, {"required": ["include"]}]
    schema["$defs"]["Reference"] = _REFERENCE
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {**_allow_references(schema), "$schema": dialect, "title": "Hookline config file"}


def _hook_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a hook, with the options of every named hook."""
    schema = definitions["HookConfig"]
    text, mapping = schema["anyOf"]
    names = list(known_hooks())
    named = {"anyOf": [{"enum": names}, {"type": "string"}]}
    mapping["properties"]["name"] |= {**named, "default": None}
    mapping["properties"] = {**REGISTRATION_KEYS, **mapping["properties"]}
    mapping["allOf"] = []
    for name in names:
        hook_class: Any = load_hook_class(name)
        options = get_options(hook_class)
        described = {key: _option_schema(option) for key, option in options.items()}
        if other := getattr(hook_class, "every_name", ""):
            described[other] = described["every"]
        definition = f"{name}_options"
        closed = {"type": "object", "additionalProperties": False}
        definitions[definition] = {**closed, "properties": described}
        given = {key: {"$ref": f"#/$defs/{definition}/properties/{key}"} for key in described}
        shared: dict[str, Any] = dict.fromkeys(mapping["properties"], True)  # described above
        properties = {**shared, **given, "init_args": {"$ref": f"#/$defs/{definition}"}}
        mapping["allOf"].append(
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": {"properties": properties, "additionalProperties": False},
            }
        )
    return {**schema, "anyOf": [{**text, **named}, mapping]}


def _option_schema(option: Option) -> dict[str, Any]:
    try:
        adapter = TypeAdapter(option.hint, config=ConfigDict(arbitrary_types_allowed=True))
        schema = adapter.json_schema()
    except Exception:  # a type without a JSON schema
        schema = {}
    if "$defs" in schema:
        schema = {}
    if option.text:
        schema["description"] = option.text
    if not option.required and isinstance(option.default, str | int | float | bool | None):
        schema["default"] = option.default
    return schema


def _allow_references(node: Any) -> Any:
    """Allow a reference wherever a number or boolean is expected."""
    if isinstance(node, list):
        return [_allow_references(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    inside = {key: _allow_references(inner) for key, inner in node.items()}
    if inside.get("type") not in ("integer", "number", "boolean"):
        return inside
    annotations = {
        key: inside.pop(key) for key in ("title", "description", "default") if key in inside
    }
    return {**annotations, "anyOf": [inside, {"$ref": "#/$defs/Reference"}]}
