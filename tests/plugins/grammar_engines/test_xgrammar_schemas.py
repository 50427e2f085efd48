"""What xgrammar is given for a JSON schema: random outputs validate, what is not supported is
refused, numbers and whitespace end. Bytes are the vocabulary, so that a walk is fast."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from octavo.core.contracts.grammar_engine import GrammarEngineContext, GrammarVocabulary
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.plugins.grammar_engines.json_schema import prepared_schema
from octavo.server.openai.forced_calls import required_schema
from octavo.server.openai.protocol.tools import Tool

pytest.importorskip("xgrammar")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

END = 256


@pytest.fixture(scope="module")
def engine():
    from octavo.plugins.grammar_engines.options import XGrammarOptions
    from octavo.plugins.grammar_engines.xgrammar_engine import XGrammarEngine

    tokens = (*(bytes([i]) for i in range(256)), b"")
    made = XGrammarEngine(
        XGrammarOptions(), GrammarEngineContext(GrammarVocabulary(tokens, (END,)))
    )
    made.prepare()
    return made


def grammar(engine, **spec):
    return engine.load(engine.compile(StructuredOutputsParams(**spec)))


def allowed(matcher):
    mask = np.zeros(9, np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(made, text):
    matcher = made.matcher([END])
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.complete


def walk(made, rng, limit=3000):
    """A random output: closing characters and ends are likelier, so that it comes to an end."""
    matcher, out = made.matcher([END]), bytearray()
    while len(out) < limit:
        choices = allowed(matcher)
        likely = [c for c in choices if c == END or chr(c) in '"}],:0a'] if len(out) > 20 else []
        choices = likely if likely and rng.random() < 0.9 else choices
        # A class of characters lets bytes through that are no UTF-8, which no token spells alone.
        choices = [c for c in choices if c < 128 or c == END] or choices
        token = rng.choice(choices)
        assert matcher.accept(token)
        if token == END:
            return out.decode()
        out.append(token)
    raise AssertionError(f"no end after {limit} characters: {bytes(out[:200])!r}")


SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
            "score": {"type": "number"},
        },
        "required": ["name", "age"],
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": ["integer", "null"]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "anything": {},
    "true": True,
    "object": {"type": "object", "additionalProperties": True},
    "free part": {"type": "object", "properties": {"a": {"type": "object"}}, "required": ["a"]},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "least": {"type": "string", "minLength": 3},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d+( [^a]*)?$"},
    "dots": {"type": "string", "pattern": "^.{2,4}$"},
    "optional group": {"type": "string", "pattern": "^a( [b-d]*)?$"},
    "classes": {"type": "string", "pattern": r"^[ -~]{3}[\W\D][^\s]\.\/[\]^-]$"},
    "unanchored": {"type": "string", "pattern": "a+b"},
    "enum": {"enum": ["a", 1, None, {"b": [2, '"\\\n']}, "whitespace_1{0, 4}", "x ::= [0-9]*"]},
    "const": {"const": {"a": [1, {"b": "é😀"}]}},
    "enum by type": {"type": ["integer", "null"], "enum": ["a", 1, None]},
    "over zero": {"type": "number", "minimum": 0},
    "under seven": {"type": "number", "maximum": 7},
    "between": {"type": "number", "minimum": -1.5, "maximum": 7.25},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 17},
    "from three": {"type": "integer", "minimum": 3},
    "from zero": {"type": "integer", "minimum": 0},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}],
        "additionalItems": False,
    },
    "counts": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "at least two of anything": {"type": "array", "minItems": 2, "maxItems": 5},
    "at most one of anything": {"maxItems": 1},
    "more than described": {"prefixItems": [{"const": 1}], "minItems": 3, "maxItems": 4},
    "many or null": {"type": ["array", "null"], "minItems": 1},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "keys": {"type": "object", "patternProperties": {"^a[0-9]$": {"type": "integer"}}},
    "names": {"type": "object", "propertyNames": {"pattern": "^a+$"}},
    "no type": {"properties": {"a": {"minimum": 3}, "b": {"maxLength": 2}}, "required": ["a"]},
    "undescribed": {"type": "object", "required": ["a"], "additionalProperties": {"const": 1}},
    "wrapped": {"allOf": [{"type": "integer", "minimum": 1, "maximum": 3}], "title": "x"},
    "type outside": {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "keyword names": {
        "type": "object",
        "properties": {"if": {"type": "null"}, "not": {"const": 1}, "whitespace": {"type": "null"}},
        "required": ["if", "not", "whitespace"],
    },
    "quotes in keys": {
        "type": "object",
        "properties": {'a"b\\c\n[0-9]*': {"type": "null"}},
        "required": ['a"b\\c\n[0-9]*'],
    },
    "format that nobody knows": {"type": "string", "format": "zork"},
}

SHAPES = {
    "date": r"\d{4}-[01]\d-[0-3]\d",
    "time": r"\d\d:\d\d:\d\d(\.\d{1,18})?(Z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,18})?(Z|[+-]\d\d:\d\d)",
    "duration": r"P[\dYMDWTHS]+",
    "email": r".+@[\w.-]+",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
    "ipv6": r"[\da-fA-F:.]+",
    "uuid": r"[\da-fA-F]{8}(-[\da-fA-F]{4}){3}-[\da-fA-F]{12}",
    "hostname": r"[\w.-]+",
}
"""A format is kept to by its shape: no calendar is asked."""

SCHEMAS |= {name: {"type": "string", "format": name} for name in SHAPES}


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_outputs_validate(engine, name):
    schema = SCHEMAS[name]
    made = grammar(engine, json="true" if schema is True else schema)
    validator = jsonschema_rs.validator_for(schema)
    rng = random.Random(0)
    for _ in range(12):
        text = walk(made, rng)
        value = json.loads(text)
        assert validator.is_valid(value), text
        bare = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert re.search(r"\s{9}", bare) is None
        assert all(len(run) <= 19 for run in re.findall(r"\d+", bare))
        if name in SHAPES:
            assert re.fullmatch(SHAPES[name], value), value


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("person", ['{"name": "Jo", "age": 3}', '{\n  "name":"é\\n",\n  "age":0, "tags":[]}']),
        ("person", ['{ "name" : "a" , "age" : 150 , "tags" : [ "a" , "b" ] , "score" : -1.5e-7 }']),
        ("recursive", ['{"v":1,"next":{"v":null,"next":null}}']),
        ("anything", ["[1, {}, null, [true, false], 1e5, -0.5, 0]", '"\\u00e9"']),
        ("from zero", ["0", "7", "123456789012345678"]),
        ("unanchored", ['"aab"']),
        ("map", ['{"x": 1, "y": 2}']),
        ("free part", ['{"a": {}}', '{"a": {"x": [1, {"y": 2}]}}']),
    ],
)
def test_usual_json_is_accepted(engine, name, texts):
    made = grammar(engine, json=SCHEMAS[name])
    assert [text for text in texts if not accepts(made, text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, "#: 'not' is not supported"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "#/properties/a: 'if'"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"dependentRequired": {}}, "dependentRequired"),
        ({"type": "object", "properties": {}, "anyOf": [{}]}, "'anyOf' together with 'properties'"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "'\\$ref' together"),
        ({"allOf": [{}, {}]}, "'allOf' of several"),
        ({"$ref": "http://x.y/z"}, "must point into the schema"),
        ({"$ref": "#/$defs/gone"}, "gone|\\$defs"),
        ({"type": "integer", "multipleOf": 5}, "minimum"),
        ({"type": "integer", "multipleOf": 1, "minimum": 0, "maximum": 5000}, "over 1024"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' together"),
        ({"type": "string", "format": "date", "minLength": 3}, "'format' together"),
        ({"type": "string", "pattern": '^"$'}, "quotes"),
        ({"type": "string", "pattern": r"^\\$"}, "quotes"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookahead"),
        ({"type": "string", "pattern": "[a-"}, "Unclosed"),
        ({"type": "string", "pattern": 3}, "must be a string"),
        ({"minimum": 1, "minLength": 1}, "'type' is missing"),
        ({"type": "foo"}, "'type' must be one of"),
        ({"type": []}, "'type' must not be empty"),
        ({"type": {"a": 1}}, "'type' must be one of"),
        ({"type": [["a"]]}, "'type' must be one of"),
        ({"type": "object", "anyOf": [3]}, "must be of objects"),
        ({"anyOf": 3}, "'anyOf' must be a non-empty array"),
        ({"enum": []}, "non-empty array"),
        ({"type": "integer", "enum": ["a"]}, "no value of 'enum'"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is required"),
        ({"type": "object", "required": "a"}, "array of strings"),
        ({"properties": 3}, "must be an object"),
        ({"properties": {"a": 3}}, "a schema must be"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems"),
        ("false", "must be a JSON object|allows nothing"),
    ],
)
def test_what_is_not_supported_is_refused(engine, schema, words):
    with pytest.raises(RequestError, match=words) as caught:
        grammar(engine, json=schema)
    assert "structured_outputs" in str(caught.value)
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"regex": "[a-"}, "Unclosed"),
        ({"regex": "(" * 5000}, "parenthesis|Nest"),
        ({"regex": "(" * 2000 + "a" + ")" * 2000}, "Nest"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": "a{3,2}"}, "Lower bound"),
        ({"regex": r"\bfoo"}, "boundary"),
        ({"grammar": "root ::= foo"}, '"foo" is not defined'),
        ({"grammar": 'foo ::= "a"'}, "root"),
        ({"grammar": "root ::="}, "EBNF"),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "zork"}}}, "zork|format"),
    ],
)
def test_bad_grammars_are_refused(engine, spec, words):
    with pytest.raises(RequestError, match=words) as caught:
        grammar(engine, **spec)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("liked", [" ", "\n", "\t ", "0123456789"])
@pytest.mark.parametrize("name", ["person", "anything", "over zero", "from three", "date-time"])
def test_a_model_that_repeats_itself_comes_to_an_end(engine, name, liked):
    """Whitespace or digits wherever they are allowed, and no more than a few in a row."""
    matcher, out = grammar(engine, json=SCHEMAS[name]).matcher([END]), bytearray()
    wanted = set(liked.encode())
    in_string = False
    while (choices := allowed(matcher)) != [END]:
        liked_ones = [] if in_string else [c for c in choices if c in wanted]
        closing = [c for c in choices if c == END or chr(c) in '}]",:']
        token = (liked_ones or closing or choices)[0]
        if token == END:
            break
        assert matcher.accept(token)
        in_string ^= token == ord('"')
        out.append(token)
        assert len(out) < 600, bytes(out)
    assert matcher.complete
    assert re.search(rb"[ \n\t\r]{9}|[0-9]{20}", out) is None
    json.loads(out)


def test_json_on_one_line(engine):
    made = grammar(engine, json=SCHEMAS["person"], disable_any_whitespace=True)
    assert accepts(made, '{"name": "a", "age": 1}')
    assert not accepts(made, '{"name":"a","age":1}')
    assert not accepts(made, '{"name": "a",\n "age": 1}')


def test_any_object(engine):
    made = grammar(engine, json_object=True)
    assert accepts(made, '{"a": [1, {"b": null}], "c": "x"}')
    assert not any(accepts(made, text) for text in ("[]", '"a"', "1", ""))
    assert [json.loads(walk(made, random.Random(i))) for i in range(5)]


def test_choices_are_taken_literally(engine):
    texts = ["yes", "no", 'a"b\\c', "é😀", "\n\t", "[0-9]*", "x\x7f", "\x01ab\x7f0", "no more"]
    made = grammar(engine, choice=texts)
    assert [text for text in texts if not accepts(made, text)] == []
    assert not any(accepts(made, text) for text in ("maybe", "n", "7", ""))
    assert walk(made, random.Random(1)) in texts


def test_structural_tags_for_tool_calls(engine):
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"],
    }
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "json_schema", "json_schema": call},
        "end": "\n</tool_call>",
    }
    made = grammar(
        engine,
        structural_tag={
            "type": "structural_tag",
            "format": {
                "type": "tags_with_separator",
                "tags": [tag],
                "separator": "\n",
                "at_least_one": True,
            },
        },
    )
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert accepts(made, one)
    assert accepts(made, f"{one}\n{one}")
    assert not accepts(made, "Hello")
    assert not accepts(made, one.replace('"f"', '"g"'))
    assert not accepts(made, one.replace("{}", " " * 30 + "{}"))
    inner = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(RequestError, match="uniqueItems"):
        grammar(engine, structural_tag={"type": "structural_tag", "format": inner})


def test_the_schema_itself_is_not_changed():
    text = json.dumps(SCHEMAS["old tuple"])
    prepared_schema(text)
    assert json.dumps(SCHEMAS["old tuple"]) == text


def test_references_of_forced_tools_stay_in_their_tool(engine):
    def tool(name, **parameters):
        function = {"name": name, "parameters": {"type": "object", **parameters}}
        return Tool.model_validate({"function": function})

    kind = {"enum": ["#/$defs/Kind"]}
    tree = tool(
        "tree",
        properties={"kind": {"$ref": "#/$defs/Kind"}, "left": {"$ref": "#"}},
        required=["kind"],
        additionalProperties=False,
        **{"$defs": {"Kind": kind}},
    )
    pair = tool("pair", properties={"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}})
    made = grammar(engine, json=json.dumps(required_schema([tree, pair], parallel=False)))

    def call(name, parameters):
        return json.dumps([{"name": name, "parameters": parameters}])

    leaf = {"kind": "#/$defs/Kind"}
    assert accepts(made, call("tree", {**leaf, "left": {**leaf, "left": leaf}}))
    assert accepts(made, call("pair", {"a": None, "b": None}))
    assert not accepts(made, call("tree", {**leaf, "left": []}))
    assert not accepts(made, call("tree", {"kind": "#/$defs/tree/$defs/Kind"}))
    assert not accepts(made, call("pair", {"a": None, "b": 1}))
