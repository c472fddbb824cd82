"""Pages about speed before a run: published runs, answers of the planner, and worked examples."""
