#!/usr/bin/env python3
"""Renders chat templates as Hugging Face's library does, for a comparison.

    render.py FOLDER OUT.json

FOLDER holds templates, `*.jinja`; OUT.json gets, for each template and conversation of conversations.json, the text or
the exception. Needs jinja2 from PyPI.
"""

import datetime
import json
import sys
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent
MOMENT = datetime.datetime(2024, 2, 29, 12, 34, 56, tzinfo=datetime.timezone.utc)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what training looks at; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(text):
    raise jinja2.exceptions.TemplateError(text)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = MOMENT.strftime
    return env


def main(folder, out):
    conversations = json.loads((HERE / "conversations.json").read_text())
    result = {}
    for path in sorted(Path(folder).glob("*.jinja")):
        texts = []
        for conversation in conversations:
            try:
                template = environment().from_string(path.read_text())
                texts.append({"text": template.render(**{"tools": None, **conversation, "bos_token": "<s>", "eos_token": "</s>"})})
            except Exception as error:  # The template's own, whatever they are.
                texts.append({"error": str(error)})
        result[path.name] = texts
    Path(out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
