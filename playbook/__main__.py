"""`python -m playbook` is `playbook`: it runs the command line by name, and imports nothing of it."""

from runpy import run_module

if __name__ == "__main__":
    run_module("playbook_app", run_name="__main__", alter_sys=True)
