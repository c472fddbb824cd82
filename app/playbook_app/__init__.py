"""What people and agents call: the command line, the MCP server, the site, and the services that they share."""
