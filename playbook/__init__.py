"""Playbook: performance guidance for training large models, stated as claims that a machine can check."""

__version__ = "0.1.0"
