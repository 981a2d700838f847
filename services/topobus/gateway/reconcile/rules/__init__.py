"""The pure part of reconciliation: values in, values out."""
