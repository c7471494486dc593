"""Makes a tiny model with random weights and a tokenizer of bytes, without any network: `models.py NAME DIRECTORY`.

Weights are drawn wide (`initializer_range`), else such a model repeats one token for ever: equal tokens would prove
nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEED = 20

# name: configuration, model, dtype, what differs from the common shape
KINDS: dict[str, tuple[Any, Any, torch.dtype, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, torch.float32, {}),
    "qwen": (Qwen3Config, Qwen3ForCausalLM, torch.bfloat16, {}),
    # Two of three layers see the last 64 tokens only: two groups of blocks, which share their memory.
    "sliding": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        torch.float32,
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
}


def tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """256 bytes and four special tokens, no merges: nothing to train."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    while len(vocabulary) % 64:
        vocabulary[f"<extra_{len(vocabulary)}>"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=positions,
    )


def make(name: str, directory: Path, positions: int = 2048) -> None:
    config, model, dtype, changes = KINDS[name]
    words = tokenizer(positions)
    shape = {
        "vocab_size": len(words),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    torch.manual_seed(SEED)
    made = model(config(**{**shape, **changes})).to(dtype)
    made.save_pretrained(directory)
    words.save_pretrained(directory)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
