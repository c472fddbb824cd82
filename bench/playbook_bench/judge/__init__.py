"""From runs to a verdict: statistics, guards, receipts."""
