"""Shapes: parts of a machine, such as a GPU with its nearest NIC, that one claim gets as one device."""
