#!/usr/bin/env python3
"""Makes quant_golden.bin: random blocks of each type with the numbers that they stand for, by ggml's own `gguf` package.

    pip install gguf numpy
    python3 make_quant_golden.py

The file holds records, all little-endian: the type's number (u32), 0 for unpacking or 1 for packing (u32), length of the
blocks in bytes (u32), count of numbers (u32), the blocks, the numbers as f32. Unpacking records hold random blocks with
finite scales and what `gguf.quants.dequantize` makes of them; packing records hold random numbers and what
`gguf.quants.quantize` makes of them.

A record with 2 instead stands for very many random blocks, so that every entry of the grids occurs: number of blocks (u32), 8, the
number of bytes in a block that are masked with 0xbf (u32), those bytes' places (u32 each), and FNV-1a of 64 bits over the numbers' bits,
with zeros of both signs as zero. Byte `i` of the blocks is byte `i % 8` of `splitmix64(i / 8)`.
"""

import pathlib
import struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

BLOCKS = 12
# Where the half-precision scales lie in a block. Other bytes may hold anything.
SCALES = {
    T.F16: [0], T.BF16: [], T.F32: [], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}
# Types of few levels. A byte that is masked keeps a scale's exponent small.
LEVELS = {
    T.Q3_K: [109], T.TQ1_0: [53], T.TQ2_0: [65], T.MXFP4: [0], T.IQ4_NL: [1], T.IQ4_XS: [1], T.IQ1_S: [1], T.IQ1_M: [55], T.IQ2_XXS: [1],
    T.IQ2_XS: [1], T.IQ2_S: [1], T.IQ3_XXS: [1], T.IQ3_S: [1],
}
MANY = 1000
random = np.random.default_rng(20_240_607)


def scale():
    """A finite half of any size and sign, small ones and zero too."""
    exponent = random.integers(-24, 12)
    return np.float16(random.choice([-1, 1]) * random.random() * 2.0 ** exponent)


def blocks_of(kind):
    length, size = GGML_QUANT_SIZES[kind]
    count = BLOCKS if length > 32 else BLOCKS * 2
    if kind in (T.F32, T.BF16):
        count = 64
        values = random.standard_normal(count).astype(np.float32) * np.float32(10.0) ** random.integers(-30, 30, count).astype(np.float32)
        bits = values.view(np.uint32)
        return bits.view(np.uint8).reshape(count, 4) if kind == T.F32 else (bits >> 16).astype(np.uint16).view(np.uint8).reshape(count, 2)
    if kind == T.F16:
        count = 64
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for block in blocks:
        for at in SCALES[kind]:
            block[at:at + 2] = np.frombuffer(scale().tobytes(), np.uint8)
    return blocks


def record(kind, packing, blocks, numbers):
    blocks = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)
    numbers = np.ascontiguousarray(numbers, dtype=np.float32).reshape(-1)
    assert np.isfinite(numbers).all()
    return struct.pack("<4I", int(kind), packing, blocks.size, numbers.size) + blocks.tobytes() + numbers.tobytes()


out = b""
for kind in SCALES:
    blocks = blocks_of(kind)
    out += record(kind, 0, blocks, dequantize(blocks.reshape(1, -1), kind))
for kind in (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1):
    numbers = (random.standard_normal((1, 32 * BLOCKS)) * 0.3).astype(np.float32)
    numbers[0, :32] = 0.0
    numbers[0, 32:64] = 0.25
    out += record(kind, 1, quantize(numbers, kind), numbers)


def stream(count):
    """The first bytes of splitmix64 over 0, 1, 2, …"""
    x = np.arange(-(-count // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.uint8)[:count].copy()


def fnv(numbers):
    code = 0xCBF29CE484222325
    for byte in (numbers.astype(np.float32) + np.float32(0.0)).tobytes():
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return code


for kind, masked in LEVELS.items():
    length, size = GGML_QUANT_SIZES[kind]
    blocks = stream(MANY * size).reshape(MANY, size)
    blocks[:, masked] &= 0xBF
    numbers = dequantize(blocks.reshape(1, -1), kind)
    out += record(kind, 0, blocks[:2], numbers.reshape(MANY, length)[:2])
    out += struct.pack("<4I", int(kind), 2, MANY, 8) + struct.pack(f"<{1 + len(masked)}I", len(masked), *masked)
    out += struct.pack("<Q", fnv(numbers))
pathlib.Path(__file__).with_name("quant_golden.bin").write_bytes(out)
print(len(out), "bytes")
