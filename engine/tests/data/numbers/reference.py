#!/usr/bin/env python3
"""Reference next-token distributions of a llama-architecture model, from its dequantised weights in 64-bit arithmetic,
and how far llama.cpp is from them on the same file.

    reference.py MODEL.gguf LLAMA_LOGITS OUT

writes OUT.bin, the distributions, and OUT.json, what llama.cpp's logits (by llama_logits.cpp) measure against them.
Needs numpy and gguf from PyPI.

The text is text.txt without a beginning-of-text token; its first ROWS tokens are rows. For each row OUT.bin has the
TOP likeliest tokens as 16-bit ids, then their natural log probabilities as 32-bit floats, little-endian; all rows' ids
come before all rows' log probabilities. What the other tokens have together is the rest to one.

Divergence is Kullback and Leibler's, of a distribution from the reference, in nats, where all tokens but the row's TOP
count as one event. Agreement is the share of rows with the same likeliest token, of equals the lowest.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

ROWS = 512
TOP = 64
HERE = Path(__file__).parent


class Model:
    def __init__(self, path):
        self.reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def field(self, name, default=None):
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def tensor(self, name):
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def logits(self, tokens):
        layers = self.field("llama.block_count")
        heads = self.field("llama.attention.head_count")
        kv_heads = self.field("llama.attention.head_count_kv", heads)
        hidden = self.field("llama.embedding_length")
        epsilon = self.field("llama.attention.layer_norm_rms_epsilon")
        dim = hidden // heads
        rope = self.field("llama.rope.dimension_count", dim)
        base = self.field("llama.rope.freq_base", 10000.0)
        count = len(tokens)
        # Rows of the file's q and k are permuted so that the rotated pairs are neighbours.
        angle = np.arange(count)[:, None] * base ** (-2.0 * np.arange(rope // 2) / rope)
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

        def rotate(x):
            even, odd = x[..., 0:rope:2], x[..., 1:rope:2]
            out = x.copy()
            out[..., 0:rope:2] = even * cos - odd * sin
            out[..., 1:rope:2] = even * sin + odd * cos
            return out

        def norm(x, name):
            return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * self.tensor(name)

        mask = np.triu(np.full((count, count), -np.inf), 1)
        embedding = self.tensor("token_embd.weight")
        x = embedding[tokens]
        for layer in range(layers):
            p = f"blk.{layer}."
            y = norm(x, p + "attn_norm.weight")
            q = rotate((y @ self.tensor(p + "attn_q.weight").T).reshape(count, heads, dim))
            k = rotate((y @ self.tensor(p + "attn_k.weight").T).reshape(count, kv_heads, dim))
            v = (y @ self.tensor(p + "attn_v.weight").T).reshape(count, kv_heads, dim)
            out = np.empty((count, heads, dim))
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = q[:, head] @ k[:, group].T / np.sqrt(dim) + mask
                scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ v[:, group]
            x = x + out.reshape(count, heads * dim) @ self.tensor(p + "attn_output.weight").T
            y = norm(x, p + "ffn_norm.weight")
            gate = y @ self.tensor(p + "ffn_gate.weight").T
            up = y @ self.tensor(p + "ffn_up.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensor(p + "ffn_down.weight").T
        x = norm(x, "output_norm.weight")
        head = self.tensor("output.weight") if "output.weight" in self.tensors else embedding
        return x @ head.T


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def rest(log_probabilities):
    """The log of what is left to one, at least a tiny number."""
    return np.log(np.maximum(1 - np.exp(log_probabilities).sum(axis=-1), 1e-12))


def divergence(ids, reference, other):
    """Of each row of `other`, all log probabilities, from the reference's likeliest."""
    chosen = np.take_along_axis(other, ids, axis=-1)
    within = (np.exp(reference) * (reference - chosen)).sum(axis=-1)
    left, other_left = rest(reference), rest(chosen)
    return within + np.exp(left) * (left - other_left)


def main(path, binary, out):
    model = Model(path)
    text = (HERE / "text.txt").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "logits"
        tokens = json.loads(subprocess.run([binary, path, str(ROWS), str(raw)], input=text, check=True, stdout=subprocess.PIPE).stdout)
        theirs = log_softmax(np.fromfile(raw, dtype="<f4").reshape(ROWS, -1).astype(np.float64))
    assert len(tokens) == ROWS
    exact = log_softmax(model.logits(np.array(tokens)))
    ids = np.argsort(-exact, axis=-1, kind="stable")[:, :TOP]
    assert ids.max() < 1 << 16
    top = np.take_along_axis(exact, ids, axis=-1).astype("<f4")
    Path(out + ".bin").write_bytes(ids.astype("<u2").tobytes() + top.tobytes())
    kl = divergence(ids, top.astype(np.float64), theirs)
    full = (np.exp(exact) * (exact - theirs)).sum(axis=-1)
    agree = (theirs.argmax(axis=-1) == ids[:, 0]).mean()
    value = {
        "model": Path(path).name,
        "rows": ROWS,
        "top": TOP,
        "tokens": tokens,
        "llama_cpp": {"divergence_mean": kl.mean(), "divergence_max": kl.max(), "divergence_mean_all_tokens": full.mean(), "agreement": agree},
    }
    Path(out + ".json").write_text(json.dumps(value, indent=None) + "\n")
    print({key: value["llama_cpp"][key] for key in value["llama_cpp"]})


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
