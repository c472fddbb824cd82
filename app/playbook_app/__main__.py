"""`python -m playbook` is `playbook`."""

from playbook_app.cli.app import main

if __name__ == "__main__":
    main()
