"""Skills: what ships is valid and true, what is wrong is found, and an export works by itself."""

from __future__ import annotations

import shutil

import pytest
import yaml
from in_process import document, refused, run
from skills_ref import validate as reference_validate

from playbook.cards.load import load_all
from playbook.cards.model import Card
from playbook.errors import FileError
from playbook.paths import data_root
from playbook.skills.model import FIGURE, check, index, load_skills, read_skill, read_skills
from playbook_app.cli.app import app, run_command
from playbook_app.cli.commands.skills import known_here
from playbook_app.services.standing import stock_here

SHIPPED = sorted(p.name for p in data_root("skills").iterdir() if p.is_dir())

GOOD = """---
name: sample
description: >-
  Do a thing. Use when the thing is wanted.
metadata:
  playbook-cards: moe-dispatcher-choice
---

# Sample

Read W9 with `playbook cards show moe-dispatcher-choice`.
"""


@pytest.fixture(scope="module")
def known():
    return known_here(SHIPPED)


def write(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(text, encoding="utf-8")
    return folder


def findings(tmp_path, known, text, name="sample"):
    """What reading and checking a skill of that text says, line first."""
    try:
        skill = read_skill(write(tmp_path / name, text))
    except FileError as e:
        return [f"{f.line}: {f.message}" for f in e.findings]
    return [f"{f.line}: {f.message}" for f in check(skill, known)]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_specifications_own_reader_accepts_each_skill(name):
    assert reference_validate(data_root("skills") / name) == []


def test_what_ships_has_no_finding_and_a_fresh_index(capsys):
    code, out, err = run(capsys, "skills", "check")
    assert (code, err) == (0, "")
    assert f"{len(SHIPPED)} skills: no findings" in out


def test_every_skill_begins_with_its_question_and_gives_commands():
    for skill in load_skills(data_root("skills")).values():
        text = "\n".join(skill.lines)
        assert skill.title.endswith("?"), skill.name
        assert "```console" in text, skill.name
        assert "stop" in text.lower() or "leave" in text, skill.name


def test_a_good_skill_has_no_finding(tmp_path, known):
    assert findings(tmp_path, known, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: sample", "name: Sample", "'name': string should match"),
        ("name: sample", "name: other", "2: name 'other' differs from the folder 'sample'"),
        ("name: sample", f"name: {'x' * 65}", "at most 64"),
        ("Do a thing.", "x" * 1024, "at most 1024"),
        ("Use when", "For when", "3: description does not say when to use"),
        ("Do a thing.", "Do <b>a</b> thing.", "holds < or >"),
        ("metadata:", "when_to_use: now\nmetadata:", "5: unknown key 'when_to_use'"),
        ("  playbook-cards: moe-dispatcher-choice", "  n: 1", "valid string"),
        ("metadata:\n  playbook-cards: moe-dispatcher-choice", "metadata: {playbook-cards: moe-dispatcher-choice}", "one key per line"),
        (
            "playbook-cards: moe-dispatcher-choice",
            "playbook-cards: moe-dispatcher-choise",
            "card 'moe-dispatcher-choise' does not exist; did you",
        ),
        ("playbook-cards: moe-dispatcher-choice", "other: x", "names no card"),
        ("playbook-cards: moe-dispatcher-choice", "playbook-cards: vlm-real-data", "commands name moe-dispatcher-choice, which"),
        ("---\n\n# Sample", "\n# Sample", "expected front matter"),
        ("# Sample", "\n" * 500, "at most 500"),
        ("# Sample", "x" * 20_001, "characters of instructions"),
        ("Read W9", "Read W99", "11: claim 'W99' does not exist"),
        ("Read W9", "Read W9 on H200 and Z7", "claim 'Z7' does not exist"),
        ("Read W9", "Read `moe-dispatch-choice`", "'moe-dispatch-choice' is no card, case or skill"),
        ("cards show moe-dispatcher-choice", "cards show no-such-card", "card 'no-such-card' does not exist"),
        ("cards show moe-dispatcher-choice", "cards shaw moe-dispatcher-choice", "has no command 'cards shaw'"),
        ("cards show moe-dispatcher-choice", "cards show moe-dispatcher-choice --yaml", "No such option: --yaml"),
        ("cards show moe-dispatcher-choice", "confirm moe-dispatcher-choice/V1", "has no claim 'V1'"),
        ("cards show moe-dispatcher-choice", "confirm moe-dispatcher-choice --pairs many", "valid int"),
        ("cards show moe-dispatcher-choice", "gate moe-dispatch-bytes", "Missing option '--baseline'"),
        ("cards show moe-dispatcher-choice", "bench run no-such-case", "case 'no-such-case' does not exist"),
        ("cards show moe-dispatcher-choice", "train trainer/configs/nowhere.yaml", "does not ship"),
        ("cards show moe-dispatcher-choice", "train ../../etc/passwd", "does not ship"),
        ("cards show moe-dispatcher-choice", "train trainer/configs/qwen3_moe_tiny.yaml parallel.epp=2", "no key 'parallel.epp'"),
        ("`playbook", "\n```console\n$ playbook bench runn CASE\n```\n`playbook", "has no command 'bench runn'"),
        ("`playbook", "\n```console\nplaybook confirm 'CARD\n```\n`playbook", "quotes do not close"),
        ("`playbook", "\n```console\nplaybook confirm \\\n  --frobnicate\n```\n`playbook", "--frobnicate"),
        ("# Sample", "[a](references/none.md)", "leads to no file"),
        ("# Sample", "[a](../../docs/guide/verdicts.md)", "leads out of the folder"),
        ("# Sample", "[a](/etc/passwd)", "neither relative nor https"),
        ("# Sample", "[a](file:///etc/passwd)", "neither relative nor https"),
        ("# Sample", "It gains 7.6 % here.", "'7.6 %' is a figure"),
        ("# Sample", "It reaches `1,200 tokens/s`.", "is a figure"),
        ("# Sample", "```text\nstep 712 ms\n```", "'712 ms' is a figure"),
    ],
)
def test_what_is_wrong_is_found(tmp_path, known, old, new, says):
    assert old in GOOD
    found = findings(tmp_path, known, GOOD.replace(old, new, 1))
    assert any(says in f for f in found), found


@pytest.mark.parametrize(
    ("texts", "are"),
    [
        (("5 %", "1.3x", "~2×", "40 GiB", "12.5 ms", "600 TFLOPs", "90 seconds", "4096 tokens", "10 points", "700 W"), True),
        (("3 x H200", "a GPU with 2 chunks", "128K", "exit code 2", "PP x max(TP x CP)", "Qwen3-30B", "step 4"), False),
    ],
    ids=["numbers with a unit", "counts and names"],
)
def test_what_is_a_figure(texts, are):
    assert [text for text in texts if bool(FIGURE.search(text)) is not are] == []


def test_links_from_the_shipped_folder_may_reach_what_ships_and_nothing_else(tmp_path, monkeypatch, known):
    from playbook.skills import model as skills_check

    monkeypatch.setattr(skills_check, "data_root", lambda kind: tmp_path if kind == "skills" else data_root(kind))
    assert findings(tmp_path, known, GOOD.replace("# Sample", "[a](../../docs/guide/verdicts.md#one-thing-changes)")) == []
    for target in (
        "../../README.md",
        "../../../etc/passwd",
        "../../docs/guide/../../pyproject.toml",
        "../../cards/nowhere.yaml",
        "../other/SKILL.md",
    ):
        assert "leads to no file that ships" in findings(tmp_path, known, GOOD.replace("# Sample", f"[a]({target})"))[0]


def test_a_link_may_not_leave_by_a_symlink(tmp_path, known):
    folder = write(tmp_path / "sample", GOOD.replace("# Sample", "[a](secret.md)"))
    (tmp_path / "outside.md").write_text("x", encoding="utf-8")
    (folder / "secret.md").symlink_to(tmp_path / "outside.md")
    assert "leads to no file" in check(read_skill(folder), known)[0].message


@pytest.mark.parametrize(
    "content", [b"", b"---\n", b"\xff\xfe", b"---\n- a\n---\nx", b"---\nname: &a x\n---\nx", b"---\n" + b"[" * 5000 + b"\n---\nx"]
)
def test_hostile_files_are_findings(tmp_path, content):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "SKILL.md").write_bytes(content)
    skills, found = read_skills(tmp_path)
    assert skills == []
    assert found


def test_a_file_that_never_ends_is_too_large(tmp_path):
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "SKILL.md").symlink_to("/dev/zero")
    assert [f.message for f in read_skills(tmp_path)[1]] == ["is larger than 2000000 bytes"]


def test_whatever_is_no_skill_is_reported(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "stray.txt").write_text("x", encoding="utf-8")
    code, out, err = run(capsys, "skills", "check", str(tmp_path))
    assert (code, out) == (2, "")
    assert "stray.txt:1:1: is a file among the skills" in err
    assert "cannot be read" in err


def test_a_stale_index_is_found(tmp_path, capsys):
    write(tmp_path / "sample", GOOD)
    (tmp_path / "README.md").write_text(index(load_skills(tmp_path).values()), encoding="utf-8")
    assert run(capsys, "skills", "check", str(tmp_path))[0] == 0
    write(tmp_path / "sample", GOOD.replace("Do a thing.", "Do another thing."))
    assert "run `playbook skills index`" in refused(capsys, "skills", "check", str(tmp_path))


def test_skills_are_listed(capsys):
    rows = document(capsys, "skills", "list")
    assert [r["name"] for r in rows] == SHIPPED
    assert all(set(r["cards"]) <= set(load_all()) for r in rows)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("away") / "skills"
    assert run_command(app, ["skills", "export", str(out)]) == 0
    return out


def test_an_exported_folder_stands_by_itself(exported, capsys):
    assert sorted(p.name for p in exported.iterdir()) == SHIPPED
    for folder in exported.iterdir():
        assert reference_validate(folder) == []
        assert "](.." not in (folder / "SKILL.md").read_text(encoding="utf-8")
        for page in (folder / "references").glob("*.md"):
            assert not [link for link in page.read_text(encoding="utf-8").split("](")[1:] if not link.startswith("https://")]
    # Moved somewhere else, every link still resolves inside the folder.
    assert run(capsys, "skills", "check", str(exported)) == (0, f"{len(SHIPPED)} skills: no findings\n", "")


def test_the_exported_gate_carries_the_jobs_that_it_says_to_copy(exported):
    references = exported / "gate-change" / "references"
    assert {p.name for p in references.glob("*.yml")} == {p.name for p in (data_root("guide") / "ci").iterdir()}


def test_an_exported_folder_carries_its_cards_with_the_newest_verdicts(exported):
    data = yaml.safe_load((exported / "pick-moe-dispatcher" / "card.yaml").read_text(encoding="utf-8"))
    assert [Card.model_validate(c) for c in data["cards"]] == [load_all()["moe-dispatcher-choice"]]
    machines = {v["machine"]: v for v in data["verdicts"]["W9"]}
    newest = max((r for r in stock_here().records if r.claim == "W9" and r.machine == "h200x4"), key=lambda r: r.created)
    assert machines["h200x4"]["evidence"] == newest.id
    assert machines["h200x4"]["status"] == newest.status
    assert set(data["verdicts"]) >= {"W9", "W9.m", "W10", "V5"}


def test_an_export_replaces_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    (out / "choose-layout").mkdir(parents=True)
    assert "an export replaces nothing" in refused(capsys, "skills", "export", str(out), "--skill", "choose-layout")
    assert [p.name for p in out.iterdir()] == ["choose-layout"]
    shutil.rmtree(out)
    assert run(capsys, "skills", "export", str(out), "--skill", "add-card")[0] == 0
    assert [p.name for p in out.iterdir()] == ["add-card"]
    assert "did you mean 'add-card'" in refused(capsys, "skills", "export", str(out), "--skill", "add-crad")
