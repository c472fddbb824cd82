"""`python -m playbook` is `playbook`."""

from playbook.cli.app import main

if __name__ == "__main__":
    main()
