"""Tools of an MCP server (Model Context Protocol), which the key ``mcp`` of an entry gives to its environment."""
