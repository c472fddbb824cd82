"""Where the time of a step goes: traces, and the table of time per range."""
