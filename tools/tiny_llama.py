"""Make a toy model with random weights and a byte-level tokenizer, so that a real server can run offline.

The text it writes is noise; the scheduler, the KV cache, the preemptions and the metrics are real.
Usage: tiny_llama.py FOLDER (needs torch and transformers, from the server's own environment).
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_TOKENS = 4096


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=CONTEXT_TOKENS,
    )


def model() -> LlamaForCausalLM:
    """Two layers, 128 wide: some 400 thousand parameters."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    tokenizer().save_pretrained(sys.argv[1])
    model().save_pretrained(sys.argv[1])
