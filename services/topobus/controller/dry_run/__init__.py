"""Where claims would be allocated, or why not, with nothing written anywhere."""
