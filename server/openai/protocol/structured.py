"""What an answer must look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.common import Part


class JsonSchemaFormat(Part):
    """A named schema."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    name: str = Field(min_length=1, max_length=256, description="For the client's own use.")
    schema_: dict[str, Any] | bool = Field(
        default=True, alias="schema", description="The JSON schema; absent: any JSON."
    )
    description: str | None = Field(default=None, description="Accepted and not used.")
    strict: bool = Field(
        default=False, description="Accepted: a schema is always kept to, whether strict or not."
    )


class ResponseFormat(Part):
    """`text`, `json_object` (any JSON object), `json_schema`, or `structural_tag`, whose `format`
    is xgrammar's."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="With type json_schema, and only then."
    )
    format: dict[str, Any] | None = Field(
        default=None, description="With type structural_tag, and only then."
    )

    def params(self) -> StructuredOutputsParams | None:
        """What the engine gets. Raises `RequestError` and `ApiError`."""
        for kind, name in (("json_schema", "json_schema"), ("structural_tag", "format")):
            if (self.type == kind) != (getattr(self, name) is not None):
                verb = "is missing" if self.type == kind else f"belongs to type '{kind}'"
                raise ApiError(
                    f"response_format.{name} {verb}",
                    param=f"response_format.{name}",
                    code="invalid_value",
                )
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)  # type: ignore[arg-type]
        if self.format is not None:
            tag: Any = {"type": "structural_tag", "format": self.format}
            return StructuredOutputsParams(structural_tag=tag)
        return None


def structured_outputs(
    response_format: ResponseFormat | None, given: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """One of the two, or none. Raises `ApiError` 400 that names the parameter."""
    wanted = None
    if response_format is not None:
        try:
            wanted = response_format.params()
        except RequestError as error:
            message = error.message.replace("structured_outputs", "response_format", 1)
            raise ApiError(message, param="response_format", code="invalid_value") from None
    if not given:
        return wanted
    if wanted is not None:
        raise ApiError(
            "response_format and structured_outputs exclude each other",
            param="structured_outputs",
            code="invalid_value",
        )
    return StructuredOutputsParams.make(given)
