"""Structured output of the demo model by xgrammar, with its own tokenizer (from a GGUF file)."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, Field

from octavo import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.slow
pytest.importorskip("xgrammar")


class City(BaseModel):
    name: str = Field(max_length=20)
    inhabitants: int
    capital: bool


ASK = [{"role": "user", "content": "Describe Paris as JSON with name, inhabitants and capital."}]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 80, **more})


def test_a_schema_in_a_batch_with_others(demo_llm):
    bound = params(structured_outputs=StructuredOutputsParams(json=City))
    conversations = [ASK, QUESTION, ASK]
    three = demo_llm.chat(
        conversations,
        [bound, params(), params(structured_outputs={"choice": ["Paris", "London"]})],
        use_tqdm=False,
    )
    first, second, third = (result.outputs[0] for result in three)
    assert City.model_validate_json(first.text).capital in (True, False)
    assert first.finish_reason == "stop"
    assert second.text == "The capital of France is Paris."
    assert third.text == "Paris"


def test_text_between_tags(demo_llm):
    call = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    }
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": call},
            "end": "</call>",
        },
    }
    out = demo_llm.chat(
        QUESTION, params(structured_outputs={"structural_tag": tag}), use_tqdm=False
    )[0].outputs[0]
    assert re.fullmatch(r'<call>\s*\{\s*"city"\s*:\s*"[^"]*"\s*\}\s*</call>', out.text), out.text


def test_a_model_that_is_made_to_like_whitespace(demo_llm):
    encode = demo_llm.get_tokenizer().encode
    blanks = {encode(blank, add_special_tokens=False)[0]: 100.0 for blank in ("\n", " ", "\t")}
    out = demo_llm.chat(
        ASK,
        params(
            max_tokens=160,
            logit_bias=blanks,
            structured_outputs={"json": {"type": "object", "properties": {"ok": {"const": True}}}},
        ),
        use_tqdm=False,
    )[0].outputs[0]
    assert out.finish_reason == "stop"
    assert re.search(r"\s{9}", out.text) is None
