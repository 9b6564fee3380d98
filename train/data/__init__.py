"""Rows of text: reading, chat templates, encoding, packing and loading."""
