"""One rank of our trainer as a command that prints a JSON line for each step, to stand beside other trainers in a case of kind `command`.

`trainer_steps.py CONFIG [key.path=value ...] [--trace FILE]`, which leaves a trace of the timed steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "trainer")]

from playbook_trainer.__main__ import main as train  # noqa: E402
from playbook_trainer.config.tree import load, parse_overrides  # noqa: E402


def main(words: list[str]) -> int:
    """Train into a folder that is removed, and print what `metrics.jsonl` says of each step."""
    words, trace = (words[:-2], words[-1]) if words[-2:-1] == ["--trace"] else (words, None)
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, f"output={folder}"]
        if trace:
            train_config = load(Path(words[0]), parse_overrides(words[1:])).train
            words += ["profile.kineto=true", f"profile.steps={train_config.steps - train_config.warmup_steps}"]
        code = train(words)
        if not code:
            print((Path(folder) / "metrics.jsonl").read_text(encoding="utf-8"), flush=True)
            if trace:
                shutil.copyfile(Path(folder) / "trace.json", trace)
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # taking the interpreter down takes a second, which no step has
