"""What a reader of a guide does: writes the files that it shows, and types the lines of its console blocks."""

import re
import stat

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def consoles(page, folder, changed=lambda text: text):
    """The text of each console block, once the files that the page shows before it are written below the folder."""
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(changed(text), encoding="utf-8")
        elif language == "console":
            yield text


def script(path, text):
    """A command of a shell's PATH."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)
