"""The trainer that the harness measures; usable without any card."""
