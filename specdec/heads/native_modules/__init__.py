"""The MTP modules that models ship, in their files: names, reading, diagnosis, and lists of plain layers."""
