"""A model folder without weights: configuration, byte tokenizer and chat template, for tests and
benchmarks of everything around a model."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ("Ġthe", "Ġquick", "Ġbrown", "Ġfox", "Ġjumps", "Ġover")
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|tool|>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def write_model_folder(folder: Path, max_model_len: int = 4096) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json of a tiny Llama. Its tokens are
    256 bytes, a few `WORDS` with the beginnings of each, and `SPECIAL`, the second of which ends a
    text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    merges = []
    for word in WORDS:
        for end in range(1, len(word)):
            if (pair := (word[:end], word[end])) not in merges:
                merges.append(pair)
                vocabulary[word[: end + 1]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary) + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": len(vocabulary),
        "eos_token_id": len(vocabulary) + 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return folder
