#!/usr/bin/env python3
"""Makes a small model with random weights of each architecture, and what llama.cpp answers for it: NAME.json next to this file.

    pip install gguf numpy
    python3 make.py LLAMA_CPP [NAME...]

LLAMA_CPP is a folder with llama.cpp's source and a static build of it in `build`; `judge.cpp` is compiled against it.

A model is not stored but described, so that tests make it: `metadata` (key, type, value) as the `gguf` package writes it, and `tensors`
(name, dimensions with the row length first, type, size, centre). Element `i` of tensor number `t` is

    centre + size · (splitmix64(t · 2³² + i) >> 40) / 2²³ − size

rounded to the type. Bytes of an MXFP4 tensor are those of splitmix64(t · 2³² + i), eight to a number, lowest first, but for the exponents:
119 and the two lowest bits. `context` is the context's length, `tokens` the tokens, `rows` places among them, and `logits` what follows
those, by llama.cpp in single precision over the same weights. `rounding` says how far its logits are off when it keeps keys and values
in half precision: the root mean square of what changes, as a share of the logits' own.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGMLQuantizationType as T, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

HERE = pathlib.Path(__file__).parent
VOCABULARY, TOKENS, CONTEXT = 64, 48, 256
ROWS = [0, 3, 9, 14, 23, 31, 40, 47]


def splitmix(tensor, count):
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + np.uint64(tensor << 32)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def elements(tensor, shape, kind, size, centre):
    """A tensor's elements in single precision, as numpy has them: the row length last."""
    count = int(np.prod(shape))
    if kind == "MXFP4":
        blocks = splitmix(tensor, -(-count // 32 * 17 // 8) + 1).view(np.uint8)[:count // 32 * 17].reshape(-1, 17).copy()
        blocks[:, 0] = 119 + (blocks[:, 0] & 3)
        values = dequantize(blocks, T.MXFP4)
    else:
        unit = (splitmix(tensor, count) >> np.uint64(40)).astype(np.float64) / 2.0**23
        values = (centre + size * unit - size).astype(np.float32)
        values = values.astype(np.float16).astype(np.float32) if kind == "F16" else values
    return values.reshape(shape[::-1])


class Model:
    """A model as it is put together: three layers of the llama kind, which the architectures change."""

    def __init__(self, architecture, layers=3, hidden=64, heads=4, kv_heads=2, head=16, feed_forward=96, norm="rms", **more):
        self.architecture, self.layers, self.hidden, self.heads, self.kv_heads, self.head = architecture, layers, hidden, heads, kv_heads, head
        self.feed_forward, self.norm = feed_forward, norm
        self.metadata, self.tensors = [], []
        for key, value in [("block_count", layers), ("context_length", 128), ("embedding_length", hidden), ("attention.head_count", heads),
                           ("attention.head_count_kv", kv_heads), ("vocab_size", VOCABULARY)]:
            self.set(key, value)
        if feed_forward:
            self.set("feed_forward_length", feed_forward)
        if head * heads != hidden or more.pop("say_head", False):
            self.set("attention.key_length", head)
            self.set("attention.value_length", head)
        self.set(f"attention.layer_norm{'_rms' if norm == 'rms' else ''}_epsilon", 1e-5)
        self.matrix("token_embd.weight", hidden, VOCABULARY, 4.0)
        self.norms("output_norm")

    def set(self, key, value):
        self.metadata.append((f"{self.architecture}.{key}", value))
        return self

    def matrix(self, name, columns, rows, gain=1.0, experts=None, kind="F16"):
        shape = [columns, rows] + ([experts] if experts else [])
        self.tensors.append([name, shape, kind, round(float(gain * np.sqrt(3 / columns)), 6), 0.0])

    def vector(self, name, length, size=0.3, centre=0.0):
        self.tensors.append([name, length if isinstance(length, list) else [length], "F32", size, centre])

    def norms(self, name, length=None):
        self.vector(f"{name}.weight", length or self.hidden, 0.3, 1.0)
        if self.norm == "layer+bias":
            self.vector(f"{name}.bias", length or self.hidden)

    def head_of_its_own(self):
        self.matrix("output.weight", self.hidden, VOCABULARY, 2.0)
        return self

    def attention(self, layer, fused=False, bias="", norms=(), gain=2.0):
        at, hidden = f"blk.{layer}.", self.hidden
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        if fused:
            self.matrix(at + "attn_qkv.weight", hidden, queries + 2 * keys, gain)
        else:
            self.matrix(at + "attn_q.weight", hidden, queries, gain)
            self.matrix(at + "attn_k.weight", hidden, keys, gain)
            self.matrix(at + "attn_v.weight", hidden, keys)
        self.matrix(at + "attn_output.weight", queries, hidden)
        for part, length in [("q", queries), ("k", keys), ("v", keys), ("output", hidden)]:
            if part[0] in bias:
                self.vector(f"{at}attn_{part}.bias", length)
        for part, length in norms:
            self.norms(at + part, length)

    def dense(self, layer, fused=False, gated=True, bias=False, width=None, suffix=""):
        at, hidden, width = f"blk.{layer}.", self.hidden, width or self.feed_forward
        if gated and not fused:
            self.matrix(f"{at}ffn_gate{suffix}.weight", hidden, width, 2.0)
        self.matrix(f"{at}ffn_up{suffix}.weight", hidden, width * (2 if fused else 1), 1.5 if fused else 1.0)
        self.matrix(f"{at}ffn_down{suffix}.weight", width, hidden)
        if bias:
            if gated:
                self.vector(f"{at}ffn_gate{suffix}.bias", width)
            self.vector(f"{at}ffn_up{suffix}.bias", width)
            self.vector(f"{at}ffn_down{suffix}.bias", hidden)

    def experts(self, layer, count, width, bias=False, kind="F16"):
        at, hidden = f"blk.{layer}.", self.hidden
        self.tensors.append([f"{at}ffn_gate_inp.weight", [hidden, count], "F32", 0.5, 0.0])
        for part, columns, rows, gain in [("gate", hidden, width, 2.0), ("up", hidden, width, 1.0), ("down", width, hidden, 1.0)]:
            self.matrix(f"{at}ffn_{part}_exps.weight", columns, rows, gain, count, kind)
            if bias:
                self.vector(f"{at}ffn_{part}_exps.bias", [rows, count])
        if bias:
            self.vector(f"{at}ffn_gate_inp.bias", count)

    def usual(self, before=("attn_norm", "ffn_norm"), after=(), dense={}, **attention):
        """All layers alike."""
        for layer in range(self.layers):
            self.attention(layer, **attention)
            self.dense(layer, **dense)
            for name in [*before, *after]:
                self.norms(f"blk.{layer}.{name}")
        return self

    def mixed(self, count, width, before=("attn_norm", "ffn_norm"), bias=False, kind="F16", **attention):
        """All layers with experts."""
        self.set("expert_count", count)
        for layer in range(self.layers):
            self.attention(layer, **attention)
            self.experts(layer, count, width, bias, kind)
            for name in before:
                self.norms(f"blk.{layer}.{name}")
        return self


HEADS = (("attn_q_norm", 16), ("attn_k_norm", 16))
WHOLE = (("attn_q_norm", 64), ("attn_k_norm", 32))
POST = ("post_attention_norm", "post_ffw_norm")


def yarn(model, factor=8.0, original=16, **more):
    model.set("rope.scaling.type", "yarn").set("rope.scaling.factor", factor).set("rope.scaling.original_context_length", original)
    for key, value in more.items():
        model.set(f"rope.scaling.{key}", value)
    return model


def llama():
    model = Model("llama").set("rope.freq_base", 500000.0).set("rope.dimension_count", 16)
    model.vector("rope_freqs.weight", 8, 3.5, 4.5)
    return model.usual(bias="qkvo", dense=dict(bias=True)).head_of_its_own()


def mixtral():
    return Model("llama", layers=2).set("rope.dimension_count", 16).set("expert_used_count", 2).mixed(4, 96)


def mistral3():
    model = Model("mistral3", say_head=True).set("attention.temperature_scale", 0.3)
    return yarn(model, yarn_beta_fast=16.0, yarn_beta_slow=0.5, yarn_log_multiplier=1.0).usual()


def qwen2():
    return Model("qwen2").set("rope.freq_base", 1000000.0).usual(bias="qkv")


def qwen3():
    return yarn(Model("qwen3", head=32)).usual(norms=(("attn_q_norm", 32), ("attn_k_norm", 32)))


def qwen2moe():
    model = Model("qwen2moe", layers=2, feed_forward=96)
    model.set("expert_used_count", 2).set("expert_feed_forward_length", 32).set("expert_shared_feed_forward_length", 48)
    model.set("expert_count", 6)
    for layer in range(2):
        model.attention(layer, bias="qkv")
        model.experts(layer, 6, 32)
        model.dense(layer, width=48, suffix="_shexp")
        model.vector(f"blk.{layer}.ffn_gate_inp_shexp.weight", 64)
        model.norms(f"blk.{layer}.attn_norm")
        model.norms(f"blk.{layer}.ffn_norm")
    return model.head_of_its_own()


def qwen3moe():
    model = Model("qwen3moe", layers=2, feed_forward=96).set("expert_used_count", 3).set("expert_feed_forward_length", 32)
    return model.mixed(8, 32, norms=HEADS).head_of_its_own()


def seeing(model):
    """Positions of the language part of a model that sees have dimensions, which text does not use."""
    return model.set("rope.dimension_sections", [3, 3, 2, 0])


def qwen3vlmoe():
    model = seeing(Model("qwen3vlmoe", layers=2, feed_forward=96)).set("expert_used_count", 3).set("expert_feed_forward_length", 32)
    return model.mixed(8, 32, norms=HEADS).head_of_its_own()


def ernie4_5_moe():
    model = Model("ernie4_5-moe").set("expert_used_count", 2).set("expert_count", 4).set("expert_feed_forward_length", 32)
    model.set("expert_shared_feed_forward_length", 48).set("leading_dense_block_count", 1).set("interleave_moe_layer_step", 1)
    for layer in range(3):
        model.attention(layer)
        if layer == 0:
            model.dense(layer)
        else:
            model.experts(layer, 4, 32)
            model.dense(layer, width=48, suffix="_shexp")
            model.vector(f"blk.{layer}.exp_probs_b.bias", 4)
        model.norms(f"blk.{layer}.attn_norm")
        model.norms(f"blk.{layer}.ffn_norm")
    return model


def gemma():
    return Model("gemma", head=32, kv_heads=1).usual()


def gemma2():
    model = Model("gemma2", layers=4, head=32).set("attention.sliding_window", 8)
    model.set("attn_logit_softcapping", 5.0).set("final_logit_softcapping", 20.0)
    return model.usual(after=POST)


def gemma3():
    model = Model("gemma3", layers=4, head=32).set("attention.sliding_window", 8).set("attention.sliding_window_pattern", 2)
    model.set("rope.freq_base", 1000000.0).set("rope.scaling.type", "linear").set("rope.scaling.factor", 8.0)
    return model.usual(after=POST, norms=(("attn_q_norm", 32), ("attn_k_norm", 32)))


def phi3(original):
    model = Model("phi3").set("rope.dimension_count", 12).set("rope.scaling.original_context_length", original)
    model.set("rope.scaling.attn_factor", 1.2)
    model.vector("rope_factors_long.weight", 6, 3.5, 4.5)
    model.vector("rope_factors_short.weight", 6, 0.2, 1.2)
    return model.usual(fused=True, dense=dict(fused=True)).head_of_its_own()


def glm4():
    return Model("glm4", say_head=True).set("rope.dimension_count", 8).usual(bias="qkv", after=POST, dense=dict(fused=True))


def glm4moe():
    model = Model("glm4moe", say_head=True).set("rope.dimension_count", 8).set("expert_used_count", 2).set("expert_count", 8)
    model.set("expert_feed_forward_length", 32).set("expert_shared_count", 1).set("leading_dense_block_count", 1)
    model.set("expert_weights_scale", 1.5).set("expert_weights_norm", True).set("expert_gating_func", 2)
    model.set("expert_group_count", 4).set("expert_group_used_count", 2)
    for layer in range(3):
        model.attention(layer, bias="qkv", norms=HEADS)
        if layer == 0:
            model.dense(layer)
        else:
            model.experts(layer, 8, 32)
            model.dense(layer, width=32, suffix="_shexp")
            model.vector(f"blk.{layer}.exp_probs_b.bias", 8)
        model.norms(f"blk.{layer}.attn_norm")
        model.norms(f"blk.{layer}.post_attention_norm")
    return model


def dots1():
    model = Model("dots1", layers=2, kv_heads=4).set("expert_used_count", 2).set("expert_count", 4).set("expert_feed_forward_length", 32)
    model.set("expert_shared_count", 2).set("leading_dense_block_count", 1).set("expert_weights_norm", True).set("expert_gating_func", 2)
    for layer in range(2):
        model.attention(layer, norms=HEADS)
        if layer == 0:
            model.dense(layer)
        else:
            model.experts(layer, 4, 32)
            model.dense(layer, width=64, suffix="_shexp")
            model.vector(f"blk.{layer}.exp_probs_b.bias", 4)
        model.norms(f"blk.{layer}.attn_norm")
        model.norms(f"blk.{layer}.ffn_norm")
    return model.head_of_its_own()


def deepseek2(layers, query_rank):
    """Queries and keys of 24 elements, 8 of which are turned; a short vector of 32."""
    model = Model("deepseek2", layers=layers, hidden=64 if query_rank else 32, kv_heads=1, head=40, feed_forward=96)
    model.metadata = [(key, value) for key, value in model.metadata if not key.endswith(".attention.value_length")]
    model.set("attention.value_length", 32).set("attention.key_length_mla", 24).set("attention.value_length_mla", 16)
    model.set("attention.kv_lora_rank", 32).set("rope.dimension_count", 8)
    model.set("expert_used_count", 2).set("expert_count", 8).set("expert_feed_forward_length", 32).set("expert_shared_count", 1)
    model.set("leading_dense_block_count", layers - 1)
    if query_rank:
        model.set("attention.q_lora_rank", query_rank)
        model.set("attention.temperature_scale", 0.3).set("attention.temperature_length", 10)
        yarn(model, yarn_log_multiplier=0.08).set("expert_weights_scale", 1.5).set("expert_weights_norm", True)
        model.set("expert_gating_func", 2).set("expert_group_count", 4).set("expert_group_used_count", 2)
    for layer in range(layers):
        at, hidden = f"blk.{layer}.", model.hidden
        if query_rank:
            model.matrix(at + "attn_q_a.weight", hidden, query_rank)
            model.norms(at + "attn_q_a_norm", query_rank)
        model.matrix(at + ("attn_q_b" if query_rank else "attn_q") + ".weight", query_rank or hidden, 4 * 24, 2.0)
        model.matrix(at + "attn_kv_a_mqa.weight", hidden, 40, 2.0)
        model.norms(at + "attn_kv_a_norm", 32)
        model.matrix(at + "attn_k_b.weight", 16, 32, 1.0, 4)
        model.matrix(at + "attn_v_b.weight", 32, 16, 1.0, 4)
        model.matrix(at + "attn_output.weight", 64, hidden)
        if layer < layers - 1:
            model.dense(layer)
        else:
            model.experts(layer, 8, 32)
            model.dense(layer, width=32, suffix="_shexp")
            if query_rank:
                model.vector(at + "exp_probs_b.bias", 8)
        model.norms(at + "attn_norm")
        model.norms(at + "ffn_norm")
    return model.head_of_its_own()


def smollm3():
    return Model("smollm3", layers=4).set("rope.freq_base", 5000000.0).usual()


def olmo2():
    model = yarn(Model("olmo2", layers=4)).set("attention.sliding_window", 8).set("attention.sliding_window_pattern", 2)
    return model.usual(before=(), after=POST, norms=WHOLE).head_of_its_own()


def olmoe():
    model = Model("olmoe", layers=2, kv_heads=4, feed_forward=32).set("expert_used_count", 2)
    return model.mixed(4, 32, norms=(("attn_q_norm", 64), ("attn_k_norm", 64))).head_of_its_own()


def exaone4():
    return Model("exaone4").usual(before=(), after=POST, norms=HEADS)


def granite(architecture):
    model = Model(architecture, say_head=True).set("embedding_scale", 3.0).set("residual_scale", 0.4).set("attention.scale", 0.1)
    return model.set("logit_scale", 2.5)


def granitemoe():
    model = granite("granitemoe").set("expert_used_count", 2).set("expert_count", 4).set("expert_shared_feed_forward_length", 48)
    model.feed_forward = 96
    for layer in range(3):
        model.attention(layer)
        model.experts(layer, 4, 96)
        model.dense(layer, width=48, suffix="_shexp")
        model.norms(f"blk.{layer}.attn_norm")
        model.norms(f"blk.{layer}.ffn_norm")
    return model


def minicpm():
    return Model("minicpm", say_head=True).set("embedding_scale", 3.0).set("residual_scale", 0.4).set("logit_scale", 2.5).usual()


def command_r():
    return Model("command-r", norm="layer").set("logit_scale", 0.5).usual(before=("attn_norm",))


def cohere2():
    model = Model("cohere2", layers=4, norm="layer").set("logit_scale", 0.5).set("attention.sliding_window", 8)
    return model.usual(before=("attn_norm",))


def starcoder2():
    return Model("starcoder2", norm="layer+bias").usual(bias="qkvo", dense=dict(gated=False, bias=True))


def gpt_oss():
    model = yarn(Model("gpt-oss", layers=2, head=32, feed_forward=64)).set("attention.sliding_window", 8)
    model.set("expert_used_count", 2).set("expert_feed_forward_length", 64)
    model.mixed(4, 64, before=("attn_norm", "post_attention_norm"), bias=True, kind="MXFP4")
    for layer in range(2):
        for part, length in [("q", 128), ("k", 64), ("v", 64), ("output", 64)]:
            model.vector(f"blk.{layer}.attn_{part}.bias", length)
        model.vector(f"blk.{layer}.attn_sinks.weight", 4, 1.0, 1.0)
    return model.head_of_its_own()


def seed_oss():
    return Model("seed_oss", say_head=True).usual(before=("attn_norm", "post_attention_norm"), bias="qkv")


MODELS = {
    "llama": llama, "mixtral": mixtral, "mistral3": mistral3, "qwen2": qwen2, "qwen3": qwen3, "qwen2moe": qwen2moe, "qwen3moe": qwen3moe,
    "gemma": gemma, "gemma2": gemma2, "gemma3": gemma3, "phi3-long": lambda: phi3(64), "phi3-short": lambda: phi3(4096), "glm4": glm4,
    "glm4moe": glm4moe, "dots1": dots1, "smollm3": smollm3, "olmo2": olmo2, "olmoe": olmoe, "exaone4": exaone4,
    "granite": lambda: granite("granite").usual(), "granitemoe": granitemoe, "minicpm": minicpm, "command-r": command_r, "cohere2": cohere2,
    "starcoder2": starcoder2, "gpt-oss": gpt_oss, "seed_oss": seed_oss,
    "internlm2": lambda: Model("internlm2").usual(bias="qkv").head_of_its_own(),
    "ernie4_5": lambda: Model("ernie4_5").usual(), "exaone": lambda: Model("exaone").usual(),
    "deepseek2": lambda: deepseek2(3, 48), "deepseek2-lite": lambda: deepseek2(27, 0),
    "qwen2vl": lambda: seeing(Model("qwen2vl")).usual(bias="qkv"), "qwen3vl": lambda: seeing(Model("qwen3vl")).usual(norms=HEADS),
    "qwen3vlmoe": qwen3vlmoe, "ernie4_5-moe": ernie4_5_moe, "arcee": lambda: Model("arcee").usual(dense=dict(gated=False)),
}


def build_judge(llama_cpp, folder):
    program = folder / "judge"
    libraries = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/ggml-rpc/libggml-rpc.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a",
                 "vendor/hash/libvendor-hash.a"]
    libraries = [llama_cpp / "build" / name for name in libraries]
    subprocess.run(["g++", "-O1", "-std=c++17", f"-I{llama_cpp}/include", f"-I{llama_cpp}/ggml/include", HERE / "judge.cpp",
                    *[library for library in libraries if library.exists()], "-fopenmp", "-lpthread", "-ldl", "-o", program], check=True)
    return program


def write_file(model, path):
    """The file for llama.cpp: every weight in single precision."""
    writer = GGUFWriter(path, model.architecture)
    writer.add_tokenizer_model("no_vocab")
    for key, value in model.metadata:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for number, (name, shape, kind, size, centre) in enumerate(model.tensors):
        writer.add_tensor(name, elements(number, shape, kind, size, centre))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def described(path):
    """The file's metadata with its types, as the test will write it; without arrays, which tell of pictures only."""
    names = {GGUFValueType.UINT32: "u32", GGUFValueType.FLOAT32: "f32", GGUFValueType.BOOL: "bool", GGUFValueType.STRING: "string"}
    fields = [(key, field) for key, field in GGUFReader(path).fields.items() if not key.startswith(("GGUF.", "tokenizer."))]
    return [[key, names[field.types[0]], field.contents()] for key, field in fields if field.types[0] in names]


def main():
    wanted = sys.argv[2:] or list(MODELS)
    tokens = [int(token) for token in np.random.default_rng(11).integers(0, VOCABULARY, TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        judge = build_judge(pathlib.Path(sys.argv[1]), folder)
        for name in wanted:
            model = MODELS[name]()
            path, out = folder / "model.gguf", folder / "logits"
            write_file(model, path)
            both = {}
            for precision in ("single", "half"):
                subprocess.run([judge, path, str(CONTEXT), precision, out, *map(str, tokens)], check=True)
                both[precision] = np.fromfile(out, np.float32).reshape(TOKENS, VOCABULARY)
            logits = both["single"]
            assert np.isfinite(logits).all()
            rounding = float(np.sqrt(np.square(both["half"] - logits).mean() / np.square(logits).mean()))
            about = {
                "metadata": described(path), "tensors": model.tensors, "context": CONTEXT, "tokens": tokens, "rounding": float(f"{rounding:.2g}"), "rows": ROWS,
                "logits": [[float(f"{logit:.6g}") for logit in logits[row]] for row in ROWS],
            }
            text = json.dumps(about, separators=(",", ":")).replace('],["', '],\n["').replace('"logits":', '\n"logits":')
            (HERE / f"{name}.json").write_text(text + "\n")
            print(name, len(text), f"bytes, rounding {rounding:.1e}, deviation", logits.std().round(2), "differ", np.abs(np.diff(logits, axis=0)).mean().round(2))


main()
