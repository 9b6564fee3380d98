"""Layouts of other projects, both ways: `engines.make_form`, `folder.write_export`, `published.read_published`, `cards`."""
