"""The drafters: one file and one configuration each."""
