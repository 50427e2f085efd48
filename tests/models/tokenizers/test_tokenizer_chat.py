"""Chat templates and the tokenizer's own errors, on a tiny vocabulary; the fallback."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre

from octavo.core.contracts import NoOptions, ProbeContext
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.errors import ModelError, RequestError
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.tokenizers.files import probe_fast, probe_transformers
from octavo.models.tokenizers.pieces import byte_alphabet, piece_bytes

USER = {"role": "user", "content": "Hi"}
ROLES = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_folder(path: Path, template: Any = ROLES, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    letters = sorted(pre.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    if template is not None:
        values["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def open_folder(folder: Path, **changes: Any) -> FastTokenizer:
    values = {"config": {}, "generation_config": {}, **changes}
    return FastTokenizer(NoOptions(), TokenizerContext(folder, **values))


@pytest.fixture
def tokenizer(tmp_path: Path) -> FastTokenizer:
    return open_folder(make_folder(tmp_path / "model"))


def with_template(tmp_path: Path, template: Any) -> FastTokenizer:
    return open_folder(make_folder(tmp_path / "model", template))


def test_end_and_begin_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    tokenizer = open_folder(
        folder,
        config={"eos_token_id": 7, "bos_token_id": 3},
        generation_config={"eos_token_id": [9, 257, 7]},
    )
    assert tokenizer.eos_token_ids == (257, 7, 9)
    assert tokenizer.bos_token_id == 256
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (258, {256, 257})
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = open_folder(folder, config={"eos_token_id": [7, 8], "bos_token_id": 3})
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((7, 8), 3)


def test_settings_of_the_file_do_not_cut_or_pad(tokenizer: FastTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"
    assert len(tokenizer.encode("abc")) == 3


def test_lone_surrogate_is_a_request_error(tokenizer: FastTokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at character 2") as caught:
        tokenizer.encode("ab\ud83d")
    assert caught.value.param == "prompt"


def test_threads_agree(tokenizer: FastTokenizer) -> None:
    texts = [f"text {i} " * 20 for i in range(50)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            assert list(pool.map(tokenizer.encode, texts)) == expected
            assert list(pool.map(lambda t: tokenizer.chat([USER]), texts)) == [
                "<s>[user]Hi</s>[assistant]"
            ] * len(texts)


def test_roles_and_prompt(tokenizer: FastTokenizer) -> None:
    assert tokenizer.chat([USER]) == "<s>[user]Hi</s>[assistant]"
    assert tokenizer.chat([USER], add_generation_prompt=False) == "<s>[user]Hi</s>"
    ids = tokenizer.encode(tokenizer.chat([USER]), add_special_tokens=False)
    assert ids.count(256) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "chat template: no role robot"),
        ([], "messages must not be empty"),
        (["Hi"], r"messages\[0\] must be a mapping with a 'role'"),
        ([USER, {"content": "x"}], r"messages\[1\] must be a mapping with a 'role'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] must be a text part, got 'image_url'",
        ),
    ],
)
def test_wrong_messages(tokenizer: FastTokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.chat(messages)
    assert caught.value.param == "messages"


def test_parts_are_joined(tokenizer: FastTokenizer) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": content}
    assert tokenizer.chat([message], add_generation_prompt=False) == "<s>[user]a\nb</s>"
    assert message["content"] is content


def test_continue_final_message(tokenizer: FastTokenizer, tmp_path: Path) -> None:
    def go(tokenizer: FastTokenizer, text: Any) -> str:
        messages = [USER, {"role": "assistant", "content": text}]
        found = tokenizer.chat(messages, continue_final_message=True)
        assert messages[1]["content"] == text
        return found

    # The template strips texts, so what it would strip at the end is not kept either.
    assert go(tokenizer, "It is ") == "<s>[user]Hi</s>[assistant]It is"
    assert go(tokenizer, "It is") == "<s>[user]Hi</s>[assistant]It is"
    keeping = with_template(tmp_path, "{% for m in messages %}|{{ m.content }}{% endfor %}.")
    assert go(keeping, "It is ") == "|Hi|It is "
    assert go(keeping, None) == "|Hi|"
    with pytest.raises(RequestError, match="needs a final message with text"):
        tokenizer.chat([USER, {"role": "assistant"}], continue_final_message=True)
    with pytest.raises(RequestError, match="leaves out the final message's text"):
        go(with_template(tmp_path, "{{ messages[0].content }}"), "x")


def test_language_of_templates(tmp_path: Path) -> None:
    def render(template: str, **kwargs: Any) -> str:
        return with_template(tmp_path, template).chat([USER], **kwargs)

    value = {"v": "<é&'>"}
    assert render("{{ x | tojson }}", kwargs={"x": value}) == '{"v": "<é&\'>"}'
    assert render("{{ x | tojson(indent=1) }}", kwargs={"x": [1]}) == "[\n 1\n]"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "01"
    block = "  {% if true %}\nx\n  {% endif %}\ny"
    assert render(block) == "x\ny"
    generation = "a{% generation %}{{ messages[0].content }}{% endgeneration %}b"
    assert render(generation) == "aHib"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ tools is none }} {{ nothing }}|") == "True |"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    with pytest.raises(RequestError, match="cannot set 'add_generation_prompt'"):
        render("", kwargs={"add_generation_prompt": 3})
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"


def test_tool_call_arguments_are_mappings(tmp_path: Path) -> None:
    template = "{{ messages[-1].tool_calls[0].function.arguments.city }}"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert with_template(tmp_path, template).chat([USER, message]) == "Rome"
    assert call["function"]["arguments"] == '{"city": "Rome"}'
    broken = {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}
    raw = "{{ messages[-1].tool_calls[0].function.arguments }}"
    assert with_template(tmp_path, raw).chat([USER, broken]) == "{"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].missing.deeper }}", "chat template: .*has no attribute 'missing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "chat template: can only concatenate"),
        ("{% if %}", r"chat template, line 1: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe"),
        ("{{ range(10000000) | length }}", "chat template: .*[Rr]ange"),
    ],
)
def test_errors_of_templates(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        with_template(tmp_path, template).chat([USER])


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ 'D' }}"},
        {"name": "tool_use", "template": "{{ 'T' }}"},
        {"name": "rag", "template": "{{ 'R' }}"},
    ]
    tokenizer = with_template(tmp_path, named)
    assert tokenizer.chat([USER]) == "D"
    assert tokenizer.chat([USER], tools=[{"name": "f"}]) == "T"
    assert tokenizer.chat([USER], template="rag") == "R"
    assert tokenizer.chat([USER], template="{{ 'own' }}") == "own"
    with pytest.raises(RequestError, match="'rags' is not known: did you mean 'rag'") as caught:
        tokenizer.chat([USER], template="rags")
    assert caught.value.param == "chat_template"
    tokenizer = with_template(tmp_path, named[1:])
    with pytest.raises(RequestError, match="no default, name one of: rag, tool_use"):
        tokenizer.chat([USER])


def test_where_templates_come_from(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", None)
    with pytest.raises(RequestError, match="the model has no chat template"):
        open_folder(folder).chat([USER])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'json' }}"}))
    assert open_folder(folder).chat([USER]) == "json"
    (folder / "chat_template.jinja").write_text("{{ 'jinja' }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ 'rag' }}")
    assert open_folder(folder).chat([USER]) == "jinja"
    assert open_folder(folder).chat([USER], template="rag") == "rag"
    assert open_folder(folder, chat_template="{{ 'mine' }}").chat([USER]) == "mine"
    (tmp_path / "t.jinja").write_text("{{ 'file' }}")
    assert open_folder(folder, chat_template=str(tmp_path / "t.jinja")).chat([USER]) == "file"
    with pytest.raises(ModelError, match=r"'absent\.jinja' is neither a Jinja template nor"):
        open_folder(folder, chat_template="absent.jinja")


def test_damaged_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        open_folder(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        open_folder(folder)


def test_pieces() -> None:
    table = byte_alphabet()
    assert len(table) == 256
    assert set(table) == set(pre.ByteLevel.alphabet())
    assert piece_bytes("Ġaé", "byte_level") == b" a\xe9"
    assert piece_bytes("<0xE9>", "sentence_piece") == b"\xe9"
    assert piece_bytes("▁<0xE9>", "sentence_piece") == b" <0xE9>"
    assert piece_bytes("▁é", "plain") == "▁é".encode()


def test_probes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")

    def facts(value: Any) -> ProbeContext:
        return ProbeContext(facts={"tokenizer_dir": value})

    assert probe_fast(facts(folder))
    assert probe_fast(ProbeContext())
    assert not probe_fast(facts(tmp_path))
    assert not probe_fast(facts(None))
    assert probe_transformers(facts(tmp_path))
    assert not probe_transformers(facts(None))


def test_fallback_agrees_with_fast(tmp_path: Path) -> None:
    from octavo.models.tokenizers.transformers_tokenizer import TransformersTokenizer

    fast_folder = make_folder(tmp_path / "fast")
    folder = tmp_path / "slow"
    folder.mkdir()
    model = json.loads((fast_folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps({**model["vocab"], "<s>": 256, "</s>": 257}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    values = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "chat_template": ROLES,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    fast = open_folder(fast_folder)
    slow = TransformersTokenizer(NoOptions(), TokenizerContext(folder, {}, {"eos_token_id": 5}))
    for text in ("Hello", "é 😀</s>", ""):
        ids = fast.encode(text)
        assert slow.encode(text) == ids
        for skip in (True, False):
            assert slow.decode(ids, skip_special_tokens=skip) == fast.decode(
                ids, skip_special_tokens=skip
            )
        assert [slow.token_bytes(i) for i in ids] == [fast.token_bytes(i) for i in ids]
    assert slow.chat([USER]) == fast.chat([USER])
    assert (slow.eos_token_ids, slow.bos_token_id) == ((257, 5), 256)
    assert (slow.vocab_size, slow.special_ids) == (258, {256, 257})
    with pytest.raises(RequestError, match="lone surrogate"):
        slow.encode("\udc00")
    with pytest.raises(ModelError, match="no tokenizer can be made"):
        TransformersTokenizer(NoOptions(), TokenizerContext(tmp_path, {}, {}))
