"""Agent Skills: how an agent acts on cards."""
