"""The harness: matched runs of the real trainer, statistics, verdicts and evidence."""
