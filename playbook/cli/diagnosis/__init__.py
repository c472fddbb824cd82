"""`playbook diagnose`: the command, and changes of a plan in the words of a trainer."""
