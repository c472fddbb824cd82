"""`python -m playbook` is `playbook`."""

from playbook.cli import main

if __name__ == "__main__":
    main()
