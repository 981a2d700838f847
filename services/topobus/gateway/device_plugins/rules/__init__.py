"""The pure part of device plugins: values in, values out."""
