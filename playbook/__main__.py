"""`python -m playbook` is `playbook`, in a checkout with the packages that lie there.

It names the command line, and imports nothing of it.
"""

import sys
from runpy import run_module

from playbook.paths import repo_root, sources

if __name__ == "__main__":
    sys.path[:0] = sources(repo_root())
    run_module("playbook_app", run_name="__main__", alter_sys=True)
