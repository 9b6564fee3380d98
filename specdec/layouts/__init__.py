"""How each family stands on disk outside this project: names, shapes and config fields, in both directions."""
