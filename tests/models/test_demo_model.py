"""The demo model's tokenizer, template and logits against transformers' own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.weight_sources.package import package_source

TEXTS = [
    "",
    "Hello",
    " leading and trailing  ",
    "What is the capital of France? Answer briefly.",
    "don't I'll we've THEY'RE it's",
    "1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣",
    "Grüße aus München, naïve café, Ελληνικά, русский, עברית, العربية, 中文字符, 日本語, 한국어",
    "ไทย emoji 😀 👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 \u200b \ufeff",
    "def f(x):\n\tif x:\n        return {'a': [1, 2]}  # note\n\n\n    pass\r\n",
    "a  b   c    d\t\te\n\n\n\nf \n g\u00a0h\u3000i",
    "<|im_start|>user\nspecial<|im_end|> <|endoftext|><|im_end",
    "\x00\x01\x7f\x80\u2028\u2029",
    '<html>&amp; "quoted" `code` $x^2$ https://example.org/a?b=c#d',
    "supercalifragilisticexpialidocious " * 3,
]


@pytest.fixture(scope="session")
def source(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    cache = tmp_path_factory.mktemp("cache")
    return package_source(
        NoOptions(), WeightSourceContext(demo_model, None, None, cache, show_progress=False)
    )


@pytest.fixture(scope="session")
def tokenizer(source: WeightSource) -> FastTokenizer:
    folder = source.tokenizer_dir()
    assert folder is not None
    return FastTokenizer(
        NoOptions(), TokenizerContext(folder, source.config(), source.generation_config())
    )


@pytest.fixture(scope="session")
def reference(source: WeightSource) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(source.tokenizer_dir()))


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(
    tokenizer: FastTokenizer, reference: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_facts(tokenizer: FastTokenizer, reference: Any) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == len(reference) == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) in ("é", "\ufffd")


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": 'Be <brief> & "kind".'}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "  sure? 😀 "},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(
    tokenizer: FastTokenizer, reference: Any, messages: list[dict[str, Any]], prompt: bool
) -> None:
    text = tokenizer.chat(messages, add_generation_prompt=prompt)
    assert text == reference.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False
    )
    assert tokenizer.encode(text, add_special_tokens=False) == reference.apply_chat_template(
        messages, add_generation_prompt=prompt, return_dict=False
    )


def test_continuation_equals_transformers(tokenizer: FastTokenizer, reference: Any) -> None:
    for tail in ("It is", "It is ", " \n"):
        messages = [*CHATS[0], {"role": "assistant", "content": tail}]
        text = tokenizer.chat(messages, continue_final_message=True)
        assert text.endswith(f"<|im_start|>assistant\n{tail}")
        assert text == reference.apply_chat_template(
            messages, continue_final_message=True, tokenize=False
        )


def test_logits_equal_transformers(
    doubles: Any, source: WeightSource, tokenizer: FastTokenizer
) -> None:
    """transformers reads the converted folder through its own code."""
    from transformers import LlamaForCausalLM

    ours, _ = doubles.build(source.config(), 256)
    ours.load_weights(source.tensors())
    theirs = LlamaForCausalLM.from_pretrained(
        str(source.tokenizer_dir()), dtype=torch.float32, local_files_only=True
    ).eval()
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    ids = tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    ids += tokenizer.encode("The capital of France is Paris.<|im_end|>")
    got = doubles.logits(ours, ids)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=5e-4, rtol=0)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    answer = got.argmax(-1)[-9:-1].tolist()
    assert answer == ids[-8:], tokenizer.decode(answer)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_text_side_imports_no_torch(demo_model: str, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.contracts.weight_source import WeightSourceContext
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.weight_sources.dummy import Dummy, DummyOptions
from octavo.models.weight_sources.hub import Hub
context = WeightSourceContext({demo_model!r}, None, None, Path({str(tmp_path)!r}), False)
source = Dummy(DummyOptions(), context)
from octavo.models.families.config import decoder_config
decoder_config(source.config())
context = TokenizerContext(source.tokenizer_dir(), source.config(), source.generation_config())
tokenizer = FastTokenizer(NoOptions(), context)
assert tokenizer.encode(tokenizer.chat([{{"role": "user", "content": "Hi"}}]))
print(*(name for name in ("torch", "transformers") if name in sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
