"""Wire formats as values: what is read and written, without any I/O."""
