"""The CPU path near this machine's limit."""
