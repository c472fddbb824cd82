"""What the faces share, by packages that do not know each other: checks, exports, changes, jobs."""
