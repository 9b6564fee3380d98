"""The commands: each file is `python scripts/NAME.py key=value ..`, and a verb of specdec/command.py."""
