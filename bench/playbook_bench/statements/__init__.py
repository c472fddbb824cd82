"""Claims that are settled without a series: by arithmetic, or by a rule that the harness enforces."""
