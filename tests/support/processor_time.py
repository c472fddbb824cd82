"""What a command takes of the processor. The clock would tell how busy the machine is."""

import os
import resource
import subprocess
import sys
from functools import cache

from playbook.paths import repo_root, sources

READS_RECORDS = "from playbook.paths import data_root; from playbook.records.read import read; read([data_root('results')])"
"""A measure of this processor: Python that reads every record that ships."""


def processor_seconds(*words: str) -> tuple[float, str]:
    """Seconds of user and system for a command of this Python in this tree, and what it printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(repo_root()))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@cache
def slower() -> float:
    """How many times as long this processor takes as the one that limits in seconds are for, which reads all records in 1.1 s; at least once."""
    return max(1.0, processor_seconds("-c", READS_RECORDS)[0] / 1.1)
