"""The pure part of discovery: values in, values out."""
