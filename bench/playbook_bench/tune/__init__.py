"""Tuning: which of many settings make a run faster, at a stated chance to keep one that does not."""
