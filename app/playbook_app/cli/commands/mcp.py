"""`playbook mcp`: the server for agents."""

from __future__ import annotations

import signal

from playbook.errors import PlaybookError
from playbook_app.cli.options import commands
from playbook_app.mcp.answers import library_here

app = commands()


@app.command()
def mcp() -> None:
    """Serve diagnosis, plans, cards, evidence and layout rules to an agent over the Model Context Protocol on stdio; read-only."""
    try:
        from playbook_app.mcp.server import server
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise PlaybookError("the package 'mcp' is not installed; run pip install '.[mcp]' in a clone of Playbook") from e
    serving = server(library_here())
    # A thread of the library waits for the next line and would hold an interrupted server until one comes. It writes nothing, so it may
    # just end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serving.run("stdio")
