"""The commands; `playbook_app.cli.app` imports the one that is called."""
