"""The check of names finds what it is for: planted placeholders and long functions without a docstring."""

from __future__ import annotations

import names
import pytest

SOUND = "\n".join(f"size_{i} = {i}" for i in range(200))
PLANTED = {
    "assignment": "found = 1\nkept = 2\nheld = 3\nsaid = 4",
    "argument": "def f(found, *, own, **rest): return lambda told: told",
    "loop": "for found in (): [made for made in ()]\nwith open('f') as given: pass\nif here := 1: pass",
}
LONG = "def long():\n" + "    print()\n" * 14


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_placeholders_are_found(kind: str) -> None:
    (message,) = names.faults([names.read(SOUND, "a.py"), names.read(PLANTED[kind], "b.py")])
    assert message.startswith("2.0% of 20")


def test_sound_names_and_few_placeholders_pass() -> None:
    assert names.faults([names.read(SOUND, "a.py"), names.read("found = self = _ = 1", "b.py")]) == []


@pytest.mark.parametrize(("source", "expected"), [(LONG, ["long"]), (LONG.replace("print()", '"""Prints."""', 1), []), (LONG[:-12], [])])
def test_a_long_function_without_a_docstring_is_found(source: str, expected: list[str]) -> None:
    assert [name for name, _ in names.read(source, "a.py").undocumented] == expected


def test_the_command_ends_with_a_code_and_names_places(tmp_path, capsys) -> None:
    (tmp_path / "a.py").write_text("found = 1\n")
    assert names.main([str(tmp_path), "--list"]) == 1
    shown = capsys.readouterr()
    assert "a.py:1: found" in shown.out
    assert "100.0% of 1 bindings" in shown.err
    (tmp_path / "a.py").write_text("card = 1\n")
    assert names.main([str(tmp_path)]) == 0
