#!/usr/bin/env python3
"""Computes the golden values of docs/wire.md: handshake, keys and encrypted records.

An implementation of its own: BLAKE3 written out from its specification (https://github.com/BLAKE3-team/BLAKE3-specs, inputs of one
chunk), the ciphers from the package `cryptography` (OpenSSL's). `python3 wire.py > wire.txt`; the tests read wire.txt.
"""

import struct
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
CHUNK_START, CHUNK_END, ROOT, KEYED, CONTEXT, MATERIAL = 1, 2, 8, 16, 32, 64
MASK = 0xFFFFFFFF


def compress(chaining, words, length, flags):
    v = chaining + IV[:4] + [0, 0, length, flags]

    def g(a, b, c, d, x, y):
        for first, second, message in ((16, 12, x), (8, 7, y)):
            v[a] = (v[a] + v[b] + message) & MASK
            v[d] ^= v[a]
            v[d] = (v[d] >> first | v[d] << (32 - first)) & MASK
            v[c] = (v[c] + v[d]) & MASK
            v[b] ^= v[c]
            v[b] = (v[b] >> second | v[b] << (32 - second)) & MASK

    for _ in range(7):
        for i in range(4):
            g(i, 4 + i, 8 + i, 12 + i, words[2 * i], words[2 * i + 1])
        for i in range(4):
            g(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[8 + 2 * i], words[9 + 2 * i])
        words = [words[PERMUTATION[i]] for i in range(16)]
    return [v[i] ^ v[i + 8] for i in range(8)]


def blake3(data, key=IV, flags=0):
    assert len(data) <= 1024
    blocks = [data[at : at + 64] for at in range(0, len(data), 64)] or [b""]
    chaining = list(key)
    for i, block in enumerate(blocks):
        mode = flags | (CHUNK_START if i == 0 else 0) | (CHUNK_END | ROOT if i + 1 == len(blocks) else 0)
        chaining = compress(chaining, list(struct.unpack("<16I", block.ljust(64, b"\0"))), len(block), mode)
    return struct.pack("<8I", *chaining)


def words(key):
    return list(struct.unpack("<8I", key))


def keyed(key, data):
    return blake3(data, words(key), KEYED)


def derive(context, material):
    return blake3(material, words(blake3(context.encode(), flags=CONTEXT)), MATERIAL)


# The first test vectors of BLAKE3 itself.
assert blake3(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
assert blake3(b"\0").hex() == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


def say(name, value):
    print(name, value.hex())


V2 = "shoal 2026 tensor link v2: "
ticket_id = 0x0F0E0D0C0B0A09080706050403020100
secret = bytes(range(0x40, 0x60))
hello = b"shoalTL2" + ticket_id.to_bytes(16, "little") + bytes([0xAA]) * 32 + struct.pack("<I", 4160) + bytes([1, 2, 0, 0])
challenge = bytes([0xBB]) * 32
proof = keyed(derive(V2 + "dialler's proof", secret), hello + challenge)
said = hello + challenge + proof
verdict_head = bytes([1, 4, 2, 0]) + struct.pack("<I", 8256)
verdict = verdict_head + keyed(derive(V2 + "acceptor's proof", secret), said + verdict_head)
for name, value in (("hello", hello), ("challenge", challenge), ("proof", proof), ("verdict", verdict)):
    say(name, value)


def session(purpose):
    return keyed(derive(V2 + purpose, secret), said)


further = session("further rails")
for rail in (1, 2):
    say(f"rail_{rail}_id", keyed(further, b"i" + bytes([rail]))[:16])
    say(f"rail_{rail}_secret", keyed(further, b"s" + bytes([rail])))
addresses = b"".join(bytes(10) + b"\xff\xff" + bytes([10, 0, rail, 1]) + struct.pack("<H", 4000) for rail in (1, 2))
say("list", addresses + keyed(further, b"l" + addresses))

for cipher, name in ((AESGCM, "aes"), (ChaCha20Poly1305, "chacha")):
    chain = session("dialler's records")
    for generation in range(2):
        key = derive(V2 + "record key", chain)
        for counter in range(2):
            prefix = struct.pack("<IBBBB", 5, 1, 0, 0, 0)
            nonce = bytes(4) + struct.pack("<Q", counter)
            say(f"{name}_{generation}_{counter}", prefix + cipher(key).encrypt(nonce, b"hello", prefix))
        chain = derive(V2 + "next secret", chain)
