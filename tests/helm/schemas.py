"""Whether Kubernetes would take an object: its own kinds by kubernetes-validate's schemas, the others by those here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.helm.chart import CHART, Object

SCHEMAS = Path(__file__).parent / "schemas"
CRD = CHART / "crds" / "servingpools.yaml"


def errors(value: Object, version: str) -> list[str]:
    """What Kubernetes of that version (`1.35`) finds wrong; unknown fields too."""
    if value["kind"] == "ServingPool":
        validator = Draft202012Validator(serving_pool_schema())
    elif (path := SCHEMAS / f"{value['kind'].lower()}.yaml").exists():
        validator = Draft202012Validator(yaml.safe_load(path.read_text()))
    else:
        validator = _builtin(value["kind"], value["apiVersion"], version)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def template_errors(template: Object, version: str) -> list[str]:
    """Of a pod template, which the schemas here leave alone."""
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}
    return errors(whole, version)


@cache
def _builtin(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """Raises FileNotFoundError: there is no such kind."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, api = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], api) if part)
    schema = schema_contents(f"{folder}/{name}.json", version)
    return Draft202012Validator(schema, registry=_registry(folder, version))


@cache
def _registry(folder: str, version: str) -> Registry[Any]:
    definitions: Resource[Any] = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    return definitions @ Registry()


@cache
def serving_pool_schema() -> Object:
    """What the chart's CRD says, without unknown fields."""
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return strict(version["schema"]["openAPIV3Schema"], is_metadata=False)


def strict(schema: Object, is_metadata: bool) -> Object:
    """An OpenAPI schema as JSON schema that refuses unknown fields, except in `metadata`."""
    found = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in found:
        found["properties"] = {name: strict(part, name == "metadata") for name, part in found["properties"].items()}
        found["additionalProperties"] = False
    if "items" in found:
        found["items"] = strict(found["items"], False)
    return found if not is_metadata else {"type": "object"}
