"""The pure part of controller: values in, values out."""
