"""Calls of the MCP server's tools in process."""

import anyio
from mcp import Client

from playbook_app.mcp.server import server


def ask(library, tool, **arguments):
    """One call by the official client."""

    async def call():
        async with Client(server(library)) as client:
            return await client.call_tool(tool, arguments)

    return anyio.run(call)


def answer(library, tool, **arguments):
    """The structured answer of a call that is no error."""
    result = ask(library, tool, **arguments)
    assert not result.is_error, result.content[0].text
    return result.structured_content
