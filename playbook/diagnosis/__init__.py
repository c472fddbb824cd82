"""Diagnosis of a training run's speed: where it stands, which wall is likely, and what to try first."""
