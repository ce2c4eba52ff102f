"""The JSON schema of a training file, for completion and checks in editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from hookline.config import known_hooks, load_hook_class
from hookline.config_files.file_model import TrainingConfig
from hookline.options import Option, get_options

__all__ = ["PLACE", "training_schema"]

_VARIABLE = {
    "type": "string",
    "pattern": r"^\$\{[A-Za-z_]\w*(:[^{}]*)?\}$",
    "description": "a variable of the environment: ${NAME} or ${NAME:default}",
}
PLACE: dict[str, dict[str, Any]] = {
    "every": {"type": "integer", "minimum": 1, "description": "call it in each N-th step only"},
    "sample_rate": {"type": "number", "description": "call it in this share of the steps only"},
    "from_epoch": {"type": "integer", "minimum": 0, "description": "call it from this epoch on"},
    "before": {"type": "string", "description": "call it directly before the hook of this name"},
    "after": {"type": "string", "description": "call it directly after the hook of this name"},
    "strict": {"type": "boolean", "description": "stop training when it fails"},
}


def training_schema() -> dict[str, Any]:
    """Return the schema: every section and key, and the options of every hook with a name."""
    schema = TrainingConfig.model_json_schema(by_alias=True)
    schema["$defs"]["HookConfig"] = _hook_schema(schema["$defs"])
    schema["properties"]["$schema"] = {"type": "string", "description": "this schema"}
    needed = schema.pop("required")
    schema["anyOf"] = [{"required": needed}, {"required": ["include"]}]
    schema["$defs"]["Variable"] = _VARIABLE
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Hookline training",
    }
    return {**_with_variables(schema), **head}


def _hook_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a hook, with the options of those that have a name."""
    schema = definitions["HookConfig"]
    text, mapping = schema["anyOf"]
    names = list(known_hooks())
    named = {"anyOf": [{"enum": names}, {"type": "string"}]}
    mapping["properties"]["name"] |= {**named, "default": None}
    mapping["properties"] = {**PLACE, **mapping["properties"]}
    mapping["allOf"] = []
    for name in names:
        options = _options(name)
        if options is None:
            continue
        described = {one: _option_schema(option) for one, option in options.items()}
        home = f"{name}_options"
        definitions[home] = {
            "type": "object",
            "properties": described,
            "additionalProperties": False,
        }
        given = {one: {"$ref": f"#/$defs/{home}/properties/{one}"} for one in described}
        shared: dict[str, Any] = dict.fromkeys(mapping["properties"], True)  # described above
        properties = {**shared, **given, "init_args": {"$ref": f"#/$defs/{home}"}}
        mapping["allOf"].append(
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": {"properties": properties, "additionalProperties": False},
            }
        )
    return {**schema, "anyOf": [{**text, **named}, mapping]}


def _options(name: str) -> Mapping[str, Option] | None:
    try:
        kind: Any = load_hook_class(name)
        return get_options(kind)
    except Exception:  # a package's hook that cannot be imported here
        return None


def _option_schema(option: Option) -> dict[str, Any]:
    try:
        adapter = TypeAdapter(option.hint, config=ConfigDict(arbitrary_types_allowed=True))
        schema = adapter.json_schema()
    except Exception:  # a type that JSON has no word for
        schema = {}
    if "$defs" in schema:
        schema = {}
    if option.text:
        schema["description"] = option.text
    if not option.required and isinstance(option.default, str | int | float | bool | None):
        schema["default"] = option.default
    return schema


def _with_variables(node: Any) -> Any:
    """Numbers and truths may be a variable of the environment, too."""
    if isinstance(node, list):
        return [_with_variables(one) for one in node]
    if not isinstance(node, dict):
        return node
    inside = {key: _with_variables(one) for key, one in node.items()}
    if inside.get("type") not in ("integer", "number", "boolean"):
        return inside
    said = {key: inside.pop(key) for key in ("title", "description", "default") if key in inside}
    return {**said, "anyOf": [inside, {"$ref": "#/$defs/Variable"}]}
