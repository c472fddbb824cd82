"""Calls of the MCP server's tools in process."""

import anyio
from mcp import Client

from playbook_app.mcp.server import server

MAX_SUMMARY = 6000
"""Characters of a text that is a summary."""
_serving = []
"""The library that was asked last, and its server: to build one takes longer than most calls."""


def serving(library):
    """A server for that library, the same one while the library is the same."""
    if not _serving or _serving[0] is not library:
        _serving[:] = library, server(library)
    return _serving[1]


def ask(library, tool, **arguments):
    """One call by the official client."""

    async def call():
        async with Client(serving(library)) as client:
            return await client.call_tool(tool, arguments)

    return anyio.run(call)


def answer(library, tool, **arguments):
    """The structured answer of a call that is no error, and whose text is a summary."""
    result = ask(library, tool, **arguments)
    assert not result.is_error, result.content[0].text
    assert len(result.content[0].text) < MAX_SUMMARY
    return result.structured_content


def refusal(library, tool, **arguments):
    """The text of a call that is an error."""
    result = ask(library, tool, **arguments)
    assert result.is_error
    return result.content[0].text
