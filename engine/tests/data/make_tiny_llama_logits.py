#!/usr/bin/env python3
"""Makes tiny-llama.logits.json: what tiny-llama.gguf answers, in double precision over the dequantised weights.

    pip install gguf numpy
    python3 make_tiny_llama_logits.py

A plain reading of the architecture, one token after the other, as the reference for whatever runs the model faster:
`tokens`, and for each of them the `logits` (a row of the vocabulary) that follow it, rounded to seven digits.
"""

import json
import pathlib

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

here = pathlib.Path(__file__)
reader = GGUFReader(here.with_name("tiny-llama.gguf"))
weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64) for tensor in reader.tensors}


def value(key):
    return reader.fields[key].contents()


layers, hidden = value("llama.block_count"), value("llama.embedding_length")
heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
epsilon, base = value("llama.attention.layer_norm_rms_epsilon"), value("llama.rope.freq_base")
head = hidden // heads
frequencies = base ** (-np.arange(head // 2) * 2.0 / head)


def norm(x, weight):
    return x / np.sqrt((x * x).mean() + epsilon) * weight


def rotate(x, position):
    """Turns neighbouring elements of each head."""
    pairs = x.reshape(-1, head // 2, 2)
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    a, b = pairs[..., 0], pairs[..., 1]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(-1, head)


def run(tokens):
    keys, values = [[] for _ in range(layers)], [[] for _ in range(layers)]
    for position, token in enumerate(tokens):
        x = weights["token_embd.weight"][token]
        for layer in range(layers):
            w = {name: weights[f"blk.{layer}.{name}.weight"] for name in (
                "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
            n = norm(x, w["attn_norm"])
            query = rotate(w["attn_q"] @ n, position)
            keys[layer].append(rotate(w["attn_k"] @ n, position))
            values[layer].append((w["attn_v"] @ n).reshape(kv_heads, head))
            k, v = np.stack(keys[layer]), np.stack(values[layer])
            seen = []
            for h in range(heads):
                scores = k[:, h * kv_heads // heads] @ query[h] / np.sqrt(head)
                scores = np.exp(scores - scores.max())
                seen.append(scores / scores.sum() @ v[:, h * kv_heads // heads])
            x = x + w["attn_output"] @ np.concatenate(seen)
            n = norm(x, w["ffn_norm"])
            gate = w["ffn_gate"] @ n
            x = x + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ n))
        yield weights["token_embd.weight"] @ norm(x, weights["output_norm.weight"])


tokens = [1] + [int(token) for token in np.random.default_rng(7).integers(3, 320, 23)]
logits = [[float(f"{logit:.7g}") for logit in row] for row in run(tokens)]
here.with_name("tiny-llama.logits.json").write_text(json.dumps({"tokens": tokens, "logits": logits}, separators=(",", ":")) + "\n")
rows = np.array(logits)
print(rows.std(axis=1).round(2), rows.argmax(axis=1))
