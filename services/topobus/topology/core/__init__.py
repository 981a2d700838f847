"""The pure part of topology: values in, values out."""
