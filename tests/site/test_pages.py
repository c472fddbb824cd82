"""Templates print text from files as text: whatever has not been marked as Markdown is escaped."""

from __future__ import annotations

import re

from playbook.paths import data_root
from playbook_app.site.pages import markdown, render, render_plain
from playbook_app.site.reference import CommandHelp

HOSTILE = "<script>alert(1)</script> [x](javascript:1) | `a` ::: {{ 1 }} ![i](http://x) **b** # h"


def test_what_a_command_says_becomes_no_markup() -> None:
    page = render("commands.md", commands=[CommandHelp(HOSTILE, HOSTILE, "playbook x", [(HOSTILE, HOSTILE)])])
    assert "<script" not in page
    assert "](javascript:" not in page
    assert "**b**" not in page
    assert "| `a`" not in page
    assert "{{" not in page


def test_only_marked_text_is_markup() -> None:
    def shown(name: object) -> str:
        return render("phases.md", phases=[(name, [])])

    assert "<b>" not in shown("<b>")
    assert "<b>" in shown(markdown("<b>"))


def test_plain_text_stays_as_it_is_on_one_line() -> None:
    page = render_plain("llms.txt", summary="a *b*\n\n# c <d>", reading="r", cards=[], stands={}, guides=[], root="")
    assert "> a *b* # c <d>\n" in page


def test_no_template_switches_escaping_off() -> None:
    for path in (data_root("cards").parent / "app/playbook_app/site/templates").glob("*.j2"):
        content = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape", content), path.name
