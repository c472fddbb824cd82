"""The configuration: its tree, its checks, and what follows from it without a run."""
