"""Evidence files: whole or not at all, never replaced, and checked when read."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from stored import long_run, record

from playbook import paths
from playbook.errors import StoreError
from playbook.records.evidence import Plan, seal
from playbook_bench.launch.local import LocalLauncher
from playbook_bench.run import confirm, replay, report, store
from playbook_bench.run.options import Options


def test_ids_sort_by_time_and_differ():
    ids = [store.new_id(t) for t in (1.0, 2.0, 3e9)]
    assert ids == sorted(ids)
    assert len({store.new_id(5.0) for _ in range(100)}) == 100


def test_a_record_comes_back_as_it_was_written(tmp_path):
    evidence = record()
    path = store.write(evidence, tmp_path)
    assert path == tmp_path / "cpu" / f"{evidence.evidence_id}.json"
    assert store.load(path) == evidence
    assert not list(tmp_path.rglob("*.tmp"))


def test_git_ignores_the_folder_of_records_unless_somebody_else_made_it(tmp_path):
    store.write(record(), tmp_path / "new" / ".playbook" / "results")
    assert (tmp_path / "new" / ".playbook" / ".gitignore").read_text() == "*\n"
    (tmp_path / "old" / ".playbook").mkdir(parents=True)
    store.write(record(), tmp_path / "old" / ".playbook" / "results")
    assert not (tmp_path / "old" / ".playbook" / ".gitignore").exists()


def test_a_record_is_never_replaced(tmp_path):
    evidence = record()
    path = store.write(evidence, tmp_path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="never replaced"):
        store.write(evidence, tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, call):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        store.write(record(), tmp_path)
    monkeypatch.undo()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_loses_no_verdict(tmp_path, monkeypatch, number):
    def none(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", none)
    evidence = record()
    path = store.write(evidence, tmp_path)
    assert store.load(path) == evidence
    assert not list(tmp_path.rglob("*.tmp"))
    with pytest.raises(StoreError, match="never replaced"):
        store.write(evidence, tmp_path)


WRITES = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import stored as t
from playbook.errors import StoreError
try:
    t.store.write(t.record(runs=[t.long_run()]), Path(sys.argv[1]))
except StoreError as e:
    print('StoreError', e)
print([str(p) for p in Path(sys.argv[1]).rglob('*') if p.is_file()])
"""


def printed(folder, *words, first=""):
    """What a process prints that writes a record into this folder, and then the files that are there."""
    command = [*words, sys.executable, "-c", first + WRITES.format(path=sys.path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_file_size_limit_leaves_nothing_half_written(tmp_path):
    said, files = printed(tmp_path, first="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n")
    assert (said[:10], files) == ("StoreError", "[]")


def test_a_really_full_disk_leaves_nothing_half_written(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    small = f"mount -t tmpfs -o size=64k tmpfs {disk} && "
    if not Path("/usr/bin/unshare").exists() or subprocess.run(["unshare", "-rm", "sh", "-c", small + "true"], check=False).returncode:
        pytest.skip("this machine does not let a user mount a small disk")
    said, files = printed(disk, "unshare", "-rm", "sh", "-c", small + 'exec "$@"', "sh")
    assert "No space left on device" in said
    assert files == "[]"


def test_only_a_record_that_replays_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "data_root", lambda kind: tmp_path / "accepted")
    good = record("not_applicable")
    good = seal(good.model_copy(update={"derived": replay.derive(good.measured)}))
    path = store.write(good, tmp_path)
    target = replay.accept(path)
    assert target.read_bytes() == path.read_bytes()
    with pytest.raises(StoreError, match="never replaced"):
        replay.accept(path)
    bad = store.write(record("confirmed"), tmp_path)
    with pytest.raises(StoreError, match="does not replay"):
        replay.accept(bad)


@pytest.mark.parametrize(
    ("place", "said"), [("site-packages/playbook/_data/results", "installed copy"), ("bench/results", "checkout that you may write to")]
)
def test_where_no_repository_takes_a_record_one_message_says_what_to_do(tmp_path, monkeypatch, place, said):
    """An installed wheel, whose folder an upgrade removes, and a folder that takes no files; no option of `confirm` is advised."""
    installed, results = "playbook" in place, tmp_path / place
    monkeypatch.setattr(replay, "data_root", lambda kind: results)
    if installed:
        monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "site-packages/playbook")
    results.parent.mkdir(parents=True)
    results.mkdir() if installed else results.write_text("no folder can be made in a file")
    good = record("not_applicable")
    path = store.write(seal(good.model_copy(update={"derived": replay.derive(good.measured)})), tmp_path)
    with pytest.raises(StoreError, match=said) as caught:
        replay.accept(path)
    assert "--results" not in str(caught.value)
    assert not [p for p in tmp_path.rglob("*.json") if p != path]


def test_exit_codes():
    def code(*statuses):
        return confirm.exit_code([SimpleNamespace(status=s, counts=True) for s in statuses])

    assert code("confirmed", "confirmed") == 0
    assert code("confirmed", "not_applicable") == 0
    assert code("not_applicable") == 4
    assert code("confirmed", "inconclusive") == 3
    assert code("inconclusive", "refuted") == 1
    assert code("refuted", "error", "confirmed") == 5


def test_where_a_claim_is_named_its_mechanism_check_does_not_speak_for_it(tmp_path):
    """Its verdict is there, and in the exit code where it was named itself, or with its whole card."""

    def tested(target):
        out = confirm.run([target], Options(results=tmp_path, launcher=LocalLauncher(["false"]), profile="cpu"))
        return {o.name: o.status for o in out}, confirm.exit_code(out), report.as_json(out)["exit_code"]

    assert tested("moe-dispatcher-choice/W9") == ({"W9": "not_applicable", "W9.m": "error"}, 4, 4)
    assert tested("moe-dispatcher-choice/W9.m") == ({"W9.m": "error"}, 5, 5)
    assert tested("moe-dispatcher-choice")[1:] == (5, 5)


def test_a_record_is_readable_line_by_line(tmp_path):
    text = store.render(record(runs=[long_run(), long_run()]))
    assert json.loads(text)["schema_version"] == "evidence/1"
    assert len(text.splitlines()) > 15


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"alpha": 0.05', '"alpha": NaN'), "finite number"),
        (('"alpha": 0.05', '"alpha": 0'), "alpha: Input should be greater than 0"),
        (('"looks": [4, 8, 12]', '"looks": []'), "looks"),
        (('"total": 0.0', '"total": 1e999'), "finite number"),
        (('"total": 0.0', '"total": Infinity'), "finite number"),
        (('"created": "2026', '"created": "yesterday, 2026'), "created"),
    ],
)
def test_a_figure_that_is_none_is_refused_when_it_is_read(tmp_path, change, says):
    path = store.write(record(runs=[long_run()], plan=Plan(rules=2, seed=0, looks=[4, 8, 12])), tmp_path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(StoreError, match=f"is no evidence record.*{says}"):
        store.load(path)


@pytest.mark.parametrize(("created", "expires"), [("2999-01-01T00:00:00Z", "2999-02-01"), ("2026-01-01T00:00:00Z", "9999-12-31")])
def test_a_record_from_the_future_is_not_accepted(tmp_path, monkeypatch, created, expires):
    monkeypatch.setattr(replay, "data_root", lambda kind: tmp_path / "accepted")
    monkeypatch.setattr(replay, "replay", lambda path: (True, []))
    path = store.write(seal(record(created=created).model_copy(update={"expires": expires})), tmp_path)
    with pytest.raises(StoreError, match="later than it can"):
        replay.accept(path)
    assert not (tmp_path / "accepted").exists()
