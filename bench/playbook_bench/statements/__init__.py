"""Claims that are settled without a series: by arithmetic, or by a rule that the harness enforces."""

from __future__ import annotations

from typing import Any

Statement = tuple[bool, str, dict[str, Any]]
"""Whether a claim holds, one sentence that says why, and the figures behind it."""
