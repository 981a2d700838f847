"""The pure part of what is written to a cluster: values in, values out."""
