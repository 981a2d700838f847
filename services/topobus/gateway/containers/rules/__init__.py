"""The pure part of containers: values in, values out."""
