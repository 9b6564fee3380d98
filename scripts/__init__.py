"""The commands: each file is `python scripts/NAME.py key=value ..` and the verb `specdec NAME key=value ..` (specdec/command.py)."""
