"""The pure part of gateway: values in, values out."""
