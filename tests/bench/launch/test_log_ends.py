"""The end of a log, as it goes into records and messages."""

from playbook_bench.launch.outcome import tail


def test_the_home_folder_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    log = tmp_path / "rank0.log"
    log.write_text('File "/home/ada/lib/torch.py", /mnt/home/ada/x, /home/adams/y, in /home/ada')
    assert tail(log) == 'File "~/lib/torch.py", /mnt/home/ada/x, /home/adams/y, in ~'


def test_where_a_machine_keeps_its_packages_is_not_kept(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text(
        'File "/srv/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 7\n/usr/lib/dist-packages/a.py: b, ./site-packages/c'
    )
    assert tail(log) == 'File "site-packages/torch/nn/modules/module.py", line 7\ndist-packages/a.py: b, ./site-packages/c'
