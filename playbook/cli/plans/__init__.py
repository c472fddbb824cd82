"""`playbook plan`: one module for each of its commands."""
