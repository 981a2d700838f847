"""FPGA bitstreams: their formats, and the store that a node programs cards from."""
