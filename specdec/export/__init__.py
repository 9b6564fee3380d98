"""Layouts of other projects, both ways: `engines.make_form`, `folder.write_folder`, `published.read_published`."""
