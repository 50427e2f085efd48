"""A model folder without weights: configuration, byte tokenizer and chat template, for tests and
benchmarks of everything around a model."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 260
EOS_ID = 257
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def write_model_folder(folder: Path, max_model_len: int = 4096) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json of a tiny Llama whose tokens are
    bytes and four special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>", "<|user|>", "<|tool|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
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
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
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
