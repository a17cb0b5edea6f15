#!/usr/bin/env python3
"""Makes tiny-llama.gguf: a llama-architecture model with random weights and a small byte-level BPE tokenizer, for tests.

    pip install gguf numpy
    python3 make_tiny_llama.py

Three layers, rows of 64, 4 query heads on 2 key and value heads of 16, feed-forward 128, 320 tokens, output head tied to
the embedding. The layers' matrices have different types, so that one file runs them all.
"""

import collections
import pathlib

import numpy as np
from gguf import GGMLQuantizationType as T, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, FEED_FORWARD, VOCABULARY, CONTEXT = 3, 64, 4, 2, 16, 128, 320, 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = """A shoal is many fish that swim as one. No fish leads it; each keeps to its neighbours, and the shoal turns
together, at once, as if it had one mind. The system, the user and the assistant say what they have to say. One two three
four five six seven eight nine ten. This is that and there is the other thing, then and when and where and who."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_letters():
    """The printable letter that byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in seen}
    unseen = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + place) for place, byte in enumerate(unseen)})
    return [letters[byte] for byte in range(256)]


def learn_merges(count, letters):
    """Plain BPE: the commonest pair of neighbours within words, again and again; ties go to the first in the alphabet."""
    words = [[letters[byte] for byte in (" " * (place > 0) + word).encode()] for place, word in enumerate(TEXT.split())]
    merges = []
    while len(merges) < count:
        pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if any(left + right == a + b for a, b in merges):
            raise SystemExit("a merge gave a token that is there already")
        merges.append((left, right))
        for word in words:
            place = 0
            while place + 1 < len(word):
                if (word[place], word[place + 1]) == (left, right):
                    word[place:place + 2] = [left + right]
                place += 1
    return merges


random = np.random.default_rng(31)
letters = byte_letters()
merges = learn_merges(VOCABULARY - len(SPECIAL) - 256, letters)
tokens = SPECIAL + letters + [left + right for left, right in merges]
assert len(tokens) == len(set(tokens)) == VOCABULARY

path = pathlib.Path(__file__).with_name("tiny-llama.gguf")
writer = GGUFWriter(path, "llama")
writer.add_type("model")
writer.add_name("Tiny Llama for tests")
writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
writer.add_block_count(LAYERS)
writer.add_context_length(CONTEXT)
writer.add_embedding_length(HIDDEN)
writer.add_feed_forward_length(FEED_FORWARD)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KV_HEADS)
writer.add_rope_freq_base(10000.0)
writer.add_rope_dimension_count(HEAD)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(VOCABULARY)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(tokens)
writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (VOCABULARY - len(SPECIAL)))
writer.add_token_merges([f"{left} {right}" for left, right in merges])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_unk_token_id(0)
writer.add_pad_token_id(2)
writer.add_add_bos_token(False)
writer.add_add_space_prefix(False)
writer.add_chat_template(TEMPLATE)


def matrix(name, rows, columns, kind, size=1.0):
    weights = (random.standard_normal((rows, columns)) * size / np.sqrt(columns)).astype(np.float32)
    data = quantize(weights, kind)
    writer.add_tensor(name, data, raw_dtype=None if kind in (T.F32, T.F16) else kind)


def norm(name):
    writer.add_tensor(name, (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32))


# Rows of the embedding are long enough that logits differ, since the head is the same tensor.
matrix("token_embd.weight", VOCABULARY, HIDDEN, T.Q8_0, 4.0)
for layer, (attention, feed_forward) in enumerate([(T.F16, T.Q8_0), (T.Q4_1, T.Q4_0), (T.Q5_0, T.Q5_1)]):
    norm(f"blk.{layer}.attn_norm.weight")
    matrix(f"blk.{layer}.attn_q.weight", HEADS * HEAD, HIDDEN, attention, 2.0)
    matrix(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD, HIDDEN, attention, 2.0)
    matrix(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD, HIDDEN, attention)
    matrix(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD, attention)
    norm(f"blk.{layer}.ffn_norm.weight")
    matrix(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN, feed_forward, 2.0)
    matrix(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN, feed_forward)
    matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD, feed_forward)
norm("output_norm.weight")
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
print(path.stat().st_size, "bytes")
