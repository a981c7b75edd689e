"""Chat templates of strangers: what renders them holds out against these, and nothing else renders any.

A template is a program. Those of ``HOSTILE`` run a command, read a file, never end or fill all memory wherever they are
rendered without bounds: by a plain ``jinja2.Environment`` each does what it says.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from longctx.chat.template import render_chat
from longctx.conversion import export_checkpoint, import_hf
from longctx.errors import LongCtxError
from longctx.tokenizer import load_tokenizer
from tests.bounded import refusal, within_bounds
from tests.helpers import REPOSITORY
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_model

RENDERER = "longctx/chat/template_worker.py"
"""The only program that may ever render one."""
OWN_PAGES = "launcher/report/html.py"
"""Renders the report, whose templates are this project's own."""
PACKAGES = ("data_pipeline", "launcher", "longctx", "parallel")
MESSAGES = [{"role": "user", "content": "How long?"}, {"role": "assistant", "content": "10M tokens."}]

HOSTILE = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute filter": "{{ messages|attr('__class__')|attr('__base__') }}",
    "item": "{{ messages['__class__'] }}{{ messages['append'].__self__ }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "shift": "{{ (1).__lshift__(10 ** 12) }}",
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated list": "{{ ([0] * 10 ** 10)|length }}",
    "padded text": "{{ '%09999999999d' % 1 }}",
    "centred text": "{{ 'x'.center(10 ** 10) }}{{ 'x'.ljust(10 ** 10) }}{{ 'x'|center(10 ** 10) }}",
    "doubled text": "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "replaced text": "{{ ('x' * 99999).replace('x', 'y' * 99999).replace('y', 'z' * 99999) }}",
    "words of lorem": "{{ lipsum(n=10 ** 7) }}",
    "changed messages": "{{ messages.append(messages[0]) }}{{ messages.clear() }}",
    "no template": "{% for message in messages %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


def test_no_door_renders_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In, out, and into a tokenizer: each comes along byte for byte, and none is run."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "hf", tokenizer_json())
    named = model / "additional_chat_templates"
    named.mkdir()
    for name, text in HOSTILE.items():
        (named / f"{name.replace(' ', '_')}.jinja").write_text(text)
    (model / "chat_template.jinja").write_text("\n".join(HOSTILE.values()))
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"chat_template": HOSTILE["globals"] + HOSTILE["loops"]}))
    with within_bounds():
        import_hf(model, tmp_path / "in", verify="none")
        export_checkpoint(tmp_path / "in", tmp_path / "out", verify="none")
        tokenizer = load_tokenizer(tmp_path / "out")
        assert tokenizer.decode(tokenizer.encode("def main")) == "def main"
    for one in named.iterdir():
        assert (tmp_path / "out" / named.name / one.name).read_bytes() == one.read_bytes()
    assert not (tmp_path / "MARK").exists()


def test_one_module_alone_may_render_them():
    """Nobody else imports Jinja, or calls the function by which transformers renders."""
    allowed = {OWN_PAGES, RENDERER}
    strange = []
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            name = path.relative_to(REPOSITORY).as_posix()
            if name not in allowed and _renders(ast.parse(path.read_text())):
                strange.append(name)
    assert not strange, f"render chat templates by {RENDERER}"


def _renders(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(one.name.split(".")[0] == "jinja2" for one in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jinja2":
            return True
        # Those of the class that lm-eval calls are refused in it.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            if node.func.attr == "apply_chat_template" and not is_own:
                return True
    return False


@pytest.mark.few(3)
@pytest.mark.parametrize("name", list(HOSTILE))
def test_what_renders_them_holds_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    messages = json.loads(json.dumps(MESSAGES))
    refusal(lambda: render_chat(HOSTILE[name], messages))
    assert messages == MESSAGES
    assert not (tmp_path / "MARK").exists()
    with pytest.raises(LongCtxError):
        render_chat(HOSTILE[name], [])
