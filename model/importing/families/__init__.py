"""Published decoders: a table for each family, and the fields of such a table."""
