"""What was measured, and for what: cases, evidence, machines, and what makes a verdict stale."""
