"""Devices that several containers or claims share."""
