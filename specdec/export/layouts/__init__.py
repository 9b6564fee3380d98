"""Public layouts of each family: the names, shapes and config fields of its files, for export and for import."""
