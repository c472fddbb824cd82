"""What the MCP server offers to be read: cards and whole skills."""

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from playbook.cards.load import load_all
from playbook.cards.model import guidance
from playbook_app.mcp.server import MAX_CHARS, server


def test_resources_are_cards_and_whole_skills(library):
    async def look():
        async with Client(server(library)) as client:
            listed = [str(r.uri) for r in (await client.list_resources()).resources]
            texts = {uri: (await client.read_resource(uri)).contents[0].text for uri in listed}
            for wrong in ("card://../../etc/passwd", "skill://confirm-claim/../../pyproject.toml", "file:///etc/passwd"):
                with pytest.raises(MCPError, match=r"[Uu]nknown resource"):
                    await client.read_resource(wrong)
            return texts

    texts = anyio.run(look)
    assert {uri for uri in texts if uri.startswith("card:")} == {f"card://{c}" for c in guidance(load_all())}
    assert max(map(len, texts.values())) < MAX_CHARS
    for uri, text in texts.items():
        if uri.endswith("/SKILL.md"):
            folder = uri.removesuffix("SKILL.md")
            links = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
            assert links
            assert all(folder + link in texts for link in links), uri
