"""The linter of cards: one module for each family of rules, one table of them all."""
