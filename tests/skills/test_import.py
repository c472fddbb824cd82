"""`playbook skills report`: what it says about skill folders of others, and what it never repeats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from playbook.errors import PlaybookError
from playbook.skills.foreign import RULES, read_folder, summary
from playbook_app.cli.app import main

FIXTURES = Path(__file__).parent.parent / "fixtures" / "skills"
EXPECTED = [
    ("SKILL.md", 2, "import-front-matter", "differs from its folder 'crooked-card'"),
    ("SKILL.md", 4, "import-front-matter", "field 'when_to_use' does not exist"),
    ("SKILL.md", 5, "import-front-matter", "allowed-tools is no text"),
    ("SKILL.md", 11, "import-link", "'references/gone.md' leads nowhere"),
    ("SKILL.md", 11, "import-link", "'../../../etc/passwd' leads out of the skill's folder"),
    ("card.yaml", 3, "import-layout", "ep 64 x etp 1 x pp 8 = 512"),
    ("card.yaml", 6, "import-number", "'~370'"),
    ("card.yaml", 7, "import-label", "'up_proj'; write mla_up_proj"),
    ("card.yaml", 7, "import-label", "'norm'; write layernorm"),
    ("card.yaml", 8, "import-layout", "edp is 2, but 256 GPUs leave 1; expected 1"),
    ("card.yaml", 10, "import-layout", "10 ranks do not divide into tp 2 x pp 2"),
    ("card.yaml", 10, "import-layout", "10 ranks do not divide into ep 4"),
    ("card.yaml", 10, "import-label", "does not know 'whole'"),
    ("card.yaml", 11, "import-layout", "ep 64 x etp 1 x pp 16 = 1024"),
]


def test_a_sound_skill_has_no_findings():
    skills, findings = read_folder(FIXTURES / "fit-a-model")
    assert findings == []
    row = summary(skills[0])
    assert (row["skill"], row["layouts"], row["labels"], row["links"]) == ("fit-a-model", 2, 1, 1)
    assert row["front_matter"] == ["name", "description", "license", "metadata"]


@pytest.mark.parametrize(("file", "line", "rule", "says"), EXPECTED)
def test_what_is_wrong_is_found_at_its_place(file, line, rule, says):
    _, findings = read_folder(FIXTURES / "crooked-card")
    assert any(Path(f.file).name == file and f.line == line and f.rule == rule and says in f.message for f in findings)


def test_nothing_else_is_found():
    assert len(read_folder(FIXTURES / "crooked-card")[1]) == len(EXPECTED)


def test_no_prose_is_repeated(capsys):
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as e:
            main(["skills", "report", str(FIXTURES), *options])
        assert e.value.code == 2
        out = capsys.readouterr()
        assert "secret" not in (out.out + out.err).lower()


def test_the_report_is_one_json_document(capsys):
    with pytest.raises(SystemExit):
        main(["skills", "report", str(FIXTURES), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [s["skill"] for s in report["skills"]] == ["crooked-card", "fit-a-model", "no-front-matter"]
    assert {f["rule"] for f in report["findings"]} <= {i for i, _ in RULES}


def skill(folder, body="# It\n", name=None):
    folder.mkdir()
    text = f"---\nname: {name or folder.name}\ndescription: Says what it is for. Use in tests.\n---\n{body}"
    (folder / "SKILL.md").write_text(text, encoding="utf-8")
    return folder


def rules_of(folder):
    return [f.rule for f in read_folder(folder)[1]]


def test_hostile_files_are_findings_and_not_followed(tmp_path):
    secret = tmp_path / "secret.yaml"
    secret.write_text("token: 1\n", encoding="utf-8")
    linked = skill(tmp_path / "linked")
    (linked / "card.yaml").symlink_to(secret)
    skills, findings = read_folder(linked)
    assert [f.rule for f in findings] == ["import-file"]
    assert skills[0].card_keys == []
    large = skill(tmp_path / "large")
    (large / "card.yaml").write_bytes(b"#" * 2_000_001)
    bombs = skill(tmp_path / "bombs")
    (bombs / "card.yaml").write_text("a: &a [1]\nb: [*a, *a]\n", encoding="utf-8")
    deep = skill(tmp_path / "deep")
    (deep / "card.yaml").write_text("[" * 100_000, encoding="utf-8")
    tagged = skill(tmp_path / "tagged")
    (tagged / "card.yaml").write_text("a: !!python/object/apply:os.system [ls]\n", encoding="utf-8")
    for folder in (large, bombs, deep, tagged):
        assert set(rules_of(folder)) == {"import-file"}


def test_modules_that_are_no_words_are_no_modules(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "SKILL.md").write_text("---\nname: odd\ndescription: Odd rows.\n---\nText.\n", encoding="utf-8")
    card = "row: {offload_modules: [{a: 1}, attn_proj], tp: 1}\n"
    (tmp_path / "odd" / "card.yaml").write_text(card, encoding="utf-8")
    assert ["core_attn" in f.message for f in read_folder(tmp_path)[1]] == [True]


def test_a_long_skill_is_found(tmp_path):
    assert rules_of(skill(tmp_path / "long", "line\n" * 600)) == ["import-length"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "Bad_Name"),
        ("name", "a--b"),
        ("description", '""'),
        ("description", "x" * 1025),
        ("compatibility", "y" * 501),
        ("metadata", "\n  a: [1]"),
    ],
)
def test_front_matter_outside_the_specification_is_found(tmp_path, name, value):
    folder = tmp_path / "it"
    folder.mkdir()
    fields = {"name": "it", "description": "What it does."} | {name: value}
    (folder / "SKILL.md").write_text("---\n" + "".join(f"{k}: {v}\n" for k, v in fields.items()) + "---\n", encoding="utf-8")
    assert rules_of(folder) == ["import-front-matter"]


def test_a_folder_without_skills_is_refused(tmp_path):
    with pytest.raises(PlaybookError, match="holds no skill"):
        read_folder(tmp_path)
    with pytest.raises(PlaybookError, match="is no folder"):
        read_folder(tmp_path / "none")


def test_nothing_is_written(tmp_path):
    copy = tmp_path / "skills"
    shutil.copytree(FIXTURES, copy)
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    read_folder(copy)
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*")} == before
