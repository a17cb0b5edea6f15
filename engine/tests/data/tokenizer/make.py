#!/usr/bin/env python3
"""Makes the tokenizer test data: strings, the ids that llama.cpp gives for them, and weights-free model files.

    make.py strings                                   writes strings.json
    make.py ids OUT.json MODEL.gguf LLAMA_IDS         writes the ids with llama_ids.cpp, built against llama.cpp
    make.py fuzz OUT.json SEED                        writes many random strings; `ids` takes that file as a fourth argument
    make.py vocabulary NAME MODEL.gguf                writes NAME.gguf.zip: the file's metadata without its tensors

Each list of ids has one entry per string. `special` is with control tokens in the text meant as such, `plain` without.
Needs Python 3.10 or later and nothing else.
"""

import json
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent

WORDS = [
    # Plain English, contractions, case.
    "", "a", "A", " ", "hello", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "THE QUICK BROWN FOX",
    "I'm sure it's what they've said; we'll see, he'd say, you're right, don't.", "I'M SURE IT'S WHAT THEY'VE SAID: DON'T",
    "O'Brien's 'quoted' \"double\" `tick` ''twice''", "rock 'n' roll, 'tis the '90s", "camelCaseWord PascalCaseWord snake_case_word kebab-case-word",
    "antidisestablishmentarianism", "supercalifragilisticexpialidocious", "Mr. Smith, Ph.D., went to Washington D.C. on Jan. 3rd.",
    "Wait... what?! No -- really?? Yes!!!", "(parentheses) [brackets] {braces} <angles>", "e.g. i.e. etc. vs. et al.", "co-operate re-enter naïve façade",
    "a b c d e f g", "x" * 50, "aaaaaaaaaabbbbbbbbbb", "abababababababababab", " leading", "trailing ", " both ", "  two leading", "trailing two  ",
    # Whitespace of all kinds.
    "  ", "   ", "    ", "     ", "        ", " " * 15, " " * 16, " " * 17, " " * 31, " " * 32, " " * 33, " " * 64, " " * 100, "\t", "\t\t", "\t\t\t\t", "\n", "\n\n",
    "\n\n\n", "\n" * 10, "\n" * 31, "\n" * 32, "\n" * 65, "\r", "\r\n", "\r\n\r\n", "\n\r", "\r\r\n", " \n", "\n ", " \n ", "\n \n", "\t\n", "\n\t", " \t \t ", "\t \t",
    "a\tb", "a\t\tb", "a\nb", "a\n\nb", "a\n\n\nb", "a\r\nb", "a\r\n\r\nb", "a \n b", "a  \n  b", "a\n  b\n    c\n", "a  b   c    d     e", "a\n\n\n\n\n\n  b",
    "\u00a0", "a\u00a0b", "\u2003em\u2003space", "\u3000全角\u3000空格", "zero\u200bwidth\u200bspace", "\u2028line\u2029paragraph", "\u0085next\u0085line", "thin\u2009\u200a\u202fspaces",
    "\u1680ogham\u1680", "\u205fmath\u205fspace", "\ufeffbyte order mark", "word\u2060joiner", "\x0b\x0c vertical form", " \u00a0 \u00a0 ", "end of text   ", "\n   \n   \n   ",
    "   a", "      a", "\t\ta", "   \ta", "\t   a", "a   \n", "a\t\n\t", "  .  ,  ;  ", " 1  2   3    4",
    # Numbers.
    "0", "1", "12", "123", "1234", "12345", "1234567890", "3.14159265358979", "1,234,567.89", "-42", "+1 (555) 123-4567", "1e-10", "6.022e23", "0x1F4A9", "0b101010", "0o755", "50%", "$19.99",
    "€1.234,56", "£5", "¥1000", "2024-02-29T12:34:56Z", "12:34", "1/2", "½ ⅓ ¼", "①②③", "Ⅳ Ⅻ", "x²+y³=z⁴", "H₂O", "٠١٢٣٤٥٦٧٨٩", "०१२३४५", "一二三四五六七八九十", "1st 2nd 3rd 4th", "v1.2.3-rc.4+build.5", "192.168.0.1", "2001:db8::ff00:42:8329",
    "a1b2c3", "1a2b3c", "9" * 40, "0.1+0.2=0.30000000000000004", "100000000000000000000", "1 000 000",
    # URLs, mail, paths, markup.
    "https://example.com/path/to/page?query=1&other=two#fragment", "http://user:pass@host:8080/~home/%20space", "someone@example.org", "/usr/local/bin:/usr/bin", "C:\\Users\\Name\\file.txt", "../../etc/hosts",
    "<html><body><h1>Title</h1><p class=\"x\">Text &amp; more</p></body></html>", "<table><tr><td>1</td></tr></table>", "<b>bold</b><i>it</i><code>x</code><blockquote>", "</h6></strong><sub>2</sub>", "# Heading\n\n- item\n- *item*\n  1. one\n\n> quote\n\n```rust\nfn main() {}\n```\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n", "{\"key\": [1, 2.5, null, true], \"ключ\": \"значение\"}", "key: value\n- list\n  - nested: 'x'\n", "a,b,c\n1,2,3\n\"x,y\",z,\"\"\n", "\\frac{1}{2}\\sum_{i=0}^{n} x_i^2 \\leq \\infty", "$E = mc^2$", "@user #hashtag", "git commit -m \"fix: it\" && git push",
    # Code.
    "def f(x):\n    return x ** 2\n\n\nif __name__ == '__main__':\n    print(f(3))\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n", "fn main() -> Result<(), Box<dyn Error>> {\n    let x: Vec<_> = (0..10).map(|i| i * 2).collect();\n    println!(\"{x:?}\");\n    Ok(())\n}\n",
    "const f = async (x) => { await g(x); return `${x}`; };", "SELECT a.*, COUNT(*) FROM t AS a WHERE b <> 'x' GROUP BY 1 HAVING COUNT(*) > 2;", "#include <stdio.h>\nint main(void) { return 0; }", "public static void main(String[] args) { System.out.println(\"hi\"); }", "x = a[1:-1] if not b else {**c, 'd': [*e]}",
    "#!/bin/sh\nset -eu\nfor f in *.txt; do echo \"$f\"; done", "let x = 1;;\n//comment\n/* block\n * comment\n */", "if(a&&b||!c){d<<=1;e>>>=2;f^=~g;}", "0==1?true:false", "a->b->c::d::e", "lambda x: (yield)", "\t\tif x:\n\t\t\tpass\n", "        deeply indented\n            deeper\n", "}}}}\n}}\n}", "((((()))))", "==========", "----------------", "****************", "################", "________________", "................", "!!!!!!!!!!", "??????", "~~~~~~", "<<<<<<< HEAD\n=======\n>>>>>>> branch",
    "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"x\")\n}\n", "(defun f (x) (* x x))", "main = putStrLn $ show $ foldr (+) 0 [1..10]", "<?php echo $x['y']; ?>", "%macro foo 1\n mov eax, [ebx+4*ecx]\n", "^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\\.[A-Z]{2,}$", "s/\\(a\\|b\\)*/x/g",
    # Languages.
    "Größe, Straße, Übung, ÄÖÜ", "Été, garçon, œuvre, où, ça, l'homme, aujourd'hui", "¿Qué? ¡Año nuevo, señor!", "Ação, coração, não", "Ηλέκτρα και Οιδίπους", "ΑΒΓΔ αβγδ ςσ", "Привет, как дела? Это тест.", "ПРОПИСНЫЕ строчные", "Українська ї є ґ", "Zażółć gęślą jaźń", "Příliš žluťoučký kůň", "Árvíztűrő tükörfúrógép", "İstanbul'da ığüşöç", "Tiếng Việt: đường phố Hà Nội",
    "שלום עולם", "שָׁלוֹם", "السلام عليكم ورحمة الله", "مَرْحَبًا بِالعَالَم", "سلام دنیا، خوبی؟", "اردو زبان", "हिन्दी में लिखा हुआ", "क्षत्रिय ज्ञान", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు భాష", "ಕನ್ನಡ", "മലയാളം", "ગુજરાતી ਪੰਜਾਬੀ", "සිංහල", "ภาษาไทยไม่มีช่องว่าง", "ที่นี่ น้ำ ก็", "ພາສາລາວ", "ភាសាខ្មែរ", "မြန်မာဘာသာ", "བོད་སྐད་", "ქართული ენა", "Հայերեն լեզու", "አማርኛ ቋንቋ", "Монгол хэл", "ᠮᠣᠩᠭᠣᠯ", "ᏣᎳᎩ", "ᓄᓇᕗᑦ",
    "你好，世界！", "中文没有空格但是有标点符号。", "繁體中文測試", "日本語のテキストです。", "カタカナとひらがなと漢字", "ｶﾀｶﾅ ＡＢＣ１２３", "한국어 문장입니다.", "ᄒᆞᆫ글", "中英mixed文本with英文words", "東京Tokyo東京", "「引用」『二重』【括弧】", "々〆〇〻", "𠀀𠮷𪚥", "注音ㄅㄆㄇ", "粵語：佢哋喺度", "Ελληνικά и русский και English mixed",
    "Hawaiʻi ʻokina", "Yorùbá èdè", "Igbo ụlọ", "Kiswahili ng'ombe", "Māori whānau", "Íslenska þ ð æ", "Gàidhlig", "Esperanto ĉ ĝ ĥ ĵ ŝ ŭ", "ℵ ℏ ℝ ∀∃∅∈∑∏√∞≈≠≤≥", "→←↑↓⇒⇔↦", "┌─┐│└┘█▓▒░", "♠♥♦♣ ♪♫", "™®©§¶†‡•…‰", "“curly” ‘quotes’ «guillemets» „low“", "en–dash em—dash ― horizontal", "ﬁ ﬂ ligatures ﷽",
    # Combining marks, emoji.
    "e\u0301 e\u0300 n\u0303 u\u0308", "a\u0300\u0301\u0302\u0303\u0304\u0305", "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA\u036b\u0357\u0334\u0362\u0335\u031c\u0330\u0354L", "\u0301", "\u0301\u0301a", "a\u20dd 1\ufe0f\u20e3", "😀", "😀😃😄😁", "👍🏽 👋🏿", "👨‍👩‍👧‍👦", "🏳️‍🌈 🏴‍☠️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇩🇪🇫🇷🇯🇵", "❤️ ❤ ☺️", "👩🏻‍🚀👨🏾‍💻", "text😀text 😀 text", "😀 😀  😀", "🤷‍♀️ ¯\\_(ツ)_/¯", "(╯°□°)╯︵ ┻━┻", "ʕ•ᴥ•ʔ", "🧑‍🤝‍🧑🫱🏼‍🫲🏿", "🎉" * 30,
    # Control and unusual characters.
    "\x00", "a\x00b", "\x01\x02\x03", "\x1b[31mred\x1b[0m", "\x7f", "bell\x07", "\x08backspace", "\ufffd", "\ufffe\uffff", "\U0010ffff", "\U000f0000private", "\ue000private", "\u202eright to left\u202c", "\u200e\u200f", "soft\u00adhyphen", "\x80\x81\x9f", "▁", "▁▁a▁b", "a▁ ▁b", "Ġ Ċ ĉ", "Ġhello", "ÃÂ mojibake â€™", "<0x0A>", "<0xFF><0x00>", "\u0378\u0379 unassigned",
    # Special tokens in the text.
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>", "<|im_end|><|im_end|>", "text<|endoftext|>text", " <|im_start|> ", "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<repo_name>x<reponame>y<file_sep>z", "<|im_start", "<|im_start|", "|im_start|>", "<<|im_start|>>", "<|im_end|>\n\n\n<|im_end|>", "<bos>text<eos>", "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n", "<start_of_turn>", "<unused0><unused99><unused100>", "<unused6241><unused6242>", "<pad><unk><mask>", "<s>text</s>", "[INST] x [/INST]", "<bos><bos>", "<start_of_image><end_of_image>", "[multimodal]", "<eos>\n<eos>", "\n<bos> \n", "<end_of_turn>  \n\n  <start_of_turn>", "<h1>  <h2>\t<h3>\n</h1>", "<gh_stars>1<issue_start>", "<jupyter_code>x = 1<jupyter_output>", "a <bos> b", "<BOS><Eos>", "<empty_output>",
    # Long and repeated.
    "a" * 2000, " " * 3000, "\n" * 500, "ab " * 500, "日" * 400, "1" * 300, "é" * 300, "\t" * 100, "lorem ipsum dolor sit amet, " * 40, " a" * 300, "a\n" * 200, "!" * 500, "=" * 257, "ha" * 333, " \n" * 100, "  x" * 100, "   " + "x   " * 50,
]


RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A), (0x905, 0x939), (0xE01, 0xE3A),
    (0x3041, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F600, 0x1F64F), (0x2000, 0x206F), (0x300, 0x36F), (0x09, 0x0D),
]
SPACES = ["", "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "     "]


def mixtures(rng, times):
    """Mixtures of the list's parts and of random characters: 90 for each of `times`."""
    short = [word for word in WORDS if 0 < len(word) < 40]
    mixed = []
    for _ in range(40 * times):
        mixed.append("".join(rng.choice(short) + rng.choice(SPACES) for _ in range(rng.randint(2, 12))))
    for _ in range(40 * times):
        characters = []
        for _ in range(rng.randint(1, 60)):
            low, high = rng.choice(RANGES)
            characters.extend(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4)))
            characters.append(rng.choice(SPACES))
        mixed.append("".join(characters))
    # Mostly characters that no vocabulary has.
    for _ in range(10 * times):
        mixed.append("".join(chr(rng.choice([rng.randint(0x20, 0xD7FF), rng.randint(0x10000, 0x1F000)])) for _ in range(30)))
    return mixed


def strings():
    """The list above and mixtures, always the same."""
    return list(dict.fromkeys(WORDS + mixtures(random.Random(20240229), 1)))


def write_json(path, value):
    """One entry a line, so that changes can be read."""
    lines = []
    for key, entry in value.items():
        if isinstance(entry, list):
            inner = ",\n".join(json.dumps(item, separators=(",", ":")) for item in entry)
            lines.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(entry)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_ids(out_path, model, binary, strings_path=HERE / "strings.json"):
    texts = json.loads(Path(strings_path).read_text())["strings"]
    stdin = b""
    for text in texts:
        data = text.encode("utf-8")
        stdin += b"%d\n%b\n" % (len(data), data)
    out = subprocess.run([binary, model], input=stdin, check=True, stdout=subprocess.PIPE).stdout
    lines = [[int(word) for word in line.split()] for line in out.decode().split("\n")[:-1]]
    assert len(lines) == 2 * len(texts)
    write_json(Path(out_path), {"model": Path(model).name, "special": lines[0::2], "plain": lines[1::2]})


def metadata_end(data):
    """Where the key-value pairs of a GGUF file end, and how many there are."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 24

    def read(form):
        nonlocal at
        value = struct.unpack_from("<" + form, data, at)[0]
        at += struct.calcsize("<" + form)
        return value

    def skip_string():
        nonlocal at
        length = read("Q")
        at += length

    def skip_value(kind):
        nonlocal at
        if kind == 8:
            skip_string()
        elif kind == 9:
            inner, count = read("I"), read("Q")
            if inner in sizes:
                at += sizes[inner] * count
            else:
                for _ in range(count):
                    skip_value(inner)
        else:
            at += sizes[kind]

    count = struct.unpack_from("<Q", data, 16)[0]
    for _ in range(count):
        skip_string()
        skip_value(read("I"))
    return at


def write_vocabulary(name, model):
    data = Path(model).read_bytes()
    assert data[:4] == b"GGUF"
    head = bytearray(data[: metadata_end(data)])
    # No tensors.
    struct.pack_into("<Q", head, 8, 0)
    info = zipfile.ZipInfo(f"{name}.gguf", (1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(HERE / f"{name}.gguf.zip", "w") as archive:
        archive.writestr(info, bytes(head), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["strings"]:
            write_json(HERE / "strings.json", {"strings": strings()})
        case ["ids", out, model, binary, *rest]:
            write_ids(out, model, binary, *rest)
        case ["fuzz", out, seed]:
            write_json(Path(out), {"strings": mixtures(random.Random(int(seed)), 20)})
        case ["vocabulary", name, model]:
            write_vocabulary(name, model)
        case _:
            sys.exit(__doc__)
