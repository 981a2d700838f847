"""Values as text, tables and drawings for people."""
