"""Wire formats as values: what is read and written, without the reading and writing."""
