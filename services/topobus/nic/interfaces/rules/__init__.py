"""The pure part of interfaces: values in, values out."""
