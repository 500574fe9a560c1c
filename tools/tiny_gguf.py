"""Write a toy model with random weights and a byte-level vocabulary as GGUF, for llama.cpp.

Standard library only. One byte of text is one token, so the sizes of prompts are exact. The text it writes is
noise; slots, KV cache and metrics are real. Usage: tiny_gguf.py FILE. Format: ggml's docs/gguf.md, version 3.
"""

import random
import struct
import sys
from array import array
from pathlib import Path

LAYERS, WIDE, HEADS, KV_HEADS, INNER = 4, 256, 8, 4, 512
CONTEXT_TOKENS = 4096
ALIGNMENT = 32
U32, F32, I32, BOOL, STRING, ARRAY = 4, 6, 5, 7, 8, 9  # value types; F32 tensors have type 0
UNKNOWN, CONTROL, BYTE = 2, 3, 6  # token types


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def many(key: str, kind: int, values: list[bytes]) -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", kind, len(values)) + b"".join(values))


def vocabulary() -> list[bytes]:
    """Three special tokens, then every byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    return [
        entry("tokenizer.ggml.model", STRING, text("llama")),
        many("tokenizer.ggml.tokens", STRING, [text(token) for token in tokens]),
        many("tokenizer.ggml.scores", F32, [struct.pack("<f", 0.0)] * len(tokens)),
        many("tokenizer.ggml.token_type", I32, [struct.pack("<i", kind) for kind in kinds]),
        number("tokenizer.ggml.unknown_token_id", 0),
        number("tokenizer.ggml.bos_token_id", 1),
        number("tokenizer.ggml.eos_token_id", 2),
        entry("tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
        entry("tokenizer.ggml.add_space_prefix", BOOL, b"\x00"),
    ]


def settings() -> list[bytes]:
    return [
        entry("general.architecture", STRING, text("llama")),
        entry("general.name", STRING, text("tiny")),
        number("general.file_type", 0),
        number("llama.context_length", CONTEXT_TOKENS),
        number("llama.embedding_length", WIDE),
        number("llama.block_count", LAYERS),
        number("llama.feed_forward_length", INNER),
        number("llama.attention.head_count", HEADS),
        number("llama.attention.head_count_kv", KV_HEADS),
        entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        number("llama.rope.dimension_count", WIDE // HEADS),
        *vocabulary(),
    ]


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor, the fastest dimension first; norms are ones."""
    words, kv = 259, WIDE // HEADS * KV_HEADS
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (WIDE, words),
        "output_norm": (WIDE,),
        "output": (WIDE, words),
    }
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (WIDE,), "ffn_norm": (WIDE,),
                "attn_q": (WIDE, WIDE), "attn_k": (WIDE, kv), "attn_v": (WIDE, kv),
                "attn_output": (WIDE, WIDE),
                "ffn_gate": (WIDE, INNER), "ffn_up": (WIDE, INNER), "ffn_down": (INNER, WIDE),
            }.items()
        }  # fmt: skip
    return found


def weights(name: str, shape: tuple[int, ...], source: random.Random) -> bytes:
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if name.endswith("norm"):
        return array("f", [1.0]).tobytes() * count
    width = 1.0 if name == "token_embd" else 0.1
    return array("f", (source.uniform(-width, width) for _ in range(count))).tobytes()


def main(path: Path) -> None:
    source = random.Random(7)
    infos, data = [], bytearray()
    for name, shape in shapes().items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos.append(text(f"{name}.weight") + dimensions + struct.pack("<IQ", 0, len(data)))
        data += weights(name, shape, source)
        data += bytes(-len(data) % ALIGNMENT)
    pairs = settings()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join([*pairs, *infos])
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
