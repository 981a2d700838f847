"""The pure part of claims: values in, values out."""
