"""Logs of any trainer: one reader, one adapter for each kind of log, and the same checks for all."""

from playbook_bench.logs.fields import LoggedStep, StepLog
from playbook_bench.logs.reading import NoAdapter, read, rl_steps

__all__ = ["LoggedStep", "NoAdapter", "StepLog", "read", "rl_steps"]
