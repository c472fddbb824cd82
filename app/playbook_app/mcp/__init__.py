"""The MCP server and the types of its answers."""
