"""From a command to verdicts: series of matched launches, the gate, bisection."""
