"""Commands that are not ours, as runs of the harness: what a variant launches, how it is launched, and the files of commits."""
